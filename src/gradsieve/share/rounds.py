"""One round as a program: the workers agree on the entries that drifted farthest, and on their mean.

A round changes nothing: it returns what to write, which may be written at once or after the next step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program, all_gather, all_reduce
from gradsieve.comm.exchange import even_shares, gather_picks, health_flag
from gradsieve.comm.rounded import rounded_sum
from gradsieve.comm.step import Span, Step
from gradsieve.share.average import CHUNK
from gradsieve.share.outcome import Agreed, NotFinite, Unread, spread_of
from gradsieve.share.weights import Drift, Weights, Where
from gradsieve.sparsifiers import Sparsifier
from gradsieve.sparsifiers.base import hits_in
from gradsieve.sparsifiers.dense import Dense
from gradsieve.sparsifiers.exdyna import Exclusive
from gradsieve.states import State


def exchange(
    weights: Weights,
    sparsifier: Sparsifier[Any],
    state: State,
    step: Step,
    second: Callable[[Tensor], Tensor | None] | None = None,
    *,
    late: int | None = None,
    before: Unread | None = None,
) -> Program[Agreed | NotFinite]:
    """A round with any sparsifier; if workers have exclusive parts, each reads only its own.

    Only those use `second`, which is for `Drift`, and only those can be `late`, after that many completed steps:
    they leave part of the outcome on the device, to be read by the next round, which receives it as `before`.
    """
    if step.k >= step.n or isinstance(sparsifier, Dense):
        return _everything(weights, step)
    if isinstance(sparsifier, Exclusive):
        return _exclusive(weights, sparsifier, state, step, second, late, before)
    return _whole(weights, sparsifier, state, step)


def _exclusive(
    weights: Weights,
    sparsifier: Exclusive[Any],
    state: State,
    step: Step,
    second: Callable[[Tensor], Tensor | None] | None,
    late: int | None,
    before: Unread | None,
) -> Program[Agreed | NotFinite]:
    spans = sparsifier.spans(state, step)
    look = Drift(weights, spans[step.rank], second)
    hits = look.hits(sparsifier.window(state, step).threshold)
    selection = yield from sparsifier.select_in(state, look, hits, step, before.tensors if before else ())
    if before is not None and not selection.beside[0]:
        return (yield from say_where(weights, step, before.steps))
    picks, counts = yield from gather_picks(selection, step)
    where = _rising(picks, counts, spans)
    found = yield from _average(weights, where, counts, look.bad < 0, step)
    about = sparsifier.about(step)
    beside = [] if about is None else [about(where)]
    if late is not None:
        unread = Unread(late, found.agreed.counts, [found.finite, _norms(found.agreed), *beside])
        return replace(_where_finite(found, weights), selection=selection, unread=unread)
    agreed = yield from _checked([found], weights, slice(*spans[step.rank]), step, *beside)
    return replace(found.agreed, selection=selection, **agreed) if isinstance(agreed, dict) else agreed


def _rising(picks: Tensor, counts: list[int], spans: Sequence[Span]) -> Tensor:
    """Spans follow each other in another order than ranks: so all positions rise without being sorted."""
    parts = picks.split(counts)
    return torch.cat([parts[rank] for rank in sorted(range(len(spans)), key=lambda rank: spans[rank])])


def _whole(weights: Weights, sparsifier: Sparsifier[Any], state: State, step: Step) -> Program[Agreed | NotFinite]:
    """For sparsifiers that search the whole vector, which takes memory for it."""
    drift = weights.drift(weights.all, weights.read(weights.all))
    step = replace(step, healthy=ops.all_finite(drift))
    drift.nan_to_num_(0.0, 0.0, 0.0)
    hits = hits_in(drift, sparsifier.window(state, step), needed=sparsifier.NEEDS_HITS)
    selection = yield from sparsifier.select(state, drift, hits, step)
    sent = yield from sparsifier.exchange(drift, selection, step)
    if not sent.finite:
        return (yield from _say_where([weights.all], weights, step))
    assert sent.indices is not None
    where, order = sent.indices.sort()
    own = weights.read(where)
    agreed = _agree(weights, where, own, sent.values[order], drift[where], sent.counts, step)
    return replace(agreed, selection=selection, spread=spread_of(*ops.read(_norms(agreed))))


def _everything(weights: Weights, step: Step) -> Program[Agreed | NotFinite]:
    found: list[_Outcome] = []
    healthy = weights.shared.new_ones((), dtype=torch.bool)
    for start in range(0, weights.n, CHUNK):
        part = slice(start, min(start + CHUNK, weights.n))
        found.append((yield from _average(weights, part, [], healthy, step)))
    agreed = yield from _checked(found, weights, weights.all, step)
    if not isinstance(agreed, dict):
        return agreed
    parts = [each.agreed for each in found]
    mean, target, own = (torch.cat([getattr(each, name) for each in parts]) for name in ("mean", "target", "own"))
    return Agreed(weights.all, mean, target, own, even_shares(weights.n, step.world_size), **agreed)


@dataclass(frozen=True)
class _Outcome:
    """A mean, not yet checked, on the device."""

    agreed: Agreed
    finite: Tensor


def _average(weights: Weights, where: Where, counts: list[int], healthy: Tensor, step: Step) -> Program[_Outcome]:
    """Agree on the mean there; `healthy` is whether all values that this worker has searched are finite."""
    own = weights.read(where)
    total, rest = yield from _sum(weights.drift(where, own), healthy, step)
    agreed = _agree(weights, where, own, total[:-1] / step.world_size, rest, counts, step)
    return _Outcome(agreed, ops.all_finite(total))


def _sum(drift: Tensor, healthy: Tensor, step: Step) -> Program[tuple[Tensor, Tensor | None]]:
    """The sum over workers, a health flag behind it; and what this worker's rounding left out, if it rounds."""
    values = torch.cat([drift, health_flag(drift, replace(step, healthy=healthy))])
    if step.wire == torch.float32:
        return (yield from all_reduce("values", values)), None
    total, error = yield from rounded_sum("values", values, step.wire, step.rank, step.world_size)
    return total, error[:-1]


