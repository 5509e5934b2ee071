"""The README's pictures, drawn from benchmarks/data and benchmarks/reports: `make figures`."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from tables import ROOT, read, under

from gradsieve_lab.report.style import styles
from gradsieve_lab.runs.records import read_run

LIMIT = "compute alone"
plt.rcParams.update({"font.size": 9, "svg.hashsalt": "gradsieve", "svg.fonttype": "none"})


def steps(path: Path) -> None:
    """How long a step takes, by rate."""
    rows = [row for row in read("lab") if row["against"] == LIMIT]
    rates = list(dict.fromkeys(row["links"] for row in rows))
    figure, axes = plt.subplots(1, len(rates), figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, rate in zip(axes, rates, strict=True):
        here = [row for row in rows if row["links"] == rate][::-1]
        values = [float(row["median"]) for row in here]
        colours = ["#d55e00" if row["case"].startswith("exdyna") else "#8a919c" for row in here]
        axis.barh([row["case"] for row in here], values, color=colours)
        for place, value in enumerate(values):
            axis.text(value * 1.08, place, f"{value:,.0f}", va="center", fontsize=8)
        axis.axvline(float(next(row["median"] for row in here if row["case"] == LIMIT)), color="#0072b2", lw=1)
        axis.set(xscale="log", title=f"{rate} links", xlabel="ms a step (log)", xlim=(50, max(values) * 4))
        axis.spines[["top", "right"]].set_visible(False)
    first = rows[0]
    figure.suptitle(
        f"A training step of {int(first['n']):,} parameters on {first['workers']} hosts, density "
        f"{float(first['density']):g}; line: compute alone. {under(rows)}",
        fontsize=8,
    )
    figure.savefig(path, metadata={"Date": None})


def accuracy(path: Path) -> None:
    """What a run has reached after how many seconds of training."""
    folder = ROOT / "benchmarks" / "reports" / "lab"
    runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    looks = styles([run.name for run in runs])
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for run in runs:
        points = [(line["seconds"], 100 * line["value"]) for line in run.metrics]
        axis.plot(*zip(*points, strict=True), marker="o", ms=3, label=run.name, color=looks[run.name].light)
    settings, conditions = runs[0].settings, runs[0].header["conditions"]
    axis.set(xlabel="seconds of training", ylabel="test accuracy, %", ylim=(80, 100))
    axis.set_title(
        f"ResNet-20 on MNIST, {settings['lab_hosts']} hosts, {settings['lab_rate']} links, "
        f"{settings['steps']} steps each, density 0.01 or its bytes\n"
        f"{conditions['machine']}, torch {conditions['torch']}, {conditions['date']}",
        fontsize=8,
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    for name, draw in (("lab", steps), ("time-to-accuracy", accuracy)):
        target = ROOT / "docs" / f"{name}.svg"
        draw(target)
        sys.stdout.write(f"{target.relative_to(ROOT)}\n")
