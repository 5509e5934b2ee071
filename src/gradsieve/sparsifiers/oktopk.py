"""Ok-Topk: a sparse all-reduce whose volume does not grow with the workers.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import at_least
from gradsieve.comm.collectives import Program, all_gather, all_reduce, all_to_all
from gradsieve.comm.exchange import health_flag, is_finite, summed
from gradsieve.comm.pairs import Pairs, decode, encode, encoded_bytes, trade
from gradsieve.comm.step import Selection, Sent, Span, Step
from gradsieve.comm.wire import rounded
from gradsieve.sparsifiers.base import NOTHING, Shape, Sparsifier, Window, largest
from gradsieve.sparsifiers.exdyna.partition import even_bounds
from gradsieve.states import State, local, shared

SLACK = 4 / 3  # a reused threshold may find between k / SLACK and k * SLACK elements; else it is recomputed
SHOWN = 2  # times k: how many sums all workers together exchange to find the global threshold
DRIFTED = 1.5  # times the mean: if a worker had more than that to send, borders are recomputed in the next step
UNEVEN = 2  # times the mean: a worker with more than that to send passes some of it to others first


@dataclass(frozen=True)
class OkTopkState(State):
    bounds: tuple[int, ...] = shared(per_worker=True)  # region i is bounds[i] <= position < bounds[i + 1]
    bounds_age: int = shared(0, per_worker=True)  # steps since their last evaluation; 0: it is due
    threshold: float = shared(0.0, power=1, per_worker=True)  # of sums over workers
    threshold_age: int = shared(0, per_worker=True)
    own_threshold: float = local(0.0, power=1)  # of this worker's own elements


@dataclass(frozen=True)
class Plan:
    """What a selection hands to the exchange and the update."""

    own: Pairs  # this worker's picks, as sent to the owners of their regions
    sums: Pairs  # sums of this worker's region that are sent to all
    finite: Tensor  # whether all sums of the region are finite
    after: OkTopkState  # the next state, except for the age of the bounds


@dataclass(frozen=True)
class OkTopk(Sparsifier[OkTopkState]):
    """Each worker picks by its own threshold; picks are summed by region; sums above a global threshold are sent.

    The vector is cut into one region per worker. Workers send their picks to the owners of the regions; owners add
    them up and send all others the sums that reach the global threshold, about k in total and never more. A
    worker's residual keeps what it did not pick, and picks whose sum was not sent.

    reuse: number of steps after which both thresholds are recomputed exactly.
    rebalance: number of steps after which the regions' borders are recomputed. A border is the mean over workers of
        the one that would divide their own picks evenly.

    Beyond the paper, to keep the bound on the volume when magnitudes change fast: a worker whose reused threshold
    finds too much or too little takes its exact top k at once; owners that together have more than k sums left
    keep the largest ones, k in total; a global threshold or borders that did not fit are recomputed in the next
    step.
    """

    reuse: int = 32
    rebalance: int = 64

    def __post_init__(self) -> None:
        at_least("reuse", self.reuse, 1)
        at_least("rebalance", self.rebalance, 1)

    def init(self, shape: Shape) -> OkTopkState:
        return OkTopkState(even_bounds(shape.n, shape.world_size))

    def window(self, state: OkTopkState, step: Step) -> Window:
        due = state.threshold_age == 0 or state.own_threshold == 0
        return NOTHING if due else Window(state.own_threshold, 0, step.n)

    def select(self, state: OkTopkState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        picked, own_threshold = hits, state.own_threshold
        if not _fits(len(hits), step.k):
            picked = largest(acc, step.k)
            picked = picked[acc[picked] != 0]
            own_threshold = float(ops.read(acc[picked].abs().min())[0]) if len(picked) else 0.0
        bounds = state.bounds if state.bounds_age else (yield from agree_on_bounds(picked, step))
        own = Pairs(picked, rounded(acc[picked], step.wire))
        region = yield from split_and_reduce(own, list(pairwise(bounds)), step)
        threshold = state.threshold if state.threshold_age else (yield from kth_largest(region.values, step))
        kept = ops.select_above(region.values, threshold)
        own_count = kept.new_full((1,), len(kept))
        rows = yield from all_gather("counts", own_count, [1] * step.world_size)
        found = ops.read(torch.cat(rows))[0].tolist()
        counts = thin_out(found, step.k)
        kept = kept[largest(region.values[kept], counts[step.rank])]
        after = replace(
            state,
            bounds=tuple(bounds),
            threshold=threshold,
            threshold_age=(state.threshold_age + 1) % self.reuse if _fits(sum(found), step.k) else 0,
            own_threshold=own_threshold,
        )
        sums = Pairs(region.indices[kept], region.values[kept])
        plan = Plan(own, sums, ops.all_finite(region.values), after)
        return Selection(picked, counts, list(pairwise(bounds)), threshold, plan)

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        plan: Plan = selection.plan
        own, sums, counts = plan.own, plan.sums, list(selection.counts or ())
        # The non-finite sum may not be among those that are sent to all.
        step = replace(step, healthy=plan.finite & step.healthy)
        message = Pairs(sums.indices, rounded(sums.values, step.wire))
        everyone, finite = yield from balance_and_gather(message, counts, selection.spans or (), step)
        counted = torch.isin(own.indices, everyone.indices, assume_unique=True)
        acc[own.indices[counted]] -= own.values[counted]
        # Not the message's values: beside larger ones of other workers they may have been rounded again.
        arrived = everyone.values[torch.searchsorted(everyone.indices, sums.indices)]
        acc[sums.indices] += sums.values - arrived.to(acc.dtype)
        return Sent(everyone.indices, everyone.values.to(acc.dtype) / step.world_size, counts, finite)

    def update(self, state: OkTopkState, selection: Selection, sent: Sent, step: Step) -> OkTopkState:
        after: OkTopkState = selection.plan.after
        drifted = exceeds_mean(sent.counts, DRIFTED)
        return replace(after, bounds_age=0 if drifted else (state.bounds_age + 1) % self.rebalance)


def _fits(count: int, k: int) -> bool:
    return k / SLACK <= count <= k * SLACK


def agree_on_bounds(picked: Tensor, step: Step) -> Program[list[int]]:
    """Region i is `bounds[i] <= position < bounds[i + 1]`: the mean over workers of their own bounds."""
    own = ops.send(own_bounds(picked, step.n, step.world_size), picked)
    total = yield from all_reduce("bounds", own)
    return [int(border) // step.world_size for border in ops.read(total)[0].tolist()]


def own_bounds(picked: Tensor, n: int, parts: int) -> Sequence[int]:
    """Borders between which there are equally many picks, as nearly as possible."""
    if len(picked) == 0:
        return even_bounds(n, parts)
    places = ops.send(even_bounds(len(picked), parts)[1:-1], picked)
    return [0, *ops.read(picked[places])[0].tolist(), n]


def split_and_reduce(picks: Pairs, regions: Sequence[Span], step: Step) -> Program[Pairs]:
    """Everything picked in this worker's region, summed over workers in rank order, in float32."""
    cuts = ops.send([stop for _, stop in regions[:-1]], picks.indices)
    places = [0, *ops.read(torch.searchsorted(picks.indices, cuts))[0].tolist(), len(picks.indices)]
    parts = [Pairs(picks.indices[a:b], picks.values[a:b]) for a, b in pairwise(places)]
    own = ops.send([len(part.indices) for part in parts], picks.indices)
    one = [1] * step.world_size
    counts = ops.read(torch.cat((yield from all_to_all("counts", own, one, step.rank, one))))[0].tolist()
    here = [regions[step.rank]] * step.world_size
    received = yield from trade("split", parts, regions, counts, here, step.rank, step.wire)
    return Pairs(*summed([part.indices for part in received], [part.values for part in received]))


