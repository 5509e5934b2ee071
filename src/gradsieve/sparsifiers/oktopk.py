"""Ok-Topk: a sparse all-reduce whose volume does not grow with the workers.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import at_least
from gradsieve.collectives import AllGather, AllReduce, AllToAll, Program
from gradsieve.exchange import Exchanged, Span, Step, summed
from gradsieve.sparsifiers._pairs import Pairs, decode, encode, encoded_bytes, trade
from gradsieve.sparsifiers._partition import even_bounds
from gradsieve.sparsifiers.base import NOTHING, Sparsifier, Window, largest
from gradsieve.wire import rounded

SLACK = 4 / 3  # a reused threshold may find this times k, or k divided by it; else it is evaluated anew
SHOWN = 2  # times k: how many sums the workers together show each other to find the global threshold
DRIFTED = 1.5  # times the mean: if a worker had more than that to tell, borders are drawn anew in the next step
UNEVEN = 2  # times the mean: a worker with more than that to tell passes some of it on first


@dataclass(eq=False)
class OkTopk(Sparsifier):
    """Picks above a threshold of its own, summed region by region; of the sums, those above a global threshold.

    The vector is cut into one region a worker. Everyone sends its picks to the owners of their regions, owners add
    up, and tell all others the sums that reach the global threshold, about k in total and never more. A
    worker's residual keeps what it did not pick, and picks whose sum was not told.

    reuse: after how many steps both thresholds are evaluated exactly again.
    rebalance: after how many steps the regions' borders are: each the mean over workers of where the border would
        have to be for its own picks to be shared out evenly.

    Beyond the paper, so that the volume keeps its bound when magnitudes change fast: a worker whose reused
    threshold finds too much or too little takes its exact top k at once; owners who together have more than k sums
    left keep the largest ones, k in total; and a global threshold or borders that did not fit are evaluated anew
    in the next step.
    """

    reuse: int = 32
    rebalance: int = 64
    SHARED: ClassVar[tuple[str, ...]] = ("threshold_age", "bounds_age", "threshold", "bounds")
    LOCAL: ClassVar[tuple[str, ...]] = ("own_threshold",)

    def __post_init__(self) -> None:
        at_least("reuse", self.reuse, 1)
        at_least("rebalance", self.rebalance, 1)

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self.threshold_age = self.bounds_age = 0  # steps since the last evaluation; 0: it is due
        self.threshold = self.own_threshold = 0.0
        self.bounds = even_bounds(step.n, step.world_size)

    def window(self, step: Step) -> Window:
        due = self.threshold_age == 0 or self.own_threshold == 0
        return NOTHING if due else Window(self.own_threshold, 0, step.n)

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        self._own_threshold = self.own_threshold
        if _fits(len(hits), step.k):
            return hits
        picked = largest(acc, step.k)
        picked = picked[acc[picked] != 0]
        self._own_threshold = float(acc[picked].abs().min()) if len(picked) else 0.0
        return picked

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        bounds = self.bounds if self.bounds_age else (yield from agree_on_bounds(picked, step))
        regions = list(pairwise(bounds))
        sent = Pairs(picked, rounded(acc[picked], pulse.dtype))
        indices, sums = yield from split_and_reduce(sent, regions, step, pulse.dtype)
        threshold = self.threshold if self.threshold_age else (yield from kth_largest(sums, step))

        kept = ops.select_above(sums, threshold)
        found = yield AllGather("counts", torch.tensor([len(kept)], device=acc.device), [1] * step.world_size)
        found = torch.cat(found).tolist()
        counts = thin_out(found, step.k)
        kept = kept[largest(sums[kept], counts[step.rank])]
        told = Pairs(indices[kept], rounded(sums[kept], pulse.dtype))
        if not ops.all_finite(sums):  # the sum that is not finite may not be among those that are told
            pulse = torch.full_like(pulse, math.nan)
        everyone, finite = yield from balance_and_gather(told, pulse, counts, regions, step)

        counted = torch.isin(picked, everyone.indices, assume_unique=True)
        acc[picked[counted]] -= sent.values[counted]
        # Not `told.values`: beside larger ones of other workers they may have been rounded once more.
        arrived = everyone.values[torch.searchsorted(everyone.indices, told.indices)]
        acc[told.indices] += sums[kept] - arrived.to(acc.dtype)
        self._evaluated = threshold, bounds
        self._misfit = not _fits(sum(found), step.k)
        return Exchanged(everyone.indices, everyone.values.to(acc.dtype) / step.world_size, counts, finite)

    def observe(self, sent: Exchanged, step: Step) -> None:
        self.own_threshold = self._own_threshold
        self.threshold, self.bounds = self._evaluated
        self.threshold_age = 0 if self._misfit else (self.threshold_age + 1) % self.reuse
        self.bounds_age = 0 if exceeds_mean(sent.counts, DRIFTED) else (self.bounds_age + 1) % self.rebalance

    def rescale(self, factor: float) -> None:
        self.threshold *= factor
        self.own_threshold *= factor

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Sums of more or fewer workers need another threshold, and other regions."""
        return {**super().fitting(state_dict), "threshold_age": 0, "bounds_age": 0}

    @property
    def threshold_in_use(self) -> float | None:
        """Of sums over workers."""
        return self._evaluated[0]


