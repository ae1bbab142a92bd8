#!/usr/bin/env python3
"""How often verdicts are right: equal runs (A/A), and builds that are slower by a known share of each step.

    cargo build --release --features strobe-cli/handicap && cp target/release/strobe /tmp/strobe-handicap
    cargo build --release
    python3 bench/verdicts.py target/release/strobe /tmp/strobe-handicap [PART ...]

Parts: noise aa one three ab-aa ab-5 ab-2 (all, in this order). Results go to bench/results/verdicts.json; parts that were
not run keep what stands there. Needs a quiet machine and about 75 minutes; a cache of its own, so that the user's noise
is neither used nor replaced.
"""

import json
import os
import shutil
import subprocess
import sys
import time

TRIALS = 20
MODEL = "llama-110m"
ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.path.join(ROOT, "results", "verdicts.json")
WORK = os.environ.get("WORK_DIR", "/tmp/strobe-verdicts")


def call(words, **env):
    done = subprocess.run(words, capture_output=True, text=True, cwd=WORK, env={**os.environ, **env})
    return done.returncode, done.stdout, done.stderr


def must(words, **env):
    code, out, err = call(words, **env)
    if code != 0:
        raise SystemExit(f"{' '.join(words)}: exit {code}\n{err}")
    return out


class Bench:
    def __init__(self, plain, handicap):
        self.plain, self.handicap = os.path.abspath(plain), os.path.abspath(handicap)
        os.makedirs(WORK, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = os.path.join(WORK, "cache")
        if not os.path.isdir(os.path.join(WORK, "E")):
            must([self.plain, "build", "--model", MODEL, "--quantization", "int8", "--output-dir", "E"])
            must([self.plain, "prepare-dataset", "--model", MODEL, "--output", "d.jsonl", "token-norm-dist",
                  "--num-requests", "128", "--input-mean", "64", "--input-stdev", "0", "--output-mean", "32",
                  "--output-stdev", "0"])
        for share in (5, 2):
            # A binary of its own, as somebody's slower build is.
            script = os.path.join(WORK, f"slower-{share}")
            with open(script, "w") as file:
                file.write(f'#!/bin/sh\nSTROBE_HANDICAP={share}% exec {self.handicap} "$@"\n')
            os.chmod(script, 0o755)

    def run(self, out, slower=None, profile=False):
        path = os.path.join(WORK, out)
        shutil.rmtree(path, ignore_errors=True)
        binary = self.handicap if slower else self.plain
        words = [binary, "bench", "throughput", "--engine-dir", "E", "--dataset", "d.jsonl", "--output-dir", out]
        must(words + (["--profile", "5-25"] if profile else []), **({"STROBE_HANDICAP": f"{slower}%"} if slower else {}))
        return json.load(open(os.path.join(path, "report.json")))["strobe"]["repeats"][0]["output_throughput_tok_s"]

    def compare(self, a, b):
        code, out, err = call([self.plain, "compare", a, b, "--fail-on-regression", "5%", "--json"])
        if not out:
            raise SystemExit(err)
        return json.loads(out)["outcome"], code


def tally(found):
    outcomes, codes = {}, {}
    for outcome, code in found:
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        codes[str(code)] = codes.get(str(code), 0) + 1
    return {"comparisons": len(found), "outcomes": outcomes, "exit_codes": codes}


def spread(values):
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5 / mean


def noise(bench):
    out = must([bench.plain, "doctor", "--noise", "--engine-dir", "E", "--dataset", "d.jsonl", "--runs", "20", "--json"])
    return json.loads(out)


def aa(bench):
    rows = []
    for loaded in (False, True):
        for profile in (False, True):
            load = subprocess.Popen(["sh", "-c", "while :; do :; done"]) if loaded else None
            try:
                values = [bench.run(f"aa-{i}", profile=profile) for i in range(5)]
            finally:
                if load:
                    load.kill()
                    load.wait()
            found = [bench.compare(f"aa-{i}", f"aa-{j}") for i in range(5) for j in range(5) if i != j]
            rows.append({"loaded_core": loaded, "profile": profile, "spread": spread(values), "tok_s": values, **tally(found)})
            print(rows[-1], flush=True)
    return rows


def one(bench):
    found, fast, slow = [], [], []
    for trial in range(TRIALS):
        fast.append(bench.run("one-a"))
        slow.append(bench.run("one-b", slower=30))
        # Both orders: a slower B and a faster one.
        found.append(bench.compare("one-a", "one-b") if trial % 2 else bench.compare("one-b", "one-a"))
        print(trial, found[-1], flush=True)
    right = sum(outcome == ("slower" if trial % 2 else "faster") for trial, (outcome, _) in enumerate(found))
    wrong = sum(outcome == ("faster" if trial % 2 else "slower") for trial, (outcome, _) in enumerate(found))
    return {"slower_by": 0.30, "found": right, "wrong_sign": wrong, "spread": spread(fast), **tally(found)}


def three(bench):
    found, fast = [], []
    for trial in range(TRIALS):
        for i in range(3):
            fast.append(bench.run(f"three-a-{i}"))
        for i in range(3):
            bench.run(f"three-b-{i}", slower=10)
        found.append(bench.compare("three-a-*", "three-b-*") if trial % 2 else bench.compare("three-b-*", "three-a-*"))
        print(trial, found[-1], flush=True)
    right = sum(outcome == ("slower" if trial % 2 else "faster") for trial, (outcome, _) in enumerate(found))
    wrong = sum(outcome == ("faster" if trial % 2 else "slower") for trial, (outcome, _) in enumerate(found))
    return {"slower_by": 0.10, "found": right, "wrong_sign": wrong, "spread": spread(fast), **tally(found)}


def ab(bench, slower):
    found, trials = [], []
    for trial in range(TRIALS):
        out = os.path.join(WORK, "ab")
        shutil.rmtree(out, ignore_errors=True)
        words = [bench.plain, "ab", "--engine-dir", "E", "--dataset", "d.jsonl", "--fail-on-regression", "5%",
                 "--output-dir", "ab", "--json"]
        if slower:
            words += ["--b-bin", os.path.join(WORK, f"slower-{slower}")]
        begin = time.time()
        code, text, err = call(words)
        if not text:
            raise SystemExit(err)
        document = json.loads(text)
        verdict = document["comparison"]["verdict"]
        found.append((document["outcome"], code))
        figure = document["comparison"]["runs"]["figures"][0]
        trials.append({"outcome": document["outcome"], "exit": code, "pairs": document["pairs"], "stopped": document["stopped"],
                       "time_change": figure["time_change"], "interval": figure["interval"],
                       "decided_by": document["comparison"]["runs"]["decided_by"], "seconds": round(time.time() - begin, 1),
                       "sentence": verdict["sentence"]})
        print(trial, trials[-1], flush=True)
    row = {"slower_by": slower / 100, "trials": trials, **tally(found)}
    if slower:
        row |= {"found": sum(o == "slower" for o, _ in found), "wrong_sign": sum(o == "faster" for o, _ in found)}
        sizes = [max(abs(t["interval"]["low"]), abs(t["interval"]["high"])) for t in trials if t["outcome"] == "no_difference"]
        row["smallest_size_called_no_difference"] = min(sizes, default=None)
    else:
        row["called"] = sum(o in ("faster", "slower") for o, _ in found)
    return row


PARTS = {
    "noise": noise, "aa": aa, "one": one, "three": three,
    "ab-aa": lambda bench: ab(bench, 0), "ab-5": lambda bench: ab(bench, 5), "ab-2": lambda bench: ab(bench, 2),
}


def main():
    if len(sys.argv) < 3 or any(part not in PARTS for part in sys.argv[3:]):
        raise SystemExit(__doc__)
    bench = Bench(sys.argv[1], sys.argv[2])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    doctor = json.loads(must([bench.plain, "doctor", "--json"]))
    try:
        document = json.load(open(RESULTS))
    except FileNotFoundError:
        document = {"name": "verdicts", "parts": {}}
    document |= {"command": "python3 bench/verdicts.py target/release/strobe /tmp/strobe-handicap",
                 "workload": f"{MODEL} int8, 128 requests of 64/32 tokens", "machine": doctor["machine"],
                 "reading_of_the_machine": doctor["host_reading"]}
    for part in sys.argv[3:] or PARTS:
        result = PARTS[part](bench)
        document["parts"][part] = {"commit": commit, "result": result}
        with open(RESULTS, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        print(part, json.dumps(result)[:400], flush=True)


if __name__ == "__main__":
    main()
