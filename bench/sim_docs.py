"""Puts bench/results/sim-validate-*.json and sim-capacity.json into docs/simulate.md."""

import json
from pathlib import Path

from cuda_results import replace

ROOT = Path(__file__).resolve().parents[1]


def percent(error):
    return f"{100 * error:+.1f} %"


def rows(model, report):
    for load in report["loads"]:
        if load["fitted"]:
            continue
        for place, row in enumerate(load["metrics"]):
            (mean, _, p99), (low, high) = row["measured_ms"], row["interval_ms"][2]
            name = f"{model}, {load['load']}, {load['requests']} requests" if place == 0 else ""
            errors = " | ".join(percent(error) for error in row["errors"])
            yield f"| {name} | {row['metric']} | {mean:.1f} | {p99:.1f} | {errors} | {low:.1f} to {high:.1f} |"


def verdicts(model, report):
    words = [f"{v['metric']} {100 * v['mean_error']:.1f} % of the mean, {100 * v['p50_error']:.1f} % of the median, at most "
             f"{100 * v['p99_error']:.1f} % of p99" for v in report["left_out"]]
    word = "within the limits" if report["passed"] else "not within the limits"
    return f"\n{model}, over the loads: {'; '.join(words)}: {word}."


def binding(found):
    slo, resource = found["binds"].get("slo"), found["binds"]["resource"]
    words = {"compute": "iteration time", "kv": "KV blocks", "batch": "batch", "tokens": "tokens per iteration"}
    return f"{slo['metric'].upper() if slo else 'saturation'}, {words[resource]}"


def capacity():
    result = json.loads((ROOT / "bench/results/sim-capacity.json").read_text())
    lines = ["| scenario | answer | binds | limits held at the answer | at 1.05x |", "|---|---|---|---|---|"]
    held = above = runs = 0
    for row in result["rows"]:
        found = row["capacity"]
        rate = f"{found['rate_req_s']:.4g}"
        unit = "conversations/s" if found["requests_per_s"] > 1.5 * found["rate_req_s"] else "requests/s"
        scale = f" (`--rate-scale {found['rate_scale']:.4g}`)" if "rate_scale" in found else ""
        lines.append(f"| {row['what']} | {rate} {unit}{scale} | {binding(found)} | {row['held_at_answer']} of {row['runs']} "
                     f"| {row['held_above']} of {row['runs']} |")
        held, above, runs = held + row["held_at_answer"], above + row["held_above"], runs + row["runs"]
    machine = result["machine"]
    lines.append(f"\nLimits held in {held} of {runs} runs at the answers ({100 * held / runs:.0f} %) and broke in {runs - above} of "
                 f"{runs} at 1.05 times the answers ({100 * (runs - above) / runs:.0f} %). {result['requests_per_run']:,} requests per "
                 f"run (the recording: 40,000), seeds that no search used. {machine['cpu']}, {machine['cores']} cores; commit "
                 f"{result['commit'][:7]}, `sim-capacity.json` in `bench/results`, made by `bench/sim_capacity.py`.")
    replace(ROOT / "docs/simulate.md", "sim-capacity", "\n".join(lines))


def main():
    files = sorted((ROOT / "bench/results").glob("sim-validate-*.json"))
    results = [json.loads(path.read_text()) for path in files]
    lines = ["| left out of the fit | | measured mean, ms | p99, ms | mean | p50 | p99 | p99 predicted to lie in, ms |",
             "|---|---|---|---|---|---|---|---|"]
    named = [(result["name"].removeprefix("sim-validate-"), result) for result in results]
    lines += [line for model, result in named for line in rows(f"{model} {result['dtype']}", result["report"])]
    lines += [verdicts(model, result["report"]) for model, result in named]
    machine = results[0]["report"]["machine"]
    commits = " and ".join(sorted({result["commit"][:7] for result in results}))
    lines.append(f"\n{machine['cpu']}, {machine['cores']} cores, {machine['simd_tier']}; commit {commits}, "
                 f"{' and '.join('`' + path.name + '`' for path in files)} in `bench/results`.")
    replace(ROOT / "docs/simulate.md", "sim-validate", "\n".join(lines))
    capacity()


if __name__ == "__main__":
    main()
