"""What could bring exclusive selection nearer to the oracle: trials, each a way to score elements before picking.

    GRADSIEVE_DATA=... python studies/quality.py [--task mlp --dataset mnist] [--seeds 0,1]

Each index is judged by one worker, by its own accumulator. The trials give the judge more information; except those
with several judges, they send no extra bytes. They search whole vectors and are written for clarity: what helps
would be built properly.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from gradsieve import SPARSIFIERS, Momentum, Plain
from gradsieve.extend import (
    Feedback,
    Program,
    Selection,
    Sent,
    Shape,
    Step,
    all_gather,
    largest,
    local,
)
from gradsieve.sparsifiers.exdyna.sparsifier import ExDyna, ExDynaState
from gradsieve_lab.runs.methods import parse_method
from gradsieve_lab.runs.running import Stop, run
from gradsieve_lab.runs.settings import Settings

MEMORY = 0.9  # of momentum and of histories
JUDGES = {"two judges": 2, "a node's workers": 4}  # whose sum decides: neighbours by rank
CORRECTED = "momentum correction"  # DGC's: each worker's own momentum, accumulated in place of its gradient
BLOCK = 64  # elements whose history is kept together


@dataclass(frozen=True)
class TrialState(ExDynaState):
    """What a judge may know about previous steps."""

    momentum: Tensor = local(power=1)  # of what was sent
    agreement: Tensor = local()  # of blocks: how much the sum over workers exceeds this worker's own
    others: Tensor = local(power=1)  # what the others sent in the last step


@dataclass(frozen=True)
class Trial(ExDyna):
    """Exact exclusive selection by a score that may use more than the accumulator."""

    score: str = "own"

    def init(self, shape: Shape) -> TrialState:
        base, agreement = super().init(shape), torch.ones(shape.n // BLOCK + 1)
        return TrialState(
            **vars(base), momentum=torch.zeros(shape.n), agreement=agreement, others=torch.zeros(shape.n)
        )

    def select(self, state: ExDynaState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        assert isinstance(state, TrialState)
        spans = self.spans(state, step)
        start, stop = spans[step.rank]
        if together := JUDGES.get(self.score):
            rows = yield from all_gather("peek", acc[None], [1] * step.world_size)
            first = step.rank // together * together
            judged = torch.cat(rows)[first : first + together].sum(0)
        else:
            judged = SCORES[self.score](state, acc)
        picked = start + largest(judged[start:stop], min(step.k, stop - start))
        values = judged[picked].abs()
        every = yield from all_gather("scores", values)
        level = torch.cat(every).topk(step.k).values[-1]
        counts = [int((part >= level).sum()) for part in every]
        return Selection(picked[values >= level], counts, spans, plan=acc.clone())

    def feedback(self) -> Feedback:
        return Momentum(MEMORY) if self.score == CORRECTED else Plain()

    def update(self, state: ExDynaState, selection: Selection, sent: Sent, step: Step) -> TrialState:
        assert isinstance(state, TrialState)
        assert sent.indices is not None
        base = super().update(state, replace(selection, plan=state.threshold), sent, step)
        total, own = sent.values * step.world_size, selection.plan[sent.indices]
        momentum = (state.momentum * MEMORY).index_add_(0, sent.indices, (1 - MEMORY) * sent.values)
        others = torch.zeros_like(state.others).index_copy_(0, sent.indices, total - own)
        blocks = sent.indices // BLOCK
        together = torch.zeros_like(state.agreement).index_add_(0, blocks, total.abs())
        alone = torch.zeros_like(state.agreement).index_add_(0, blocks, own.abs())
        ratio = (together / alone / step.world_size).clamp_(0.05, 5)
        agreement = torch.where(alone > 0, state.agreement.lerp(ratio, 1 - MEMORY), state.agreement)
        return TrialState(**vars(base), momentum=momentum, agreement=agreement, others=others)


def _regularised(state: TrialState, acc: Tensor) -> Tensor:
    """RegTop-k's idea: what the others last sent at an index predicts whether values will add up or cancel."""
    change = state.others / torch.where(acc == 0, torch.ones_like(acc), acc)
    return acc * torch.tanh((1 + change).abs())


SCORES: dict[str, Callable[[TrialState, Tensor], Tensor]] = {
    "own": lambda state, acc: acc,
    "momentum": lambda state, acc: acc + state.momentum,
    "more momentum": lambda state, acc: acc + 8 * state.momentum,
    "agreement": lambda state, acc: acc * state.agreement.repeat_interleave(BLOCK)[: len(acc)],
    "regularised": _regularised,
    CORRECTED: lambda state, acc: acc,
}


def measure(settings: Settings, method: str, options: dict[str, object], density: float) -> tuple[float, float]:
    """The final metric, and the loss over the last tenth."""
    made = settings.with_method(parse_method(method, density))
    made = replace(made, options={**made.options, **options})
    if options.get("score") == CORRECTED:
        made = replace(made, momentum=0.0)
    with TemporaryDirectory() as folder:
        done = run(made, Path(folder) / "run", lambda progress: None, Stop())
    assert done is not None
    losses = [math.nan if line.loss is None else line.loss for line in done.steps]
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
    trials = {
        "exact exclusive": "own",
        **{name: name for name in SCORES if name != "own"},
        **{f"{name} (dense bytes)": name for name in JUDGES},
    }
    cases: dict[str, tuple[str, dict[str, object]]] = {
        **{name: ("trial", {"score": score}) for name, score in trials.items()},
        "oracle (dense bytes)": ("oracle", {}),
    }
    sys.stdout.write(f"{'score':34}{'metric':>10}{'loss':>10}\n")
    for name, (method, options) in cases.items():
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
