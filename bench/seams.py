#!/usr/bin/env python3
"""Whether a change of the engine's seams costs speed: two strobe binaries, interleaved by `strobe ab`.

    python3 bench/seams.py OLD NEW [CASE ...]

OLD and NEW are release builds of the commits before and after (COMMITS="old new" names them). Cases: prefill and decode
of one request in four weight types, and throughput of 64 requests of 128/128 in int8. Results go to bench/results/seams.json
(RESULTS=FILE: elsewhere); cases that were not run keep what stands there. PAIRS=5..12 sets how many pairs count at least and
at most. Needs a quiet machine and about 25 minutes.
"""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.environ.get("RESULTS", os.path.join(ROOT, "results", "seams.json"))
WORK = os.environ.get("WORK_DIR", "/tmp/strobe-seams")
PAIRS = os.environ.get("PAIRS", "5..12")
MODEL = "llama-110m"
TYPES = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "int8": ["--quantization", "int8"],
    "int4": ["--quantization", "int4"],
}
# Requests, prompt tokens, output tokens; one request at a time or all at once.
LOADS = {"prefill": (6, 512, 1, True), "decode": (2, 16, 128, True), "throughput": (64, 128, 128, False)}
CASES = [(load, kind) for load in ("prefill", "decode") for kind in TYPES] + [("throughput", "int8")]


def call(words, code=0):
    done = subprocess.run(words, cwd=WORK, capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def case(old, new, load, kind):
    engine, dataset = f"E-{kind}", f"{load}.jsonl"
    requests, prompt, output, alone = LOADS[load]
    # Made by the old binary: both sides run the same engine.
    if not os.path.isdir(os.path.join(WORK, engine)):
        call([old, "build", "--model", MODEL, *TYPES[kind], "--output-dir", engine])
    if not os.path.exists(os.path.join(WORK, dataset)):
        call([old, "prepare-dataset", "--model", MODEL, "--output", dataset, "token-norm-dist", "--num-requests", str(requests),
              "--input-mean", str(prompt), "--input-stdev", "0", "--output-mean", str(output), "--output-stdev", "0"])
    words = [new, "ab", "--a-bin", old, "--b-bin", new, "--engine-dir", engine, "--dataset", dataset, "--pairs", PAIRS,
             "--output-dir", f"ab-{load}-{kind}", "--overwrite", "--json", *(["--latency"] if alone else []),
             "--", "--device", "cpu"]
    document = json.loads(call(words))
    figure = document["comparison"]["runs"]["figures"][0]
    return {
        "load": load, "type": kind, "requests": requests, "prompt_tokens": prompt, "output_tokens": output,
        "outcome": document["outcome"], "pairs": document["pairs"], "stopped": document["stopped"],
        "figure": figure["name"], "old": figure["a"], "new": figure["b"], "time_change": figure["time_change"],
        "interval": figure["interval"], "sentence": document["comparison"]["verdict"]["sentence"],
        "command": " ".join(["strobe", "ab", "--a-bin", "OLD", "--b-bin", "NEW", *words[6:]]),
    }


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    old, new = (os.path.abspath(word) for word in sys.argv[1:3])
    wanted = [(load, kind) for load, kind in CASES if not sys.argv[3:] or {load, f"{load}-{kind}"} & set(sys.argv[3:])]
    if not wanted:
        sys.exit(f"no such case; cases: {' '.join(f'{load}-{kind}' for load, kind in CASES)}")
    os.makedirs(WORK, exist_ok=True)
    commits = os.environ.get("COMMITS", "").split()
    machine = json.loads(call([new, "doctor", "--json"]))["machine"]
    try:
        document = json.load(open(RESULTS))
    except FileNotFoundError:
        document = {"name": "seams", "model": MODEL, "cases": []}
    for load, kind in wanted:
        row = {**case(old, new, load, kind), "commits": commits, "machine": machine}
        kept = [other for other in document["cases"] if (other["load"], other["type"]) != (load, kind)]
        document["cases"] = kept + [row]
        document["command"] = "python3 bench/seams.py OLD NEW"
        with open(RESULTS, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        print(f"{load} {kind}: {row['sentence']}", flush=True)


if __name__ == "__main__":
    main()
