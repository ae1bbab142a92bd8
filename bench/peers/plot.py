"""Draws a result of run.py: how many times as fast strobe is, with the spread over the turns. plot.py FILE.json"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

path = Path(sys.argv[1])
result = json.loads(path.read_text())
groups = list(dict.fromkeys(f"{row['workload']}\n{row['type']}" for row in result["results"]))
peers = list(dict.fromkeys(row["peer"] for row in result["results"]))
width = 0.8 / len(peers)
figure, axes = plt.subplots(figsize=(max(6, 1.1 * len(groups)), 4))
for place, peer in enumerate(peers):
    rows = [row for row in result["results"] if row["peer"] == peer]
    ratios = [row["strobe_is_faster_by"] for row in rows]
    middle = [ratio["median"] for ratio in ratios]
    spread = [[r["median"] - r["min"] for r in ratios], [r["max"] - r["median"] for r in ratios]]
    x = [groups.index(f"{row['workload']}\n{row['type']}") + (place - (len(peers) - 1) / 2) * width for row in rows]
    bars = axes.bar(x, middle, width, yerr=spread, capsize=2, label=f"{peer} {result['peers'][peer]}")
    axes.bar_label(bars, [f"{value:.1f}x" for value in middle], fontsize=8)
axes.axhline(1, color="grey", linewidth=0.8)
axes.set_xticks(range(len(groups)), groups, fontsize=8)
axes.set_ylabel("times as fast as the peer")
cpu = result["machine"]["machine"]["cpu"]
axes.set_title(f"strobe against CPU engines, {cpu}, {result['threads']} threads", fontsize=10)
axes.legend(fontsize=8)
figure.tight_layout()
figure.savefig(path.with_suffix(".svg"))
print(f"written: {path.with_suffix('.svg')}")
