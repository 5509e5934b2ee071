"""What could bring exclusive selection nearer to the oracle: trials, each a way to score elements before picking.

    GRADSIEVE_DATA=... python benchmarks/quality.py [--task mlp --dataset mnist] [--seeds 0,1]

Each index is judged by one worker, by its own accumulator. The trials let the judge know more, all but those with
several judges without a further byte. They look at whole vectors and are written for clarity: what helps would be
built properly.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from gradsieve.collectives import AllGather, Program
from gradsieve.exchange import Exchanged, Span, Step
from gradsieve.sparsifiers import SPARSIFIERS
from gradsieve.sparsifiers.base import largest
from gradsieve.sparsifiers.dgc import DGC
from gradsieve.sparsifiers.exdyna import ExDyna
from gradsieve_lab.runs.methods import parse_method
from gradsieve_lab.runs.running import Stop, run
from gradsieve_lab.runs.settings import Settings

MEMORY = 0.9  # of momentum and of histories
JUDGES = {"two judges": 2, "a node's workers": 4}  # whose sum decides: neighbours by rank
CORRECTED = "momentum correction"  # DGC's: each worker's own momentum, accumulated in place of its gradient
BLOCK = 64  # elements whose history is kept together


@dataclass(eq=False)
class Trial(ExDyna):
    """Exact exclusive selection by a score that may know more than the accumulator."""

    score: str = "own"

    def setup(self, step: Step, sizes: object) -> None:
        super().setup(step, [step.n])
        self._dgc = DGC(momentum=MEMORY)
        self._dgc.setup(step, [step.n])
        self._momentum = torch.zeros(step.n)
        self._agreement = torch.ones(step.n // BLOCK + 1)
        self._mine = torch.zeros(0)
        self._sent: Tensor = torch.zeros(0, dtype=torch.int64)
        self._others = torch.zeros(step.n)

    def select(self, acc: Tensor, hits: Tensor, step: Step) -> Program[Tensor]:
        start, stop = self.span(self.owned(step, step.rank), step)
        if together := JUDGES.get(self.score):
            rows = yield AllGather("peek", acc[None], [1] * step.world_size)
            first = step.rank // together * together
            judged = torch.cat(rows)[first : first + together].sum(0)
        else:
            yield from ()
            judged = SCORES[self.score](self, acc)
        picked = start + largest(judged[start:stop], min(step.k, stop - start))
        values = judged[picked].abs()
        every = yield AllGather("scores", values, None)
        level = torch.cat(every).topk(step.k).values[-1]
        chosen = picked[values >= level]
        counts = [int((part >= level).sum()) for part in every]
        self._threshold.counts = counts
        self._mine = acc.clone()
        return chosen

    def fold(self, grad: Tensor, start: int) -> Tensor:
        return self._dgc.fold(grad, start) if self.score == CORRECTED else grad

    def commit(self, sent: Exchanged, waiting: Sequence[Span]) -> None:
        if self.score == CORRECTED:
            self._dgc.commit(sent, waiting)

    def observe(self, sent: Exchanged, step: Step) -> None:
        assert sent.indices is not None
        total = sent.values * step.world_size
        own = self._mine[sent.indices]
        self._momentum.mul_(MEMORY).index_add_(0, sent.indices, (1 - MEMORY) * sent.values)
        self._others.zero_()
        self._others[sent.indices] = total - own
        blocks = sent.indices // BLOCK
        together = torch.zeros_like(self._agreement).index_add_(0, blocks, total.abs())
        alone = torch.zeros_like(self._agreement).index_add_(0, blocks, own.abs())
        seen = alone > 0
        ratio = (together[seen] / alone[seen] / step.world_size).clamp_(0.05, 5)
        self._agreement[seen] = MEMORY * self._agreement[seen] + (1 - MEMORY) * ratio


def _regularised(trial: Trial, acc: Tensor) -> Tensor:
    """RegTop-k's idea: what the others sent at an index last time says whether they will add up or cancel."""
    change = trial._others / torch.where(acc == 0, torch.ones_like(acc), acc)
    return acc * torch.tanh((1 + change).abs() / 1.0)


SCORES: dict[str, Callable[[Trial, Tensor], Tensor]] = {
    "own": lambda trial, acc: acc,
    "momentum": lambda trial, acc: acc + trial._momentum,
    "more momentum": lambda trial, acc: acc + 8 * trial._momentum,
    "agreement": lambda trial, acc: acc * trial._agreement.repeat_interleave(BLOCK)[: len(acc)],
    "regularised": _regularised,
    CORRECTED: lambda trial, acc: acc,
}


def measure(settings: Settings, method: str, options: dict[str, object], density: float) -> tuple[float, float]:
    """Metric at the end, and loss of the last tenth."""
    made = settings.with_method(parse_method(method, density))
    made = replace(made, options={**made.options, **options})
    if options.get("score") == CORRECTED:
        made = replace(made, momentum=0.0)
    with TemporaryDirectory() as folder:
        done = run(made, Path(folder) / "run", lambda progress: None, Stop())
    assert done is not None
    losses = [line["loss"] for line in done.steps]
    return done.metrics[-1]["value"], fmean(losses[-len(losses) // 10 :])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--task", default="mlp")
    arguments.add_argument("--dataset", default="mnist")
    arguments.add_argument("--seeds", default="0,1")
    arguments.add_argument("--steps", type=int, default=480)
    arguments.add_argument("--workers", type=int, default=8)
    arguments.add_argument("--density", type=float, default=0.001)
    chosen = arguments.parse_args()
    SPARSIFIERS["trial"] = Trial
    cases: list[tuple[str, str, dict[str, object]]] = [
        ("exact exclusive", "trial", {"score": "own"}),
        *((name, "trial", {"score": name}) for name in SCORES if name != "own"),
        *((f"{name} (dense bytes)", "trial", {"score": name}) for name in JUDGES),
        ("oracle (dense bytes)", "oracle", {}),
    ]
    sys.stdout.write(f"{'score':34}{'metric':>10}{'loss':>10}\n")
    for name, method, options in cases:
        found = []
        for seed in map(int, chosen.seeds.split(",")):
            settings = Settings(
                chosen.task,
                dataset=chosen.dataset,
                workers=chosen.workers,
                virtual=True,
                steps=chosen.steps,
                seed=seed,
                eval_every=chosen.steps,
                save=False,
            )
            found.append(measure(settings, method, options, chosen.density))
        metrics, losses = zip(*found, strict=True)
        sys.stdout.write(f"{name:34}{fmean(metrics):10.4f}{fmean(losses):10.4f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
