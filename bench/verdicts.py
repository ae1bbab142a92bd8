#!/usr/bin/env python3
"""How often verdicts are right: equal runs (A/A), and builds that are slower by a known share of each step.

    cargo build --release --features strobe-cli/handicap && cp target/release/strobe /tmp/strobe-handicap
    cargo build --release
    python3 bench/verdicts.py target/release/strobe /tmp/strobe-handicap [--lanes N] [PART ...]

Parts: noise aa one three ab-aa ab-5 ab-2 (all, in this order). Results go to bench/results/verdicts.json (RESULTS=FILE:
elsewhere); parts that were not run keep what stands there. Needs a quiet machine and about 75 minutes; a cache of its own,
so that the user's noise is neither used nor replaced. On a machine of many cores, --lanes shares the trials of `three` and
`ab-*` out to N lanes side by side, each on two physical cores of its own; lanes share the memory, so that is no quieter.
"""

import glob
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time

TRIALS = int(os.environ.get("TRIALS", 20))
MODEL = "llama-110m"
ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.environ.get("RESULTS", os.path.join(ROOT, "results", "verdicts.json"))
WORK = os.environ.get("WORK_DIR", "/tmp/strobe-verdicts")


def call(words, **env):
    done = subprocess.run(words, capture_output=True, text=True, cwd=WORK, env={**os.environ, **env})
    return done.returncode, done.stdout, done.stderr


def must(words, **env):
    code, out, err = call(words, **env)
    if code != 0:
        raise RuntimeError(f"{' '.join(words)}: exit {code}\n{err}")
    return out


