#!/usr/bin/env python3
"""Checks the answers of `strobe simulate capacity` in 12 scenarios: 8 long runs with seeds of their own at each answer, which must
hold every limit, and 8 at 1.05 times the answer, which must not. Writes bench/results/sim-capacity.json with machine, commit
and commands, and the table of docs/simulate.md. Takes about ten minutes on two cores.

    cargo build --release && bench/sim_capacity.py [NAME...]
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sim_docs

ROOT = Path(__file__).resolve().parents[1]
STROBE = os.environ.get("STROBE", str(ROOT / "target/release/strobe"))
COST = "--cost linear:base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns"
RUNS, REQUESTS, ABOVE = 8, 100_000, 1.05
MIXED = "--input-tokens lognormal:256,0.8 --output-tokens geometric:64"

# Name, what it is, its options; TRACE stands for the generated recording.
SCENARIOS = [
    ("server-both", "one server, TTFT and TPOT", f"--slo ttft:p99:50ms --slo tpot:p99:8ms {COST}"),
    ("server-tpot", "one server, TPOT binds", f"--slo tpot:p99:4ms {COST}"),
    ("server-e2e", "one server, mixed lengths, E2E", f"--slo e2e:p99:2s {MIXED} {COST}"),
    ("server-kv", "one server, 256 blocks", f"--slo ttft:p99:100ms --kv-cache-blocks 256 {COST}"),
    ("server-tokens", "one server, 512 tokens per iteration", f"--slo ttft:p99:100ms --max-num-tokens 512 {COST}"),
    ("server-bursts", "one server, bursts (gamma 0.25)", f"--slo ttft:p99:100ms --arrival gamma --burstiness 0.25 {COST}"),
    ("dynamic", "dynamic batcher, E2E", "--policy dynamic --max-batch-size 8 --max-queue-delay 5ms --output-tokens 1 "
     "--slo e2e:p99:40ms --cost linear:base=4ms,per_request=500us"),
    ("cluster", "4 servers, least outstanding", f"--replicas 4 --routing least-outstanding --slo ttft:p99:50ms {MIXED} {COST}"),
    ("pools", "2 servers for prompts, 2 for generation",
     f"--replicas 4 --prefill-replicas 2 --transfer base=1ms,per_token=2us --slo ttft:p99:50ms --slo tpot:p99:8ms {COST}"),
    ("turns", "conversations of 3 turns, saturation", f"--turns 3 --slo tpot:p99:20ms {COST}"),
    ("turns-reuse", "conversations of 4 turns, prefixes reused",
     f"--turns 4 --think-time 500ms --kv-cache-reuse enable --kv-cache-blocks 4096 --slo ttft:p99:50ms {COST}"),
    ("trace", "a bursty recording, 2 servers, power of 2",
     f"--trace TRACE --replicas 2 --routing power-of-2 --slo ttft:p99:100ms {COST}"),
]


def recording(path):
    """40,000 requests at 50 per second on average, the rate of which changes every 20 s."""
    draw = random.Random(7)
    now, until, rate = 0.0, 0.0, 50.0
    rows = ["arrival_s,input_tokens,output_tokens"]
    for _ in range(40_000):
        if now >= until:
            until, rate = now + 20.0, draw.choice([30.0, 50.0, 70.0])
        now += draw.expovariate(rate)
        lengths = int(min(4096, max(1, draw.lognormvariate(5.0, 0.8)))), int(min(1024, 1 + draw.expovariate(1 / 64)))
        rows.append(f"{now:.6f},{lengths[0]},{lengths[1]}")
    path.write_text("\n".join(rows) + "\n")


def strobe(words):
    done = subprocess.run([STROBE, "simulate", *words.split()], capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"strobe simulate {words}\n{done.stderr}")
    return json.loads(done.stdout), done.returncode


def long_run(job):
    options, at, seed = job
    report, code = strobe(f"{options} {at} --seed {seed} --replications 0 --json")
    met = all(limit["met"] for limit in report["limits"]) and report["num_refused"] == 0
    return met and code == 0


def check(scenario, trace, pool):
    name, what, options = scenario
    options = options.replace("TRACE", str(trace))
    found = strobe(f"capacity {options} --json")[0]["capacity"]

    def held(factor):
        if "rate_scale" in found:
            at = f"--rate-scale {factor * found['rate_scale']} --warmup-requests 4000"
        else:
            at = f"--rate {factor * found['rate_req_s']} --num-requests {REQUESTS} --warmup-requests {REQUESTS // 10}"
        seeds = [1_000_003 * (number + 1) + (0 if factor == 1 else 17) for number in range(RUNS)]
        return sum(pool.map(long_run, [(options, at, seed) for seed in seeds]))

    row = {"name": name, "what": what, "options": options.replace(str(trace), "trace.csv"), "capacity": found,
           "held_at_answer": held(1), "held_above": held(ABOVE), "runs": RUNS}
    print(f"{name}: {found['rate_req_s']:.1f}/s, held {row['held_at_answer']} of {RUNS}, "
          f"above {row['held_above']} of {RUNS}", flush=True)
    return row


def machine():
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    return {"cpu": model, "cores": os.cpu_count()}


def main():
    wanted = [row for row in SCENARIOS if not sys.argv[1:] or row[0] in sys.argv[1:]]
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    commit = git("rev-parse", "HEAD").stdout.strip()
    if git("diff", "--quiet", "HEAD", "--", "crates", "Cargo.toml").returncode:
        commit += " with local changes"
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        trace = Path(work) / "trace.csv"
        recording(trace)
        rows = [check(row, trace, pool) for row in wanted]
    result = {"name": "sim-capacity", "commit": commit, "command": "bench/sim_capacity.py", "machine": machine(),
              "requests_per_run": REQUESTS, "above": ABOVE, "rows": rows}
    if not sys.argv[1:]:
        (ROOT / "bench/results/sim-capacity.json").write_text(json.dumps(result, indent=1) + "\n")
        sim_docs.capacity()


if __name__ == "__main__":
    main()
