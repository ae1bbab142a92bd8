"""Puts bench/results into docs/results.md, and the results that decide into the README. Prints what it wrote.

    python3 bench/results_docs.py
"""

import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cuda_results as cuda  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
PAGE = ROOT / "docs/results.md"
CPU_WORKLOADS = {"prefill": "prefill, one prompt of 512 tokens", "decode": "decode, batch 1",
                 "throughput": "64 requests of 128/128, batch 32, whole run",
                 "batched decode": "the same run, iterations that decode all 32",
                 "start": "start to first token, warm page cache"}
TYPES = ["int8", "int4", "bfloat16", "float32"]


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def spread(values, form=number):
    """The median, and the range behind it."""
    return f"{form(median(values))} ({form(min(values))}-{form(max(values))})"


def times(values):
    return spread(values, lambda value: f"{value:.2f}") .replace(" (", "x (")


def percent(values):
    return spread(values, lambda value: f"{100 * value:.0f}").replace(" (", " % (")


class Peers:
    """Every file of interleaved turns with CPU engines, one row per workload and type."""

    def __init__(self, pattern):
        files = sorted(RESULTS.glob(pattern), key=lambda path: (len(path.name), path.name))
        self.files = [json.loads(path.read_text()) for path in files]
        self.entries = [entry for file in self.files for entry in file["results"]]

    def of(self, workload, kind, peer=None):
        return [entry for entry in self.entries if (entry["workload"], entry["type"]) == (workload, kind)
                and peer in (None, entry["peer"])]

    def ratio(self, workload, kind, peer):
        return [value for entry in self.of(workload, kind, peer) for value in entry["strobe_is_faster_by"]["values"]]

    def rows(self):
        for workload, words in CPU_WORKLOADS.items():
            for kind in TYPES:
                entries = self.of(workload, kind)
                if not entries:
                    continue
                own = [value for entry in entries for value in entry["strobe"]["values"]]
                limits = [entry["limit"] for entry in entries if entry.get("limit")]
                shares = [value for limit in limits for value in limit["strobe_share"]["values"]]
                of = {"read": "read bandwidth", "compute": "peak"}[limits[0]["by"]] if limits else ""
                peers = dict.fromkeys((entry["peer"], entry["peer_type"]) for entry in entries)
                against = ", ".join(f"{peer} {its_kind} {times(self.ratio(workload, kind, peer))}" for peer, its_kind in peers)
                unit = entries[0]["unit"]
                share = f"{percent(shares)} of {of}" if shares else ""
                yield f"| {words} | {kind} | {spread(own)} {unit} | {share} | {against} |"

    def conditions(self):
        counts = [len(entry["strobe"]["values"]) for entry in self.entries]
        commits = ", ".join(sorted({file["commit"][:7] for file in self.files}))
        return (f"Medians and ranges of {min(counts)} to {max(counts)} turns per peer in which the machine was steady; peaks are "
                f"measured before and after each turn; {self.files[0]['threads']} threads; commits {commits}; "
                f"{', '.join(sorted({file['command'] for file in self.files}))}.")

    def more(self):
        for file in self.files:
            for depth in [file["depth"]] if "depth" in file else []:
                near, far = depth["context"]
                yield (f"Decode at {far:,} tokens of context takes {times(depth['slowdown']['values'])} as long as at {near}; "
                       f"the bytes alone account for {depth['bytes_implied_slowdown']:.2f}x.")
        scaling = {}
        for file in self.files:
            for name, entry in file.get("scaling", {}).items():
                scaling.setdefault(name, []).append(entry)
        if scaling:
            cell = lambda entry: f"{entry['median']:.2f}x ({entry['min']:.2f}-{entry['max']:.2f})"  # noqa: E731
            rows = [f"| {name} | {', '.join(map(cell, entries))} |" for name, entries in scaling.items()]
            yield "GEMM speed-up, 2 threads vs 1; median and range over the shapes, one entry per measurement:"
            yield "\n".join(["| type and rows | speed-up |", "|---|---|", *rows])


def cpu_runs():
    """Whole benchmarks of strobe alone."""
    yield "| workload | type | output tok/s | wall | MFU | peak RSS | commit |"
    yield "|---|---|---|---|---|---|---|"
    for kind in ("float32", "bfloat16"):
        document = read(f"tinyllama-{kind}-64x128-128")
        report = document["report"]
        every = next(row for row in report["strobe"]["utilization"] if row["kind"] == "all")
        performance, memory = report["performance"], report["strobe"]["memory"]
        yield (f"| 64 requests of 128/128 at once | {kind} | {number(performance['system_output_throughput_tok_s'])} | "
               f"{performance['total_latency_ms'] / 1e3:.0f} s | {100 * every['mfu']:.1f} % | "
               f"{memory['peak_rss_bytes'] / 2**30:.2f} GiB | {document['commit'][:7]} |")


def overhead():
    document = read("tinyllama-float32-profiler-overhead")
    found = document["report"]["strobe"]["profiler_overhead"]
    ends = " to ".join(f"{100 * found['interval'][end]:+.1f}" for end in ("low", "high"))
    return found, ends, document


