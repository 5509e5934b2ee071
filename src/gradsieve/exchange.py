"""How the workers' picks are combined.

Every exchange takes the accumulator, this worker's picked positions and a *pulse*: one number, 0 from a healthy
worker and NaN from one whose gradient was not finite. The pulse rides behind the values, so every worker learns
of a bad gradient in the same step without a further collective.

Positions that were sent are cleared in the accumulator, which thereby becomes the residual. `counts`, where all
workers know beforehand how many positions each will pick, spares the round in which they tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.collectives import AllGather, AllReduce, Broadcast, Program


@dataclass(frozen=True)
class Exchanged:
    """What all workers hold after an exchange, the same on each of them."""

    indices: Tensor | None  # int64 positions in rank order, without repetition; None: every position
    values: Tensor  # the mean over workers at these positions
    counts: list[int]  # how many positions each worker put forward
    finite: bool  # False: some worker's gradient, or a sum, was not finite

    @property
    def union(self) -> int:
        """How many positions the update covers."""
        return self.values.numel()


def union(acc: Tensor, picked: Tensor, pulse: Tensor, counts: Sequence[int] | None = None) -> Program[Exchanged]:
    """Everybody's values wherever anybody picked: the union grows with the workers (gradient build-up)."""
    shared = yield AllGather("indices", narrow(picked, acc), counts)
    indices = _merged(torch.cat(shared), len(acc))
    return (yield from _reduce(acc, indices, pulse, [len(part) for part in shared]))


def disjoint(acc: Tensor, picked: Tensor, pulse: Tensor, counts: Sequence[int] | None = None) -> Program[Exchanged]:
    """As `union`, where picks of different workers never overlap: nothing to sort, nothing to merge."""
    shared = yield AllGather("indices", narrow(picked, acc), counts)
    return (yield from _reduce(acc, torch.cat(shared).long(), pulse, [len(part) for part in shared]))


def own_index(
    acc: Tensor, picked: Tensor, pulse: Tensor, counts: Sequence[int] | None = None
) -> Program[Exchanged]:
    """Each worker sends its own picks with its own values; what others picked stays in its residual."""
    shared = yield AllGather("indices", narrow(picked, acc), counts)
    lengths = [len(part) for part in shared]
    values = torch.cat([ops.gather_clear_(acc, picked), pulse])
    gathered = yield AllGather("values", values, lengths=[length + 1 for length in lengths])
    indices, places = torch.cat(shared).long().unique(return_inverse=True)
    total = acc.new_zeros(len(indices)).index_add_(0, places, torch.cat([part[:-1] for part in gathered]))
    pulses = torch.cat([part[-1:] for part in gathered])
    finite = ops.all_finite(total) and ops.all_finite(pulses)
    return Exchanged(indices, total / len(shared), lengths, finite)


def leader(acc: Tensor, picked: Tensor, pulse: Tensor, root: int, world_size: int) -> Program[Exchanged]:
    """Worker `root` picks for all. The others hand in as many positions, of any content."""
    indices = yield Broadcast("indices", narrow(picked, acc), root)
    counts = [len(picked) if rank == root else 0 for rank in range(world_size)]
    return (yield from _reduce(acc, indices.long(), pulse, counts))


def agreed(acc: Tensor, picked: Tensor, pulse: Tensor, world_size: int) -> Program[Exchanged]:
    """All workers picked the same positions without talking: only values travel."""
    return (yield from _reduce(acc, picked, pulse, _even(len(picked), world_size)))


def dense(acc: Tensor, pulse: Tensor, world_size: int) -> Program[Exchanged]:
    """Everything is sent. The mean is left in the accumulator itself, so that no copy of it is needed."""
    acc[:1] += pulse
    total = yield AllReduce("values", acc)
    return Exchanged(None, total.div_(world_size), _even(len(acc), world_size), ops.all_finite(total))


def narrow(indices: Tensor, acc: Tensor) -> Tensor:
    """Positions as they travel: 32 bits wherever they suffice."""
    return indices.to(torch.int32) if len(acc) <= torch.iinfo(torch.int32).max else indices


def _merged(indices: Tensor, n: int) -> Tensor:
    """Sorted, without repetition. Where there are many, marking them costs less than sorting them."""
    if len(indices) * 32 < n:
        merged: Tensor = indices.unique()
        return merged.long()
    marked = torch.zeros(n, dtype=torch.bool, device=indices.device)
    marked[indices.long()] = True
    return torch.where(marked)[0]


def _reduce(acc: Tensor, indices: Tensor, pulse: Tensor, counts: list[int]) -> Program[Exchanged]:
    values = torch.cat([ops.gather_clear_(acc, indices), pulse])
    total = yield AllReduce("values", values)
    return Exchanged(indices, total[:-1] / len(counts), counts, ops.all_finite(total))


def _even(total: int, world_size: int) -> list[int]:
    """Shares as equal as can be, for exchanges in which nobody picks more than the others."""
    return [(rank + 1) * total // world_size - rank * total // world_size for rank in range(world_size)]
