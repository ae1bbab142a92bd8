#!/usr/bin/env python3
"""Whether strobe finds the steps of captures with a known number of steps.

    python3 bench/iterations.py STROBE TRUTH [FILE=COUNT ...]

TRUTH is a folder with captures and truth.json (files: file, iterations, steps as [start, end] on the device in ns); FILE=COUNT are
further captures of which the number of steps is known. Right is the count, and for the captures of TRUTH four in five steps
that begin within a tenth of a period of a known one. Results go to bench/results/iterations.json (RESULTS=FILE: elsewhere).
"""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.environ.get("RESULTS", os.path.join(ROOT, "results", "iterations.json"))


def analyzed(strobe, path):
    done = subprocess.run([strobe, "analyze", path, "--report", "iterations", "--json", "--top", "0"], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{path}: exit {done.returncode}\n{done.stderr}")
    document = json.loads(done.stdout)
    tables = document["reports"][0]["tables"] or [{"rows": []}]
    return document["iterations"], [row["device start"] for row in tables[0]["rows"] if row["device start"] is not None]


def borders_hold(starts, steps):
    if not starts:
        return False
    first, want = min(starts), [begin for begin, _ in steps]
    base = first - want[0] if first > 1e17 > want[0] else 0  # times with and without the base of the file's clock
    periods = sorted(after - before for before, after in zip(want, want[1:]))
    period = periods[(len(want) - 1) // 2 if len(periods) > (len(want) - 1) // 2 else -1] if periods else steps[0][1] - steps[0][0]
    hits = sum(any(abs(w + base - s) <= 0.1 * period for s in starts) or (w == want[0] and first < w + base) for w in want)
    return hits >= 0.8 * len(want)


def main():
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    strobe, truth = sys.argv[1:3]
    known = [(e["file"], os.path.join(truth, e["file"]), e["iterations"], e["steps"])
             for e in json.load(open(os.path.join(truth, "truth.json")))["files"]]
    for word in sys.argv[3:]:
        path, _, count = word.rpartition("=")
        known.append((os.path.basename(path), path, int(count), None))
    rows = []
    for name, path, count, steps in known:
        said, starts = analyzed(strobe, path)
        if said["confidence"] == "uncertain":
            result = "uncertain"
        else:
            right = said["count"] == count and (steps is None or borders_hold(starts, steps))
            result = "right" if right else "wrong"
        rows.append({"file": name, "steps": count, "found": said["count"], "confidence": said["confidence"],
                     "evidence": said["evidence"], "result": result})
        print(f"{result:9} {name}: {said['count']} of {count}, {said['confidence']}: {said['evidence'][:120]}")
    totals = {result: sum(row["result"] == result for row in rows) for result in ("right", "uncertain", "wrong")}
    commit = os.environ.get("COMMIT") or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    with open(RESULTS, "w") as file:
        json.dump({"name": "iterations", "commit": commit, "command": "python3 bench/iterations.py STROBE TRUTH [FILE=COUNT ...]",
                   "totals": totals, "captures": rows}, file, indent=1)
        file.write("\n")
    print(totals)


if __name__ == "__main__":
    main()
