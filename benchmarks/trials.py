"""Methods compared at known bytes, each with its best learning rate, on several seeds; one row of a file a run.

A script names the runs, `compare` makes them. The learning rate of a method is chosen on the first seed, and the
other seeds are run with that one. Rows are appended as they are found, and runs whose rows are in the file are not
repeated: an interrupted measurement goes on where it was, and several processes may share a file if each has its
own methods.
"""

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from gradsieve_lab.conditions import conditions
from gradsieve_lab.runs import running
from gradsieve_lab.runs.methods import parse_method
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.tasks import TASKS

SEEDS = (0, 1, 2)
ALONE, DENSE = "alone", "dense"


@dataclass(frozen=True)
class Trials:
    """Runs of some tasks: the settings that all of them have, methods by name, and learning rates by method."""

    tasks: Sequence[str]
    common: Settings
    methods: Mapping[str, str]
    rates: Sequence[float]
    special_rates: Mapping[str, Sequence[float]]

    def rates_of(self, method: str) -> Sequence[float]:
        return self.special_rates.get(method, self.rates)


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    method: str
    lr: float
    seed: int
    metric: float  # of the task, at the end, on the test set
    loss: float  # of the last tenth of the steps
    ring_bytes: float  # per step and worker
    collectives: float  # per step
    lowest: float  # positions sent over k, in the step that sent the fewest
    highest: float
    workers: int
    steps: int
    density: float


def train(settings: Settings) -> Run:
    with TemporaryDirectory() as folder:
        done = running.run(settings, Path(folder) / "run", lambda progress: None, running.Stop())
    assert done is not None
    return done


def measure(trials: Trials, task: str, method: str, lr: float, seed: int) -> Row:
    settings = replace(trials.common, task=task, lr=lr, seed=seed)
    done = train(settings.with_method(parse_method(trials.methods[method], settings.density)))
    k = max(1, round(settings.density * done.header["n"]))
    ratios = [line.union / k for line in done.steps]
    return Row(
        task,
        method,
        lr,
        seed,
        metric=done.metrics[-1]["value"],
        loss=fmean(line.loss for line in done.steps[-settings.steps // 10 :]),
        ring_bytes=fmean(line.bytes for line in done.steps),
        collectives=fmean(line.collectives for line in done.steps[1:]),  # the first has the handshake's
        lowest=min(ratios),
        highest=max(ratios),
        workers=settings.workers,
        steps=settings.steps,
        density=settings.density,
    )


class Rows:
    """All rows of a file, by what was run; new ones are appended at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, dict[tuple[str, str, float, int], Row]()
        if path.exists():
            with path.open(newline="") as file:
                lines = csv.DictReader(file)
                if (columns := list(Row.__annotations__) + list(conditions())) != lines.fieldnames:
                    raise SystemExit(f"{path} must have the columns {', '.join(columns)}: name another file")
                for line in lines:
                    self._keep(Row(**{name: kind(line[name]) for name, kind in Row.__annotations__.items()}))

    def _keep(self, row: Row) -> None:
        self.found[row.task, row.method, row.lr, row.seed] = row

    def get(self, trials: Trials, task: str, method: str, lr: float, seed: int) -> Row:
        if (task, method, lr, seed) not in self.found:
            row = measure(trials, task, method, lr, seed)
            self._keep(row)
            self._append({**asdict(row), **conditions()})
            sys.stderr.write(f"{task}, {method}, lr {lr}, seed {seed}: {row.metric:.6g}\n")
        return self.found[task, method, lr, seed]

    def _append(self, line: dict[str, object]) -> None:
        rounded = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in line.items()}
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rounded), lineterminator="\n")
            if not file.tell():
                writer.writeheader()
            writer.writerow(rounded)

    def best_rate(self, task: str, method: str) -> float:
        """The learning rate with the best metric on the first seed."""
        first = [row for row in self.found.values() if (row.task, row.method, row.seed) == (task, method, SEEDS[0])]
        return min(first, key=lambda row: worse(row.task) * row.metric).lr


def worse(task: str) -> int:
    """1 if a higher metric of the task is worse (perplexity), -1 if it is better (accuracy)."""
    return -1 if TASKS[task].METRIC.higher_is_better else 1


def compare(trials: Trials, out: Path, about: str | None) -> None:
    """All runs that the arguments ask for: with each rate on the first seed, then the best on the others."""
    arguments = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--task", action="append", choices=trials.tasks, help="may be repeated; default: all")
    arguments.add_argument("--method", action="append", choices=trials.methods, help="likewise")
    arguments.add_argument("--rates", type=int, help="how many learning rates of each; default: all")
    arguments.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of them; 1 for the rates alone")
    arguments.add_argument("--out", type=Path, default=out)
    chosen = arguments.parse_args()
    tasks, methods, rows = chosen.task or trials.tasks, chosen.method or trials.methods, Rows(chosen.out)
    most = max(len(trials.rates_of(method)) for method in methods)
    for place in range(min(most, chosen.rates or most)):  # all with one rate, then the next
        for task in tasks:
            for method in methods:
                for lr in trials.rates_of(method)[place : place + 1]:
                    rows.get(trials, task, method, lr, SEEDS[0])
    for seed in SEEDS[1 : chosen.seeds]:
        for task in tasks:
            for method in methods:
                rows.get(trials, task, method, rows.best_rate(task, method), seed)