def measuring():
    """What strobe's own measurements cost, and how often its verdicts are right."""
    found, ends, document = overhead()
    yield "| what | result | command |"
    yield "|---|---|---|"
    yield (f"| recording every op of an iteration | {100 * found['relative']:+.1f} % of step time (95 % CI {ends} %, "
           f"{found['pairs']} pairs) | `{document['command']}` |")
    checksums = read("checksums")
    wall = checksums["wall"]
    yield (f"| verifying {checksums['bytes'] / 1e9:.2f} GB of weights at load | +{wall['mean_ms']:.0f} ms (95 % CI "
           f"{wall['low_ms']:.0f} to {wall['high_ms']:.0f} ms) | `{checksums['command']}` |")
    for words, result, _, commit in verdicts():
        yield f"| {words} | {result}, commit {commit} | `python3 bench/verdicts.py` |"


def verdicts():
    """What was compared, what came of it, and the spread and the commit of those runs."""
    parts = {name: (part["result"], part["commit"]) for name, part in read("verdicts")["parts"].items()}
    equal, commit = parts["aa"]
    called = sum(count for row in equal for outcome, count in row["outcomes"].items() if outcome in ("faster", "slower"))
    same = sum(row["outcomes"].get("no_difference", 0) for row in equal)
    total, failed = sum(row["comparisons"] for row in equal), sum(row["exit_codes"].get("1", 0) for row in equal)
    yield ("A/A, 5 equal runs, all ordered pairs, one run a side; quiet or a core loaded, with and without `--profile`",
           f"{called} of {total} called different ({same} \"no difference\", {total - called - same} \"cannot tell\"), {failed} exits of 1",
           " / ".join(f"{100 * row['spread']:.1f} %" for row in equal), commit)
    result, commit = parts["ab-aa"]
    yield ("A/A by `strobe ab`", f"{result['called']} of {result['comparisons']} called different, "
           f"{result['exit_codes'].get('1', 0)} exits of 1", "", commit)
    for name, words in (("one", "one run a side"), ("three", "three runs a side"), ("ab-5", "`strobe ab`"), ("ab-2", "`strobe ab`")):
        result, commit = parts[name]
        found = f"{result['found']} of {result['comparisons']} found, {result['wrong_sign']} wrong signs"
        if name == "ab-2":
            smallest = result["smallest_size_called_no_difference"]
            found += (f"; {result['outcomes'].get('no_difference', 0)} \"no difference larger than X\", "
                      f"X at least {100 * smallest:.1f} %")
        spread_ = f"{100 * result['spread']:.1f} %" if "spread" in result else ""
        yield f"{100 * result['slower_by']:.0f} % slower steps, {words}", found, spread_, commit


def iterations():
    """How often steps are found."""
    document = read("iterations")
    totals = document["totals"]
    yield (f"{sum(totals.values())} captures: {totals['right']} right, {totals['uncertain']} uncertain, {totals['wrong']} wrong "
           f"(commit {document['commit']}).")


def traces():
    yield "| trace | strobe, all reports | import alone | others | commit |"
    yield "|---|---|---|---|---|"
    form = lambda seconds: f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"  # noqa: E731
    for name, what, others in (
            ("traces-kineto", "PyTorch profiler JSON", (("hta", "Holistic Trace Analysis, load and three reports"),
                                                        ("python json", "Python's json, load alone"))),
            ("traces-nsys", "Nsight Systems SQLite", (("sql", "three summaries as SQL"), ("python", "the same in Python")))):
        document = read(name)
        report = document["report"]

        def cell(key):
            walls = [run["wall_s"] for run in report[key]["runs"]]
            memory = report[key]["peak_rss_bytes"] / 1e6
            return f"{form(median(walls))} ({form(min(walls))[:-2]}-{form(max(walls))[:-2]}), {memory:,.0f} MB RSS"

        beside = "; ".join(f"{words}: {cell(key)}" for key, words in others)
        yield (f"| {what}, {report['bytes'] / 1e6:,.0f} MB | {cell('strobe analyze')} | {cell('strobe import')} | {beside} | "
               f"{document['commit'][:7]} |")


def simulator():
    yield "| servers | requests/s offered | mean batch | simulated requests per second of wall clock |"
    yield "|---|---|---|---|"
    document = read("sim-speed")
    for row in document["results"]:
        if row["skips_ahead"]:
            found = row["requests_per_s"]
            yield (f"| {row['servers']} | {row['rate_per_s']:,} | {row['mean_batch']:.0f} | {number(found['median'])} "
                   f"({number(found['min'])}-{number(found['max'])}) |")
    yield f"\nMedians of 5, {document['threads']} thread{'s' * (document['threads'] > 1)}, commit {document['commit'][:7]}, `{document['command']}`."