def _fits(count: int, k: int) -> bool:
    return k / SLACK <= count <= k * SLACK


def agree_on_bounds(picked: Tensor, step: Step) -> Program[list[int]]:
    """Region i is `bounds[i] <= position < bounds[i + 1]`: the mean of what would suit each worker."""
    own = torch.tensor(own_bounds(picked, step.n, step.world_size), device=picked.device)
    total = yield AllReduce("bounds", own)
    return [int(border) // step.world_size for border in total.tolist()]


def own_bounds(picked: Tensor, n: int, parts: int) -> list[int]:
    """Borders between which there are as many picks each, as far as that goes."""
    if len(picked) == 0:
        return even_bounds(n, parts)
    return [0, *(int(picked[place]) for place in even_bounds(len(picked), parts)[1:-1]), n]


def split_and_reduce(picks: Pairs, regions: Sequence[Span], step: Step, values_as: torch.dtype) -> Program[Pairs]:
    """All that was picked in this worker's region, summed over workers in rank order, in float32."""
    cuts = torch.tensor([stop for _, stop in regions[:-1]], device=picks.indices.device)
    places = [0, *torch.searchsorted(picks.indices, cuts).tolist(), len(picks.indices)]
    parts = [Pairs(picks.indices[a:b], picks.values[a:b]) for a, b in pairwise(places)]
    own = torch.tensor([len(part.indices) for part in parts], device=picks.indices.device)
    one = [1] * step.world_size
    counts = torch.cat((yield AllToAll("counts", own, one, step.rank, one))).tolist()
    here = [regions[step.rank]] * step.world_size
    received = yield from trade("split", parts, regions, counts, here, step.rank, values_as)
    return Pairs(*summed([part.indices for part in received], [part.values for part in received]))


def kth_largest(sums: Tensor, step: Step) -> Program[float]:
    """The magnitude that k of all sums reach; 0 if there are no more than k.

    An owner shows no more than twice its share of k. If it alone has more than that above the threshold, the
    threshold comes out too low, and what is too much is thinned out.
    """
    shown = min(len(sums), -(-SHOWN * step.k // step.world_size))
    magnitudes = torch.cat((yield AllGather("threshold", sums.abs().topk(shown).values)))
    return float(magnitudes.topk(step.k).values[-1]) if len(magnitudes) > step.k else 0.0


def thin_out(counts: list[int], k: int) -> list[int]:
    """Where all together have more than k, k of them, from each in proportion.

    All know the counts already, so this costs no round; if the threshold was far off, some of what stays behind is
    larger than some of what is told, until the next step.
    """
    total = sum(counts)
    if total <= k:
        return counts
    return [after - before for before, after in pairwise(so_far * k // total for so_far in _sums(counts))]


def exceeds_mean(counts: list[int], times: float) -> bool:
    """Whether one has so many times the mean, or more."""
    return max(counts) * len(counts) > times * sum(counts)


def balance_and_gather(
    told: Pairs, pulse: Tensor, counts: list[int], regions: Sequence[Span], step: Step
) -> Program[tuple[Pairs, bool]]:
    """Everybody's pairs, rising, and whether all values and pulses are finite."""
    if exceeds_mean(counts, UNEVEN):
        told, counts = yield from balance(told, counts, regions, step, pulse.dtype)
        regions = [(0, step.n)] * step.world_size
    values = torch.cat([told.values, pulse.to(told.values.dtype)])
    message = encode(Pairs(told.indices, values), regions[step.rank], pulse.dtype)
    lengths = [
        encoded_bytes(count, region, pulse.dtype, pulses=1) for count, region in zip(counts, regions, strict=True)
    ]
    replies = yield AllGather("values", message, lengths)
    parts = [
        decode(reply, count, region, pulse.dtype)
        for reply, count, region in zip(replies, counts, regions, strict=True)
    ]
    finite = ops.all_finite(torch.cat([part.values for part in parts]))
    return Pairs(torch.cat([p.indices for p in parts]), torch.cat([p.values[:-1] for p in parts])), finite


def balance(
    told: Pairs, counts: list[int], regions: Sequence[Span], step: Step, values_as: torch.dtype
) -> Program[tuple[Pairs, list[int]]]:
    """The same pairs in the same order, as many at each worker; who sends what to whom follows from the counts."""
    held, wanted = _sums(counts), even_bounds(sum(counts), step.world_size)

    def shared(owner: int, receiver: int) -> Span:
        """Which of the owner's pairs the receiver gets."""
        inside = (min(max(border, held[owner]), held[owner + 1]) for border in wanted[receiver : receiver + 2])
        start, stop = (place - held[owner] for place in inside)
        return start, stop

    everyone = range(step.world_size)
    cuts = [shared(step.rank, receiver) for receiver in everyone]
    coming = [stop - start for start, stop in (shared(owner, step.rank) for owner in everyone)]
    parts = [Pairs(told.indices[a:b], told.values[a:b]) for a, b in cuts]
    own = [regions[step.rank]] * step.world_size
    received = yield from trade("balance", parts, own, coming, regions, step.rank, values_as)
    pairs = Pairs(torch.cat([p.indices for p in received]), torch.cat([p.values for p in received]))
    return pairs, [stop - start for start, stop in pairwise(wanted)]


def _sums(counts: list[int]) -> list[int]:
    return list(accumulate(counts, initial=0))
