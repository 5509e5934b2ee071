"""DEFT: k is divided among layers by their norms, and layers among workers by the cost of sorting them.

Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
Sparsification", ICPP 2023.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program, broadcast
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Sparsifier, largest
from gradsieve.states import State


@dataclass(frozen=True)
class DEFT(Sparsifier[State]):
    """Worker r runs a top-k_i in each piece of bin `(t + r) mod P`.

    Leader `t mod P` derives both the k_i and the bins from its own accumulator and broadcasts them, so that the
    k_i add up to at most k. (In the authors' code every worker used its own norms, and the sum could exceed k.)
    """

    EXCLUSIVE: ClassVar[bool] = True

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        pieces = list(cut(step.sizes or (step.n,), step.world_size))
        plan = torch.zeros(2, len(pieces), dtype=torch.int64, device=acc.device)
        leader = step.index % step.world_size
        if step.rank == leader:
            lengths = [stop - start for start, stop in pieces]
            norms = [torch.linalg.vector_norm(acc[start:stop], dtype=torch.float64) for start, stop in pieces]
            picks = share_out(ops.read(torch.stack(norms))[0].tolist(), lengths, step.k)
            plan = ops.send([picks, pack(lengths, picks, step.world_size)], acc)
        picks, bins = ops.read((yield from broadcast("plan", plan, leader)))[0].tolist()
        mine = _bin_of(step.rank, step)
        totals = [sum(k for k, bin in zip(picks, bins, strict=True) if bin == b) for b in range(step.world_size)]
        found = [
            largest(acc[start:stop], k) + start
            for (start, stop), k, bin in zip(pieces, picks, bins, strict=True)
            if bin == mine and k > 0
        ]
        counts = [totals[_bin_of(rank, step)] for rank in range(step.world_size)]
        return Selection(torch.cat(found) if found else hits, counts)

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.disjoint(acc, selection, step)


def _bin_of(rank: int, step: Step) -> int:
    return (step.index + rank) % step.world_size


def cut(sizes: Sequence[int], world_size: int) -> Iterator[tuple[int, int]]:
    """Cut tensors into pieces `(start, stop)`; a tensor larger than an even share becomes one piece per worker."""
    offset, share = 0, sum(sizes) / world_size
    for size in sizes:
        parts = min(world_size, size) if size > share else 1
        for i in range(parts):
            start, stop = offset + i * size // parts, offset + (i + 1) * size // parts
            if start < stop:
                yield start, stop
        offset += size


def share_out(norms: Sequence[float], lengths: Sequence[int], k: int) -> list[int]:
    """How many elements each piece may send: in proportion to its norm, at least 1, at most all, k in total.

    Larger norms come first; what rounding or a full piece leaves over goes to the next ones, and what is left at
    the end to the first that has room.
    """
    picks = [0] * len(norms)
    order = sorted(range(len(norms)), key=lambda i: (-norms[i], i))
    left, norm_left = k, math.fsum(norms)
    for behind, i in zip(range(len(order) - 1, -1, -1), order, strict=True):
        wanted = int(left * norms[i] / norm_left) if norm_left > 0 else 0
        spare = max(left - behind, min(left, 1))  # one for each of those behind, as far as k goes
        picks[i] = min(max(wanted, 1), lengths[i], spare)
        left -= picks[i]
        norm_left -= norms[i]
    for i in order:
        more = min(lengths[i] - picks[i], left)
        picks[i] += more
        left -= more
    return picks


def pack(lengths: Sequence[int], picks: Sequence[int], world_size: int) -> list[int]:
    """The bin of each piece: pieces by falling cost, each to the bin with the least work so far.

    A piece costs `length * log2(k_i + 1)`, the time of its top-k (as released `log2(k_i)`, by which a piece with
    one pick was free); one that is sent whole needs no sort.
    """
    costs = [0.0 if k == length else length * math.log2(k + 1) for length, k in zip(lengths, picks, strict=True)]
    bins, filled = [0] * len(costs), [0.0] * world_size
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        bins[i] = filled.index(min(filled))
        filled[bins[i]] += costs[i]
    return bins
