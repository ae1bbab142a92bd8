"""Puts bench/results/moe-peers.json into docs/moe.md; bench/results_docs.py has the other peers."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from cuda_results import replace  # noqa: E402

WORKLOADS = {"prefill": "prefill, 512 tokens", "decode": "decode, batch 1",
             "throughput": "64 requests of 128/128, 32 at a time: output of the whole run (peer: decoding alone)",
             "batched decode": "decoding alone in that run, all 32 in a step (both)",
             "start": "start to first token, warm page cache"}


def value(spread, unit):
    digits = 2 if unit == "s" else 0 if spread["median"] >= 100 else 1
    return f"{spread['median']:.{digits}f} {unit}"


def limit_of(entry):
    """The share of what the machine allowed, and how much that is."""
    limit = entry.get("limit")
    if limit is None:
        return ""
    share, of = limit["strobe_share"], {"read": "read bandwidth", "compute": "peak"}[limit["by"]]
    return (f"{share['median']:.0%} of {of} ({share['min']:.0%} to {share['max']:.0%}), which allows "
            f"{value(limit['most'], entry['unit'])}")


def rows(results):
    """Workload by workload, each type beside its peers."""
    order, types = list(WORKLOADS), ["int8", "int4", "bfloat16", "float32"]
    entries = [entry for result in results for entry in result["results"]]
    for entry in sorted(entries, key=lambda entry: (order.index(entry["workload"]), types.index(entry["type"]))):
        unit, ratio = entry["unit"], entry["strobe_is_faster_by"]
        yield (f"| {WORKLOADS[entry['workload']]} | {entry['type']} | **{value(entry['strobe'], unit)}** | "
               f"{limit_of(entry)} | {entry['peer']} {entry['peer_type']} {value(entry['peer_result'], unit)} | "
               f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f}) |")


HEAD = ["| | type | strobe | of the limit | peer | strobe is faster by |", "|---|---|---|---|---|---|"]


def conditions(results):
    steady = [entry.get("turns_on_a_steady_machine", result["repeats"]) for result in results for entry in result["results"]]
    turns = sorted({min(steady), max(steady)})
    commits = sorted({result["commit"][:7] for result in results})
    threads = sorted({result["threads"] for result in results})
    several = [" to ".join(map(str, turns))] + [" or ".join(map(str, values)) for values in (threads, commits)]
    return ("\nMedians of {} turns in which the machine was steady (peaks are read around every run), {} threads, commit "
            "{}.".format(*several))


def main():
    experts = ROOT / "bench/results/moe-peers.json"
    result = json.loads(experts.read_text())
    replace(ROOT / "docs/moe.md", "moe-peers", "\n".join([*HEAD, *rows([result]), conditions([result])]))


if __name__ == "__main__":
    main()
