"""Puts bench/results/sim-validate-*.json into docs/simulate.md."""

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


if __name__ == "__main__":
    main()
