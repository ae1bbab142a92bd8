#!/usr/bin/env python3
"""Cost of verifying an engine's checksums at load: starts with an engine that has them and with one that has none, interleaved.

    cargo build --release
    python3 bench/checksums.py target/release/strobe

Results go to bench/results/checksums.json. Needs a quiet machine and a minute.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

PAIRS = 40
MODEL = "tinyllama-1.1b"
ROOT = os.path.dirname(os.path.abspath(__file__))


def difference(with_sums, without):
    """Mean of the paired differences in ms and its 95 % confidence interval (Student, 39 degrees of freedom)."""
    pairs = [1e3 * (a - b) for a, b in zip(with_sums, without)]
    mean = sum(pairs) / len(pairs)
    error = (sum((pair - mean) ** 2 for pair in pairs) / (len(pairs) - 1) / len(pairs)) ** 0.5
    return {"mean_ms": mean, "low_ms": mean - 2.023 * error, "high_ms": mean + 2.023 * error}


def median(values):
    middle = sorted(values)
    return (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    strobe = os.path.abspath(sys.argv[1])
    work = tempfile.mkdtemp(prefix="strobe-checksums-")

    def call(*words):
        return subprocess.run([strobe, *words], cwd=work, check=True, capture_output=True, text=True).stdout

    call("build", "--model", MODEL, "--quantization", "int8", "--output-dir", "with")
    os.mkdir(f"{work}/without")
    for name in os.listdir(f"{work}/with"):
        os.link(f"{work}/with/{name}", f"{work}/without/{name}")
    config = json.load(open(f"{work}/with/config.json"))
    del config["checksums"]
    os.remove(f"{work}/without/config.json")
    json.dump(config, open(f"{work}/without/config.json", "w"))
    call("prepare-dataset", "--model", MODEL, "--output", "d.jsonl", "token-norm-dist", "--num-requests", "1",
         "--input-mean", "1", "--input-stdev", "0", "--output-mean", "1", "--output-stdev", "0")

    def start(engine):
        begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        call("bench", "throughput", "--engine-dir", engine, "--dataset", "d.jsonl", "--warmup", "0",
             "--weights-memory", "copy")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic() - begin, after.ru_utime - before.ru_utime

    start("with"), start("without")  # The page cache is warm from here on.
    runs = {"with": [], "without": []}
    for pair in range(PAIRS):
        for engine in ("with", "without") if pair % 2 else ("without", "with"):
            runs[engine].append(start(engine))
    verify = [json.loads(call("doctor", "--engine", "with", "--json")) for _ in range(11)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result = {
        "name": "checksums", "command": "python3 bench/checksums.py target/release/strobe", "commit": commit,
        "workload": f"{MODEL} int8, one request of 1/1 tokens, --weights-memory copy, {PAIRS} pairs",
        "machine": json.loads(call("doctor", "--json"))["machine"],
        "bytes": os.path.getsize(f"{work}/with/rank0.engine"),
        "start_s": {engine: median([wall for wall, _ in of]) for engine, of in runs.items()},
        "wall": difference([w for w, _ in runs["with"]], [w for w, _ in runs["without"]]),
        "cpu_in_user_mode": difference([u for _, u in runs["with"]], [u for _, u in runs["without"]]),
        "doctor_engine": verify[-1],
        "doctor_engine_s": median([v["seconds"] for v in verify]) if "seconds" in verify[-1] else None,
    }
    with open(os.path.join(ROOT, "results", "checksums.json"), "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    shutil.rmtree(work)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
