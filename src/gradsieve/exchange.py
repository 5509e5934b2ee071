"""How the workers' picks are combined.

Every exchange takes the accumulator, this worker's picked positions and a *pulse*: one number, 0 from a healthy
worker and NaN from one whose gradient was not finite. The pulse rides behind the values, so every worker learns
of a bad gradient in the same step without a further collective; its type is the one in which values travel (see
`wire`). What rounding to a narrower type leaves out stays in the accumulator.

Positions that were sent are cleared in the accumulator, which thereby becomes the residual. `counts`, where all
workers know beforehand how many positions each will pick, spares the round in which they tell; `spans`, where they
know in which part of the vector each picks, makes the packed positions shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.collectives import AllGather, AllReduce, Broadcast, Program, RoundedSum
from gradsieve.wire import decode, encode, message_length

Span: TypeAlias = tuple[int, int]  # the positions start <= i < stop


@dataclass(frozen=True)
class Step:
    """One step of one worker."""

    index: int  # from 0
    n: int  # elements of the gradient
    k: int  # how many of them all workers together should send
    rank: int
    world_size: int


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


def union(
    acc: Tensor, picked: Tensor, pulse: Tensor, step: Step, counts: Sequence[int] | None = None
) -> Program[Exchanged]:
    """Everybody's values wherever anybody picked: the union grows with the workers (gradient build-up)."""
    shared = yield from gather_picks(picked, step, counts)
    indices = _merged(torch.cat(shared), len(acc))
    return (yield from reduce_at(acc, indices, pulse, [len(part) for part in shared]))


def disjoint(
    acc: Tensor,
    picked: Tensor,
    pulse: Tensor,
    step: Step,
    counts: Sequence[int] | None = None,
    spans: Sequence[Span] | None = None,
) -> Program[Exchanged]:
    """As `union`, where picks of different workers never overlap: nothing to sort, nothing to merge."""
    shared = yield from gather_picks(picked, step, counts, spans)
    return (yield from reduce_at(acc, torch.cat(shared), pulse, [len(part) for part in shared]))


def own_index(
    acc: Tensor, picked: Tensor, pulse: Tensor, step: Step, counts: Sequence[int] | None = None
) -> Program[Exchanged]:
    """Each worker sends its own picks with its own values; what others picked stays in its residual."""
    shared = yield from gather_picks(picked, step, counts)
    lengths = [len(part) for part in shared]
    values, wire = ops.gather_clear_(acc, picked), pulse.dtype
    message = encode(torch.cat([values, pulse.to(acc.dtype)]), wire)
    acc[picked] = values - decode(message, wire)[:-1]
    sizes = [message_length(length + 1, wire) for length in lengths]
    gathered = [decode(part, wire) for part in (yield AllGather("values", message, sizes))]
    indices, total = summed(shared, [part[:-1] for part in gathered])
    pulses = torch.cat([part[-1:] for part in gathered])
    finite = ops.all_finite(total) and ops.all_finite(pulses)
    return Exchanged(indices, total / len(shared), lengths, finite)


AGGREGATIONS = {"union": union, "own": own_index}


def summed(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All positions that occur, rising, and at each the sum of its values, in float32 and in the given order."""
    merged, places = torch.cat(list(indices)).unique(return_inverse=True)
    received = torch.cat(list(values)).float()
    return merged, received.new_zeros(len(merged)).index_add_(0, places, received)


def leader(acc: Tensor, picked: Tensor, pulse: Tensor, step: Step, root: int) -> Program[Exchanged]:
    """Worker `root` picks for all. The others hand in as many positions, rising, of any content."""
    count = len(picked)
    packed = yield Broadcast("indices", ops.pack_sorted(picked, 0, step.n), root)
    counts = [count if rank == root else 0 for rank in range(step.world_size)]
    return (yield from reduce_at(acc, ops.unpack_sorted(packed, count, 0, step.n), pulse, counts))


def agreed(acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
    """All workers picked the same positions without talking: only values travel."""
    return (yield from reduce_at(acc, picked, pulse, even_shares(len(picked), step.world_size)))


def dense(acc: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
    """Everything is sent. The mean is left in the accumulator itself, so that no copy of it is needed."""
    acc[:1] += pulse.to(acc.dtype)
    total = yield AllReduce("values", acc)
    return Exchanged(
        None, total.div_(step.world_size), even_shares(len(acc), step.world_size), ops.all_finite(total)
    )


def sparse_sum(tensor: Tensor) -> Program[Tensor]:
    """The sum over workers of sparse tensors that each have few rows; added in rank order."""
    tensor = tensor.coalesce()
    rows = torch.cat((yield AllGather("sparse rows", tensor.indices().t().contiguous())))
    values = torch.cat((yield AllGather("sparse values", tensor.values())))
    return torch.sparse_coo_tensor(rows.t(), values, tensor.shape).coalesce()


def gather_picks(
    picked: Tensor,
    step: Step,
    counts: Sequence[int] | None = None,
    spans: Sequence[Span] | None = None,
) -> Program[list[Tensor]]:
    """Everybody's picks, in rank order; they travel packed."""
    if counts is None:
        own = torch.tensor([len(picked)], device=picked.device)
        counts = torch.cat((yield AllGather("counts", own, [1] * step.world_size))).tolist()
    spans = spans or [(0, step.n)] * step.world_size
    lengths = [ops.packed_bytes(count, stop - start) for count, (start, stop) in zip(counts, spans, strict=True)]
    packed = yield AllGather("indices", ops.pack_sorted(picked, *spans[step.rank]), lengths)
    return [ops.unpack_sorted(part, count, *span) for part, count, span in zip(packed, counts, spans, strict=True)]


def _merged(indices: Tensor, n: int) -> Tensor:
    """Sorted, without repetition. Where there are many, marking them costs less than sorting them."""
    if len(indices) * 32 < n:
        merged: Tensor = indices.unique()
        return merged
    marked = torch.zeros(n, dtype=torch.bool, device=indices.device)
    marked[indices] = True
    return torch.where(marked)[0]


def reduce_at(acc: Tensor, indices: Tensor, pulse: Tensor, counts: list[int]) -> Program[Exchanged]:
    """Everybody's values at positions that all workers know; `counts` are how many each of them put forward."""
    values = torch.cat([ops.gather_clear_(acc, indices), pulse.to(acc.dtype)])
    if pulse.dtype == acc.dtype:
        total = yield AllReduce("values", values)
    else:
        total, error = yield RoundedSum("values", values, pulse.dtype)
        acc[indices] = error[:-1]
    return Exchanged(indices, total[:-1] / len(counts), counts, ops.all_finite(total))


def even_shares(total: int, world_size: int) -> list[int]:
    """Shares as equal as can be, for exchanges in which nobody picks more than the others."""
    return [(rank + 1) * total // world_size - rank * total // world_size for rank in range(world_size)]
