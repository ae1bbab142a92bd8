"""Compares how fast two builds of strobe make all reports of the same trace, in runs that take turns.

    python3 bench/traces_builds.py OLD NEW TRACE [COMMAND]

Adds the trace to bench/results/traces-builds.json (RESULTS=FILE: elsewhere); REPEAT=11 are the runs of each build. Leave the
machine alone meanwhile. bench/traces.sh and bench/traces_sqlite.sh scale a trace up and call this when OLD names a build.
"""
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.environ.get("RESULTS", os.path.join(ROOT, "results", "traces-builds.json"))


def run(strobe, trace):
    begun = time.perf_counter()
    process = subprocess.Popen([strobe, "analyze", trace, "--report", "all", "--json"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{strobe} analyze {trace} failed")
    return {"wall_s": time.perf_counter() - begun, "user_s": usage.ru_utime, "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_rss_bytes": usage.ru_maxrss * 1024}


def idle_ticks():
    """Ticks that all processors idled, and ticks in all."""
    ticks = [int(word) for word in open("/proc/stat").readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def main():
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    builds, trace = dict(zip(("old", "new"), sys.argv[1:3])), sys.argv[3]
    size = os.path.getsize(trace)
    with open(trace, "rb") as file:  # all runs find the file in memory
        while file.read(1 << 24):
            pass
    before = idle_ticks()
    time.sleep(2)
    after = idle_ticks()
    runs = {name: [] for name in builds}
    for number in range(int(os.environ.get("REPEAT", "11")) + 1):
        order = list(builds) if number % 2 else list(builds)[::-1]
        for name in order:
            measured = run(builds[name], trace)
            if number:  # the first round warms up
                runs[name].append(measured)
    keys = ("wall_s", "user_s", "cpu_s", "peak_rss_bytes")
    medians = {name: {key: statistics.median(run[key] for run in of) for key in keys} for name, of in runs.items()}
    pairs = {key: statistics.median(new[key] / old[key] for old, new in zip(runs["old"], runs["new"])) for key in keys}
    version = {name: subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip()
               for name, path in builds.items()}
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    entry = {
        "trace": os.path.basename(trace), "bytes": size, "builds": version,
        "command": sys.argv[4] if len(sys.argv) > 4 else "bench/traces_builds.py OLD NEW " + os.path.basename(trace),
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "kernel": os.uname().release,
                    "idle_before": round((after[0] - before[0]) / max(1, after[1] - before[1]), 3)},
        "medians": medians, "median_of_pairs_new_over_old": pairs, "runs": runs,
    }
    known = json.load(open(RESULTS)) if os.path.exists(RESULTS) else {"name": "traces-builds", "traces": []}
    kept = [other for other in known["traces"] if other["trace"] != entry["trace"]]
    known["traces"] = sorted(kept + [entry], key=lambda entry: entry["trace"])
    with open(RESULTS, "w") as file:
        json.dump(known, file, indent=2)
        file.write("\n")
    for name in builds:
        figures = medians[name]
        print(f"{name} ({version[name]}): {figures['wall_s']:.3f} s wall, {figures['user_s']:.3f} s user, "
              f"{figures['peak_rss_bytes'] / 1e6:.0f} MB peak")
    print("new / old, median of pairs: " + ", ".join(f"{key} {ratio:.3f}" for key, ratio in pairs.items()))


main()
