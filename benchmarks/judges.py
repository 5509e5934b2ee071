"""Who judges what is sent, where replicas stay identical: methods at about equal bytes, each with its best
learning rate, beside dense, the oracle and a worker alone.

    GRADSIEVE_DATA=... python benchmarks/judges.py [--task cnn --task mlp] [--out benchmarks/data/judges.csv]

The learning rate is chosen on the first seed, and the other seeds are run with that one. One row per run; runs
whose rows are in the file already are not repeated, so an interrupted measurement goes on where it was.
`benchmarks/tables.py` makes the table of docs/judges.md; `benchmarks/quality.py` tries what else an exclusive judge
could know.
"""

import argparse
import csv
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from gradsieve.bench.timing import write_rows
from gradsieve.collectives import AllGather, Program
from gradsieve.conditions import conditions
from gradsieve.exchange import Exchanged, Step, gather_picks, reduce_at
from gradsieve.experiments import running
from gradsieve.experiments.methods import parse_method
from gradsieve.experiments.records import Run
from gradsieve.experiments.settings import Settings
from gradsieve.sparsifiers import SPARSIFIERS, Sparsifier
from gradsieve.sparsifiers.base import largest
from gradsieve.sparsifiers.shared_threshold import most_voted

WORKERS, STEPS, DENSITY, SEEDS = 8, 480, 0.001, (0, 1, 2)
RATES = (0.1, 0.05, 0.025)  # the recipes' for 8 workers, a half and a quarter of it
ALONE_RATES = (0.0125, 0.025, 0.05, 0.1)  # from the recipes' for one worker on
ALONE, DENSE = "alone", "dense"
# Times k: entries with a worker's own values that take as many bytes as k positions with everybody's; in so small a
# model histograms are a third of the bytes, and without them there are more.
OWN_VALUES, OWN_VALUES_HERE = 1.7, 2.6
FP8_HERE = 1.9  # times k: entries with eight-bit values that take the same bytes, histograms included
METHODS = {
    "shared_threshold": "shared_threshold",
    "exdyna": "exdyna",
    DENSE: "dense",
    "oracle (dense bytes)": "oracle",
    "own values, 1.7x as many": f"topk:aggregation=own:density={OWN_VALUES * DENSITY / WORKERS}",
    "votes with signs, 2k candidates": "votes",
    ALONE: "alone",
    "own values, 2.6x as many": f"topk:aggregation=own:density={OWN_VALUES_HERE * DENSITY / WORKERS}",
    # Weights: the agreed ones are evaluated, or the mean of all replicas, whose bytes count.
    "share": "share:finish=0",
    "share, fp8, 1.9x as many": f"share:finish=0:values=fp8:density={FP8_HERE * DENSITY}",
    "share, then one average of all": "share",
    "average": f"average:every={STEPS}",  # one average takes 1.1 times the bytes of all rounds of share
}


@dataclass(eq=False)
class Votes(Sparsifier):
    """Workers put forward 2k positions with signs; the k on whose direction most of them agree are sent."""

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        return largest(acc, max(1, 2 * step.k // step.world_size))

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        counts = [len(picked)] * step.world_size
        shared = yield from gather_picks(picked, step, counts)
        bits = torch.nn.functional.pad(acc[picked] > 0, (0, -len(picked) % 8)).view(-1, 8)
        packed = (bits * 2 ** torch.arange(8)).sum(1).to(torch.uint8)
        told = yield AllGather("signs", packed, [len(packed)] * step.world_size)
        signs = [((part[:, None] >> torch.arange(8)) & 1).flatten()[: len(picked)] * 2 - 1 for part in told]
        indices, places = torch.cat(shared).unique(return_inverse=True)
        votes = torch.zeros(len(indices), dtype=torch.int64).index_add_(0, places, torch.cat(signs).long()).abs()
        return (yield from reduce_at(acc, most_voted(indices, votes, step.k, step), pulse, counts))


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    method: str
    lr: float
    seed: int
    accuracy: float  # at the end, on the test set
    loss: float  # of the last tenth of the steps
    ring_bytes: float  # per step and worker
    collectives: float  # per step
    lowest: float  # positions sent over k, in the step that sent the fewest
    highest: float
    workers: int = WORKERS
    steps: int = STEPS
    density: float = DENSITY


def train(settings: Settings) -> Run:
    with TemporaryDirectory() as folder:
        done = running.run(settings, Path(folder) / "run", lambda progress: None, running.Stop())
    assert done is not None
    return done


def measure(task: str, method: str, lr: float, seed: int) -> Row:
    common = Settings(task, dataset="mnist", virtual=True, steps=STEPS, eval_every=STEPS, save=False)
    settings = replace(common, lr=lr, seed=seed, workers=WORKERS)
    done = train(settings.with_method(parse_method(METHODS[method], DENSITY)))
    k = max(1, round(DENSITY * done.header["n"]))
    ratios = [line["union"] / k for line in done.steps]
    return Row(
        task,
        method,
        lr,
        seed,
        accuracy=done.metrics[-1]["value"],
        loss=fmean(line["loss"] for line in done.steps[-STEPS // 10 :]),
        ring_bytes=fmean(line["bytes"] for line in done.steps),
        collectives=fmean(line["collectives"] for line in done.steps[1:]),  # the first has the handshake's
        lowest=min(ratios),
        highest=max(ratios),
    )


class Rows:
    """All rows of a file, by what was run; new ones are written at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.written, self.found = path, list[dict[str, object]](), dict[tuple[object, ...], Row]()
        if path.exists():
            with path.open(newline="") as file:
                for line in csv.DictReader(file):
                    self.written.append({**line})
                    self.keep(_row(line))

    def keep(self, row: Row) -> None:
        self.found[row.task, row.method, row.lr, row.seed] = row

    def get(self, task: str, method: str, lr: float, seed: int) -> Row:
        if (task, method, lr, seed) not in self.found:
            row = measure(task, method, lr, seed)
            self.keep(row)
            self.written.append({**asdict(row), **conditions()})
            write_rows(self.written, self.path)
            sys.stderr.write(f"{task} {method} lr {lr} seed {seed}: {row.accuracy:.4f}\n")
        return self.found[task, method, lr, seed]

    def best_rate(self, task: str, method: str) -> float:
        """The learning rate with the highest accuracy on the first seed."""
        first = [row for row in self.found.values() if (row.task, row.method, row.seed) == (task, method, SEEDS[0])]
        return max(first, key=lambda row: row.accuracy).lr


def _row(line: dict[str, str]) -> Row:
    return Row(**{name: kind(line[name]) for name, kind in Row.__annotations__.items()})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--task", action="append", choices=("cnn", "mlp"), help="may be repeated; default: both")
    arguments.add_argument("--method", action="append", choices=METHODS, help="may be repeated; default: all")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/data/judges.csv"))
    chosen = arguments.parse_args()
    tasks, methods = chosen.task or ["cnn", "mlp"], chosen.method or list(METHODS)
    SPARSIFIERS["votes"] = Votes
    rows = Rows(chosen.out)
    for place in range(max(len(RATES), len(ALONE_RATES))):  # all methods with one rate, then with the next
        for task in tasks:
            for method in methods:
                for lr in (ALONE_RATES if method == ALONE else RATES)[place : place + 1]:
                    rows.get(task, method, lr, SEEDS[0])
    for seed in SEEDS[1:]:
        for task in tasks:
            for method in methods:
                rows.get(task, method, rows.best_rate(task, method), seed)


if __name__ == "__main__":
    main()
