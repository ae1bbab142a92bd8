#!/usr/bin/env bash
# Measures how fast traces are read and put into all reports, against Holistic Trace Analysis and Python's json on the same
# file in the same run, and writes bench/results/traces-kineto.json with machine, commit and command. Leave the machine
# alone meanwhile. bench/traces_sqlite.sh does the same for Nsight Systems exports.
#
#   bench/traces.sh [TRACE]            a PyTorch profiler trace to scale up; default: the H200 one of STROBE_TEST_DATA
#   SIZE_MB=300 WORK=DIR REPEAT=5      raw size of the scaled trace, where to put it, runs of each
#   OLD=STROBE                         only compare this build with the present one, in turns: traces-builds.json
set -euo pipefail
cd "$(dirname "$0")/.."
trace="${1:-${STROBE_TEST_DATA:?set it to the folder of test data, or name a trace}/traces/kineto/h200/kineto_graph.json.gz}"
size_mb="${SIZE_MB:-300}"
work="${WORK:-$(mktemp -d)}"
mkdir -p "$work" bench/results
cargo build --release -p strobe-cli -p strobe-trace --bins --examples
bin="${CARGO_TARGET_DIR:-target}/release"
commit="$(git rev-parse HEAD)"
git diff --quiet HEAD -- crates Cargo.toml || commit="$commit with local changes"
if [ -n "${OLD:-}" ]; then
  "$bin/examples/scale_trace" "$trace" "$work/scaled-$size_mb.json" "$size_mb"
  exec python3 bench/traces_builds.py "$OLD" "$bin/strobe" "$work/scaled-$size_mb.json" \
    "OLD=$("$OLD" --version) SIZE_MB=$size_mb bench/traces.sh $(basename "$trace")"
fi
[ -d "$work/venv" ] || { python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q HolisticTraceAnalysis; }
"$bin/examples/scale_trace" "$trace" "$work/scaled.json" "$size_mb"

analyze=()
"$bin/strobe" analyze --help > /dev/null 2>&1 && analyze=("strobe analyze" "$bin/strobe analyze $work/scaled.json --report all --json")
bench_command="SIZE_MB=$size_mb bench/traces.sh $(basename "$trace")" bench_commit="$commit" bench_repeat="${REPEAT:-5}" \
python3 - bench/results/traces-kineto.json "$work/scaled.json" \
  "strobe import" "$bin/examples/read_trace $work/scaled.json" \
  ${analyze[@]+"${analyze[@]}"} \
  "python json" "python3 bench/traces_json.py $work/scaled.json" \
  "hta" "$work/venv/bin/python bench/traces_hta.py $work/scaled.json" << 'PYTHON'
import json, os, statistics, subprocess, sys, time

def run(command):
    """Wall and processor seconds, peak memory and the last line of output of one run."""
    begun = time.perf_counter()
    process = subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    if status:
        sys.exit(f"{command} failed")
    lines = output.splitlines()
    told = json.loads(lines[-1]) if lines and lines[-1].startswith("{") and lines[-1].endswith("}") else None
    return {"wall_s": round(wall, 3), "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
            "peak_rss_bytes": usage.ru_maxrss * 1024, "output": told}

result, trace, *named = sys.argv[1:]
size = os.path.getsize(trace)
open(trace, "rb").read(1 << 20)
report = {"bytes": size, "load_average_before": os.getloadavg()[0]}
for name, command in zip(named[::2], named[1::2]):
    repeats = int(os.environ["bench_repeat"])
    runs = [run(command) for _ in range(repeats)]
    wall = statistics.median(r["wall_s"] for r in runs)
    cpu = statistics.median(r["cpu_s"] for r in runs)
    peak = max(r["peak_rss_bytes"] for r in runs)
    report[name] = {"median_wall_s": wall, "median_cpu_s": cpu, "raw_mb_per_s": round(size / 1e6 / wall, 1),
                    "raw_mb_per_cpu_s": round(size / 1e6 / cpu, 1), "peak_rss_bytes": peak,
                    "peak_rss_per_raw_byte": round(peak / size, 3), "runs": runs}
    print(f"{name}: {wall:.3f} s wall, {cpu:.3f} s of processor, {size / 1e6 / wall:.0f} MB/s, "
          f"{peak / 1e6:.0f} MB peak ({peak / size:.2f} of the file)")
for name in (name for name in named[::2] if name.startswith("strobe")):
    for other in (name for name in named[::2] if not name.startswith("strobe")):
        faster = {key: round(report[other][f"median_{key}_s"] / report[name][f"median_{key}_s"], 1) for key in ("wall", "cpu")}
        report[f"{other} / {name}"] = faster
        print(f"{name} is {faster['wall']} times as fast as {other} (processor time: {faster['cpu']} times)")
cpu_name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
memory = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemTotal"))
machine = {"cpu": cpu_name, "cores": os.cpu_count(), "memory_bytes": memory, "kernel": os.uname().release}
json.dump({"name": "traces-kineto", "commit": os.environ["bench_commit"], "command": os.environ["bench_command"],
           "machine": machine, "report": report}, open(result, "w"), indent=2)
PYTHON