def kth_largest(sums: Tensor, step: Step) -> Program[float]:
    """The magnitude that k of all sums reach; 0 if there are no more than k.

    An owner sends at most twice its share of k. If it has more than that above the threshold, the threshold comes
    out too low, and `thin_out` removes the excess.
    """
    shown = min(len(sums), -(-SHOWN * step.k // step.world_size))
    magnitudes = torch.cat((yield from all_gather("threshold", sums.abs().topk(shown).values)))
    return float(ops.read(magnitudes.topk(step.k).values[-1])[0]) if len(magnitudes) > step.k else 0.0


def thin_out(counts: list[int], k: int) -> list[int]:
    """Reduce the sums to k in total, in proportion, if all workers together have more.

    All workers know the counts already, so this needs no further round. If the threshold was far off, some of the
    sums that wait are larger than some that are sent; the next step corrects that.
    """
    total = sum(counts)
    if total <= k:
        return counts
    return [after - before for before, after in pairwise(so_far * k // total for so_far in _sums(counts))]


def exceeds_mean(counts: list[int], times: float) -> bool:
    """Whether the largest count is at least `factor` times the mean."""
    return max(counts) * len(counts) > times * sum(counts)


def balance_and_gather(
    sums: Pairs, counts: list[int], regions: Sequence[Span], step: Step
) -> Program[tuple[Pairs, bool]]:
    """All workers' pairs, in rising order, and whether all values and health flags are finite."""
    if exceeds_mean(counts, UNEVEN):
        sums, counts = yield from balance(sums, counts, regions, step)
        regions = [(0, step.n)] * step.world_size
    values = torch.cat([sums.values, health_flag(sums.values, step)])
    message = encode(Pairs(sums.indices, values), regions[step.rank], step.wire)
    lengths = [
        encoded_bytes(count, region, step.wire, flags=1) for count, region in zip(counts, regions, strict=True)
    ]
    replies = yield from all_gather("values", message, lengths)
    parts = [
        decode(reply, count, region, step.wire)
        for reply, count, region in zip(replies, counts, regions, strict=True)
    ]
    finite = is_finite(torch.cat([part.values for part in parts]))
    return Pairs(torch.cat([p.indices for p in parts]), torch.cat([p.values[:-1] for p in parts])), finite


def balance(
    sums: Pairs, counts: list[int], regions: Sequence[Span], step: Step
) -> Program[tuple[Pairs, list[int]]]:
    """The same pairs in the same order, equally many at each worker; who sends what follows from the counts."""
    held, wanted = _sums(counts), even_bounds(sum(counts), step.world_size)

    def shared(owner: int, receiver: int) -> Span:
        """The range of the owner's pairs that the receiver gets."""
        inside = (min(max(border, held[owner]), held[owner + 1]) for border in wanted[receiver : receiver + 2])
        start, stop = (place - held[owner] for place in inside)
        return start, stop

    everyone = range(step.world_size)
    cuts = [shared(step.rank, receiver) for receiver in everyone]
    coming = [stop - start for start, stop in (shared(owner, step.rank) for owner in everyone)]
    parts = [Pairs(sums.indices[a:b], sums.values[a:b]) for a, b in cuts]
    own = [regions[step.rank]] * step.world_size
    received = yield from trade("balance", parts, own, coming, regions, step.rank, step.wire)
    pairs = Pairs(torch.cat([p.indices for p in received]), torch.cat([p.values for p in received]))
    return pairs, [stop - start for start, stop in pairwise(wanted)]


def _sums(counts: list[int]) -> list[int]:
    return list(accumulate(counts, initial=0))