def machines():
    document = read("cuda-decode-machines")
    found = document["machines"]
    return (f"H200s differ: {len(found)} unselected ones decoded batch 1024 at {document['slowest']:,.0f}-{document['fastest']:,.0f} "
            f"tok/s, median {document['median']:,.0f} (most with an earlier strobe).")


def beside(ratios, peer):
    """A ratio to a peer; where runs disagree on its side of 1, that is what is said."""
    if min(ratios) < 1 < max(ratios):
        return f"no clear difference from {peer} ({min(ratios):.2f}-{max(ratios):.2f}x)"
    return f"{times(ratios)} {peer}"


def decisive(peers):
    """At most eight results, wins and losses, each with its command."""
    gpu = {run["name"]: run for section in ("decode", "throughput", "fp8", "peers") for run in read(f"cuda-{section}")["runs"]}
    figure = lambda name, key: gpu[name]["figures"][key]  # noqa: E731
    rate = lambda found: f"{found['median']:,.0f} ({found['min']:,.0f}-{found['max']:,.0f}) tok/s"  # noqa: E731
    value = lambda name, key: rate(figure(name, key))  # noqa: E731
    ratio = lambda a, b, key: f"{figure(a, key)['median'] / figure(b, key)['median']:.2f}x"  # noqa: E731
    best = max((name for name in gpu if name.startswith("peer-graph-3000")), key=lambda name: figure(name, "output_tok_s")["median"])
    rows = ["| workload | strobe | compared with | command |", "|---|---|---|---|"]
    rows.append(f"| H200, TinyLlama-1.1B bfloat16, 3,000 requests of 128/128 | {value('throughput-3000', 'output_tok_s')} | "
                f"{ratio('throughput-3000', best, 'output_tok_s')} PyTorch in CUDA graphs | `bench/cuda.sh throughput peers` |")
    rows.append(f"| H200, the same model, decode, batch 1 | {value('decode-1', 'decode_tok_s')} | "
                f"{ratio('decode-1', 'peer-graph-1', 'decode_tok_s')} PyTorch in a CUDA graph | `bench/cuda.sh decode peers` |")
    short = figure("fp8-short", "output_tok_s")
    rows.append(f"| H200, Llama-3.1-8B FP8, 128/128 | {rate(short)} | "
                f"{short['median'] / cuda.PUBLISHED['fp8-short']:.2f}x TensorRT-LLM's published figure (not rerun) | `bench/cuda.sh fp8` |")
    command = "bench/peers/run.py"
    for workload, kind, words in (("prefill", "int8", "prefill of 512"), ("decode", "bfloat16", "decode, batch 1")):
        own = [value for entry in peers.of(workload, kind) for value in entry["strobe"]["values"]]
        against = ", ".join(beside(peers.ratio(workload, kind, peer), peer) for peer in
                            dict.fromkeys(entry["peer"] for entry in peers.of(workload, kind)))
        rows.append(f"| 2 CPU cores, TinyLlama-1.1B {kind}, {words} | {spread(own)} tok/s | {against} | `{command}` |")
    kineto = read("traces-kineto")["report"]
    hta, own = kineto["hta"]["median_wall_s"], kineto["strobe analyze"]["median_wall_s"]
    rows.append(f"| PyTorch trace of {kineto['bytes'] / 1e6:.0f} MB, all reports | {own:.2f} s (n=5) | {hta / own:.0f}x Holistic Trace "
                f"Analysis | `bench/traces.sh` |")
    every = {words.split(",")[0] if words.startswith("A/A,") else words: result for words, result, *_ in verdicts()}
    false = every["A/A"].split(" called")[0]
    rows.append(f"| Equal runs compared (A/A), one a side: false alarms | {false} | | `bench/verdicts.py` |")
    found = every["5 % slower steps, `strobe ab`"].split(",")[0]
    rows.append(f"| Build with 5 % slower steps, `strobe ab`: detected | {found.replace(' found', '')} | | `bench/verdicts.py` |")
    return rows


def main():
    peers = Peers("cpu-peers*.json")
    replace = lambda path, marker, lines: cuda.replace(str(path), marker, "\n".join(lines))  # noqa: E731
    head = ["| workload | type | strobe | % of the limit | speed-up over others, same machine |", "|---|---|---|---|---|"]
    replace(PAGE, "cpu-peers", [*head, *peers.rows(), "", peers.conditions(), "", "\n\n".join(peers.more())])
    replace(PAGE, "cpu-runs", cpu_runs())
    replace(PAGE, "measuring", measuring())
    table = [f"| {words} | {result} | {spread_} | {commit} |" for words, result, spread_, commit in verdicts()]
    head = ["| | result | standard deviation of the runs | commit |", "|---|---|---|---|"]
    replace(ROOT / "docs/verdicts.md", "verdicts", [*head, *table])
    replace(ROOT / "docs/steps.md", "iterations", iterations())
    replace(PAGE, "traces", traces())
    replace(PAGE, "sim-speed", simulator())
    replace(PAGE, "cuda-machines", [machines()])
    replace(ROOT / "README.md", "results", decisive(peers))


if __name__ == "__main__":
    main()