def _checked(
    found: list[_Outcome], weights: Weights, span: slice, step: Step, *beside: Tensor
) -> Program[dict[str, Any] | NotFinite]:
    """Read in one copy whether means are finite, and all other numbers of a round that the host needs."""
    norms = torch.stack([_norms(each.agreed) for each in found]).sum(0)
    finite, norms, *further = ops.read(torch.stack([each.finite for each in found]).all(), norms, *beside)
    if finite:
        return {"spread": spread_of(norms), **({"beside": further[0]} if further else {})}
    return (yield from _say_where([span, *(each.agreed.where for each in found)], weights, step))


def _agree(
    weights: Weights,
    where: Where,
    own: Tensor,
    drift: Tensor,
    rest: Tensor | None,
    counts: list[int],
    step: Step,
) -> Agreed:
    """The outcome for a mean drift over workers."""
    if step.world_size == 1:  # it agrees with itself, to the last bit
        return Agreed(where, own, own, own, counts)
    mean = weights.shared[where] - drift
    target = weights.rounded(where, mean)
    return Agreed(where, mean, target if rest is None else target - rest, own, counts)


def _norms(agreed: Agreed) -> Tensor:
    """Squared norms: of the mean, and of this worker's distance from it."""
    both = (agreed.mean, agreed.own - agreed.mean)
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in both]).square()


def _where_finite(found: _Outcome, weights: Weights) -> Agreed:
    """An outcome that changes nothing if its mean is not finite; the host does not wait to learn that."""
    made, finite = found.agreed, found.finite
    mean = torch.where(finite, made.mean, weights.shared[made.where])
    return replace(made, mean=mean, target=torch.where(finite, made.target, made.own))


def say_where(weights: Weights, step: Step, steps: int) -> Program[NotFinite]:
    """Whose weights are not finite, found in a round after so many `steps`."""
    parts: list[Where] = [slice(i, min(i + CHUNK, weights.n)) for i in range(0, weights.n, CHUNK)]
    return replace((yield from _say_where(parts, weights, step)), steps=steps)


def _say_where(places: list[Where], weights: Weights, step: Step) -> Program[NotFinite]:
    """Gather each worker's first position whose drift is not finite, among those that it searched."""
    found = [_first_bad(weights.drift(where, weights.read(where)), where) for where in places]
    bad = next((position for position in found if position >= 0), -1)
    rows = yield from all_gather("not finite", ops.send([bad], weights.shared), [1] * step.world_size)
    return NotFinite(ops.read(torch.cat(rows))[0].tolist())


def _first_bad(drift: Tensor, where: Where) -> int:
    bad = ops.read(torch.where(~drift.isfinite())[0][:1])[0].tolist()
    if not bad:
        return -1
    return int(where.start + bad[0] if isinstance(where, slice) else ops.read(where[bad[0]])[0])
