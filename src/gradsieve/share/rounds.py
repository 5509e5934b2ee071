"""One round as a program: the workers agree on the entries that drifted farthest, and on their mean.

Nothing is changed here: a round returns what to write, which may be written at once or after the next step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program, all_gather, all_reduce
from gradsieve.comm.exchange import even_shares, gather_picks
from gradsieve.comm.rounded import rounded_sum
from gradsieve.comm.step import Selection, Step
from gradsieve.share.average import CHUNK
from gradsieve.share.weights import Drift, Weights, Where
from gradsieve.sparsifiers import Sparsifier
from gradsieve.sparsifiers.dense import Dense
from gradsieve.sparsifiers.exdyna import Exclusive
from gradsieve.states import State


@dataclass(frozen=True)
class Agreed:
    """The outcome of a round. `mean` and `counts` are the same on all workers."""

    where: Where
    mean: Tensor  # what `shared` becomes there
    target: Tensor  # what this worker's weights become: the mean, but for what rounding on the wire left out
    own: Tensor  # what they were when the round was made
    counts: list[int]  # how many positions each worker picked
    selection: Selection | None = None  # None: everything, or a round that was loaded

    @property
    def union(self) -> int:
        return len(self.mean)


@dataclass(frozen=True)
class NotFinite:
    """No agreement: some worker's weights are not finite. `bad[rank]` is the first such position, or -1."""

    bad: list[int]


def exchange(
    weights: Weights,
    sparsifier: Sparsifier[Any],
    state: State,
    step: Step,
    second: Callable[[Tensor], Tensor | None] | None = None,
) -> Program[Agreed | NotFinite]:
    """A round with any sparsifier; one whose workers have parts of their own never reads the others' parts.

    `second` is for `Drift`, and only those look at it.
    """
    if step.k >= step.n or isinstance(sparsifier, Dense):
        return _everything(weights, step)
    if isinstance(sparsifier, Exclusive):
        return _exclusive(weights, sparsifier, state, step, second)
    return _whole(weights, sparsifier, state, step)


def _exclusive(
    weights: Weights,
    sparsifier: Exclusive[Any],
    state: State,
    step: Step,
    second: Callable[[Tensor], Tensor | None] | None,
) -> Program[Agreed | NotFinite]:
    spans = sparsifier.spans(state, step)
    look = Drift(weights, spans[step.rank], second)
    hits = look.above(sparsifier.window(state, step).threshold)
    selection = yield from sparsifier.select_in(state, look, hits, step)
    parts = yield from gather_picks(selection, step)
    # Spans follow each other in another order than ranks: so all positions rise without being sorted.
    where = torch.cat([parts[rank] for rank in sorted(range(step.world_size), key=lambda rank: spans[rank])])
    found = yield from _average(weights, where, [len(part) for part in parts], look.bad, step)
    return replace(found, selection=selection) if isinstance(found, Agreed) else found


def _whole(weights: Weights, sparsifier: Sparsifier[Any], state: State, step: Step) -> Program[Agreed | NotFinite]:
    """For sparsifiers that look at the whole vector: this needs room for it."""
    drift = weights.drift(weights.all, weights.read(weights.all))
    bad = _first_bad(drift, weights.all)
    step = replace(step, healthy=bad < 0)
    drift.nan_to_num_(0.0, 0.0, 0.0)
    hits = ops.select_above(drift, *sparsifier.window(state, step))
    selection = yield from sparsifier.select(state, drift, hits, step)
    sent = yield from sparsifier.exchange(drift, selection, step)
    if not sent.finite:
        return (yield from _say_where(bad, weights, step))
    assert sent.indices is not None
    where, order = sent.indices.sort()
    own = weights.read(where)
    agreed = _agree(weights, where, own, sent.values[order], drift[where], sent.counts, step)
    return replace(agreed, selection=selection)


def _everything(weights: Weights, step: Step) -> Program[Agreed | NotFinite]:
    found: list[Agreed] = []
    for start in range(0, weights.n, CHUNK):
        part = slice(start, min(start + CHUNK, weights.n))
        outcome = yield from _average(weights, part, [], -1, step)
        if isinstance(outcome, NotFinite):
            return outcome
        found.append(outcome)
    mean, target, own = (torch.cat([getattr(each, name) for each in found]) for name in ("mean", "target", "own"))
    return Agreed(weights.all, mean, target, own, even_shares(weights.n, step.world_size))


def _average(
    weights: Weights, where: Where, counts: list[int], bad: int, step: Step
) -> Program[Agreed | NotFinite]:
    """Agree on the mean there. `bad` is a position of this worker that is known not to be finite."""
    own = weights.read(where)
    drift = weights.drift(where, own)
    bad = bad if bad >= 0 else _first_bad(drift, where)
    total, rest = yield from _sum(drift, bad >= 0, step)
    if total is None:
        return (yield from _say_where(bad, weights, step))
    return _agree(weights, where, own, total / step.world_size, rest, counts, step)


def _sum(drift: Tensor, bad: bool, step: Step) -> Program[tuple[Tensor | None, Tensor | None]]:
    """The sum over workers, None if it is not finite; and what this worker's rounding left out, if it rounds."""
    flag = drift.new_full((1,), math.nan if bad else 0.0)
    values = torch.cat([drift.nan_to_num(0.0, 0.0, 0.0) if bad else drift, flag])
    rest: Tensor | None = None
    if step.wire == torch.float32:
        total = yield from all_reduce("values", values)
    else:
        total, error = yield from rounded_sum("values", values, step.wire, step.rank, step.world_size)
        rest = error[:-1]
    return (total[:-1], rest) if ops.all_finite(total) else (None, None)


def _agree(
    weights: Weights,
    where: Where,
    own: Tensor,
    drift: Tensor,
    rest: Tensor | None,
    counts: list[int],
    step: Step,
) -> Agreed:
    """What follows from the mean over workers of their drift."""
    if step.world_size == 1:  # it agrees with itself, to the last bit
        return Agreed(where, own, own, own, counts)
    mean = weights.shared[where] - drift
    target = weights.rounded(where, mean)
    return Agreed(where, mean, target if rest is None else target - rest, own, counts)


def _first_bad(drift: Tensor, where: Where) -> int:
    if ops.all_finite(drift):
        return -1
    place = int(torch.where(~drift.isfinite())[0][0])
    return where.start + place if isinstance(where, slice) else int(where[place])


def _say_where(bad: int, weights: Weights, step: Step) -> Program[NotFinite]:
    own = torch.tensor([bad], device=weights.shared.device)
    rows = yield from all_gather("not finite", own, [1] * step.world_size)
    return NotFinite([int(row) for row in rows])