class Bench:
    def __init__(self, plain, handicap):
        self.plain, self.handicap = os.path.abspath(plain), os.path.abspath(handicap)
        os.makedirs(WORK, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = os.path.join(WORK, "cache")
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the CPU is what is measured
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
            raise RuntimeError(err)
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


def three(bench, trials):
    rows = []
    for trial in trials:
        fast = [bench.run(f"three-a-{i}") for i in range(3)]
        for i in range(3):
            bench.run(f"three-b-{i}", slower=10)
        found = bench.compare("three-a-*", "three-b-*") if trial % 2 else bench.compare("three-b-*", "three-a-*")
        rows.append({"trial": trial, "found": found, "fast": fast})
        print(trial, found, flush=True)
    return rows


def three_summary(rows):
    found = [tuple(row["found"]) for row in rows]
    right = sum(row["found"][0] == ("slower" if row["trial"] % 2 else "faster") for row in rows)
    wrong = sum(row["found"][0] == ("faster" if row["trial"] % 2 else "slower") for row in rows)
    # Of equal runs of one trial: lanes and hours differ in speed.
    ratios = [v / (sum(row["fast"]) / 3) for row in rows for v in row["fast"]]
    within = (sum((r - 1) ** 2 for r in ratios) / (2 * len(rows))) ** 0.5
    return {"slower_by": 0.10, "found": right, "wrong_sign": wrong, "spread": spread([v for row in rows for v in row["fast"]]),
            "spread_within_trials": within, **tally(found)}


def ab(bench, trials, slower):
    rows = []
    for trial in trials:
        out = os.path.join(WORK, "ab")
        shutil.rmtree(out, ignore_errors=True)
        words = [bench.plain, "ab", "--engine-dir", "E", "--dataset", "d.jsonl", "--fail-on-regression", "5%",
                 "--output-dir", "ab", "--json"]
        if slower:
            words += ["--b-bin", os.path.join(WORK, f"slower-{slower}")]
        begin = time.time()
        code, text, err = call(words)
        if not text:
            raise RuntimeError(err)
        document = json.loads(text)
        verdict = document["comparison"]["verdict"]
        figure = document["comparison"]["runs"]["figures"][0]
        rows.append({"outcome": document["outcome"], "exit": code, "pairs": document["pairs"], "stopped": document["stopped"],
                     "time_change": figure["time_change"], "interval": figure["interval"],
                     "decided_by": document["comparison"]["runs"]["decided_by"], "seconds": round(time.time() - begin, 1),
                     "sentence": verdict["sentence"]})
        print(trial, rows[-1], flush=True)
    return rows


def ab_summary(trials, slower):
    found = [(t["outcome"], t["exit"]) for t in trials]
    row = {"slower_by": slower / 100, "trials": trials, **tally(found)}
    if slower:
        row |= {"found": sum(o == "slower" for o, _ in found), "wrong_sign": sum(o == "faster" for o, _ in found)}
        sizes = [max(abs(t["interval"]["low"]), abs(t["interval"]["high"])) for t in trials if t["outcome"] == "no_difference"]
        row["smallest_size_called_no_difference"] = min(sizes, default=None)
    else:
        row["called"] = sum(o in ("faster", "slower") for o, _ in found)
    return row


def physical_cores():
    cores = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        names = glob.glob(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(open(names[0]).read() if names else cpu, cpu)
    return list(cores.values())


def lane(number, cores, arguments, trials, part):
    global WORK
    os.sched_setaffinity(0, cores)
    WORK = f"{WORK}-{number}"
    return LANED[part][0](Bench(*arguments), trials)


def in_lanes(part, arguments, lanes):
    cores = physical_cores()
    if len(cores) < 2 * lanes:
        raise SystemExit(f"{lanes} lanes need {2 * lanes} physical cores, this machine has {len(cores)}")
    calls = [(number, cores[2 * number:2 * number + 2], arguments, range(number, TRIALS, lanes), part) for number in range(lanes)]
    with multiprocessing.Pool(lanes) as pool:
        return [row for rows in pool.starmap(lane, calls, chunksize=1) for row in rows]


# Parts of independent trials: what runs some of them, and what is said of all.
LANED = {
    "three": (three, three_summary),
    "ab-aa": (lambda bench, trials: ab(bench, trials, 0), lambda rows: ab_summary(rows, 0)),
    "ab-5": (lambda bench, trials: ab(bench, trials, 5), lambda rows: ab_summary(rows, 5)),
    "ab-2": (lambda bench, trials: ab(bench, trials, 2), lambda rows: ab_summary(rows, 2)),
}
PARTS = ["noise", "aa", "one", *LANED]


def main():
    words, lanes = sys.argv[1:], 0
    if "--lanes" in words:
        at = words.index("--lanes")
        lanes = int(words[at + 1])
        del words[at:at + 2]
    if len(words) < 2 or any(part not in PARTS for part in words[2:]):
        raise SystemExit(__doc__)
    arguments = [os.path.abspath(word) for word in words[:2]]
    bench = Bench(*arguments)
    # A copy of the tree without its history is told its commit.
    commit = os.environ.get("COMMIT") or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    doctor = json.loads(must([bench.plain, "doctor", "--json"]))
    try:
        document = json.load(open(RESULTS))
    except FileNotFoundError:
        document = {"name": "verdicts", "workload": f"{MODEL} int8, 128 requests of 64/32 tokens", "parts": {}}
    for part in words[2:] or PARTS:
        if part in LANED:
            some, summary = LANED[part]
            rows = in_lanes(part, arguments, lanes) if lanes else some(bench, range(TRIALS))
            result = summary(rows)
        else:
            result = {"noise": noise, "aa": aa, "one": one}[part](bench)
        shown = f" --lanes {lanes}" if lanes and part in LANED else ""
        document["parts"][part] = {
            "commit": commit, "command": f"python3 bench/verdicts.py target/release/strobe /tmp/strobe-handicap{shown} {part}",
            "machine": doctor["machine"], "reading_of_the_machine": doctor["host_reading"], "result": result}
        with open(RESULTS, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        print(part, json.dumps(result)[:400], flush=True)


if __name__ == "__main__":
    main()
