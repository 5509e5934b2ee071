"""How the workers' picks are combined.

Every exchange takes the accumulator, this worker's `Selection` and the `Step`. After the values a health flag is
sent: 0 from a healthy worker, NaN from one whose gradient is not finite. So every worker learns of a bad gradient
in the same step, without a further collective. Values travel as `step.wire`; what rounding to a narrower type
leaves out stays in the accumulator.

Positions that were sent are cleared in the accumulator, which thereby becomes the residual.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program, all_gather, all_reduce, broadcast
from gradsieve.comm.rounded import rounded_sum
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.comm.wire import decode, encode, message_length

Exchange = Callable[[Tensor, Selection, Step], Program[Sent]]
About = Callable[[Tensor], Tensor]  # computes a few numbers about positions


def union(acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
    """All workers' values at every position that any worker picked: grows with the workers (gradient build-up)."""
    picks, counts = yield from gather_picks(selection, step)
    return (yield from reduce_at(acc, merged(picks, len(acc)), counts, step))


def disjoint(acc: Tensor, selection: Selection, step: Step, beside: About | None = None) -> Program[Sent]:
    """As `union`, if picks of different workers never overlap: nothing to sort, nothing to merge."""
    picks, counts = yield from gather_picks(selection, step)
    return (yield from reduce_at(acc, picks, counts, step, beside))


def own_index(acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
    """Each worker sends its own picks with its own values; what others picked stays in its residual."""
    picks, counts = yield from gather_picks(selection, step)
    values = ops.gather_clear_(acc, selection.picked)
    message = encode(torch.cat([values, health_flag(acc, step)]), step.wire)
    acc[selection.picked] = values - decode(message, step.wire)[:-1]
    sizes = [message_length(count + 1, step.wire) for count in counts]
    gathered = [decode(part, step.wire) for part in (yield from all_gather("values", message, sizes))]
    indices, total = summed([picks], [part[:-1] for part in gathered])
    flags = torch.cat([part[-1:] for part in gathered]).float()
    return Sent(indices, total / step.world_size, counts, is_finite(torch.cat([total, flags])))


AGGREGATIONS: dict[str, Exchange] = {"union": union, "own": own_index}


def leader(acc: Tensor, selection: Selection, step: Step, root: int) -> Program[Sent]:
    """Worker `root` picks for all. The others pass as many positions, rising, of any content."""
    count = len(selection.picked)
    packed = yield from broadcast("indices", ops.pack_sorted(selection.picked, 0, step.n), root)
    counts = [count if rank == root else 0 for rank in range(step.world_size)]
    return (yield from reduce_at(acc, ops.unpack_sorted(packed, count, 0, step.n), counts, step))


def agreed(acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
    """All workers picked the same positions: only values travel. `counts` default to equal shares."""
    counts = selection.counts or even_shares(len(selection.picked), step.world_size)
    return (yield from reduce_at(acc, selection.picked, list(counts), step))


def dense(acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
    """Everything is sent. The mean is left in the accumulator itself, which saves a copy."""
    acc[:1] += health_flag(acc, step)
    total = yield from all_reduce("values", acc)
    counts = even_shares(len(acc), step.world_size)
    return Sent(None, total.div_(step.world_size), counts, is_finite(total))


def sparse_sum(tensor: Tensor) -> Program[Tensor]:
    """The sum over workers of sparse tensors that each have few rows; added in rank order."""
    tensor = tensor.coalesce()
    rows = torch.cat((yield from all_gather("sparse rows", tensor.indices().t().contiguous())))
    values = torch.cat((yield from all_gather("sparse values", tensor.values())))
    return torch.sparse_coo_tensor(rows.t(), values, tensor.shape).coalesce()


def gather_picks(selection: Selection, step: Step) -> Program[tuple[Tensor, list[int]]]:
    """All workers' picks, one worker's after the other's, and how many each has; they are sent packed.

    Known `counts` save the round in which they are exchanged; known `spans` make the packed positions shorter.
    """
    counts, spans = selection.counts, selection.spans or [(0, step.n)] * step.world_size
    if counts is None:
        own = selection.picked.new_full((1,), len(selection.picked))
        rows = yield from all_gather("counts", own, [1] * step.world_size)
        counts = ops.read(torch.cat(rows))[0].tolist()
    own = ops.pack_sorted(selection.picked, *spans[step.rank])
    packed = yield from all_gather("indices", own, ops.packed_lengths(counts, spans))
    return ops.unpack_parts(packed, counts, spans), list(counts)


def reduce_at(
    acc: Tensor, indices: Tensor, counts: list[int], step: Step, beside: About | None = None
) -> Program[Sent]:
    """All workers' values at positions that all know; `counts` are how many each worker picked.

    What `beside` computes of the positions is read from the device together with the check of the sums.
    """
    values = torch.cat([ops.gather_clear_(acc, indices), health_flag(acc, step)])
    if step.wire == acc.dtype:
        total = yield from all_reduce("values", values)
    else:
        total, error = yield from rounded_sum("values", values, step.wire, step.rank, step.world_size)
        acc[indices] = error[:-1]
    finite, *further = ops.read(ops.all_finite(total), *([] if beside is None else [beside(indices)]))
    return Sent(indices, total[:-1] / step.world_size, counts, bool(finite), *further)


def health_flag(like: Tensor, step: Step) -> Tensor:
    """The number that is sent after the values: NaN from a worker whose gradient is not finite."""
    if isinstance(step.healthy, Tensor):
        return like.new_zeros(1).masked_fill(~step.healthy, math.nan)
    return like.new_full((1,), 0.0 if step.healthy else math.nan)


def is_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return bool(ops.read(ops.all_finite(x))[0])


def summed(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All positions that occur, rising, and at each the sum of its values, in float32 and in the given order."""
    found, places = torch.cat(list(indices)).unique(return_inverse=True)
    received = torch.cat(list(values)).float()
    return found, received.new_zeros(len(found)).index_add_(0, places, received)


def merged(indices: Tensor, n: int) -> Tensor:
    """Sorted, without repetition. If there are many, marking them costs less than sorting them."""
    if len(indices) * 32 < n:
        found: Tensor = indices.unique()
        return found
    marked = torch.zeros(n, dtype=torch.bool, device=indices.device)
    marked[indices] = True
    return torch.where(marked)[0]


def even_shares(total: int, world_size: int) -> list[int]:
    """Shares of a total that differ by at most one, for exchanges in which no worker picks more than others."""
    return [(rank + 1) * total // world_size - rank * total // world_size for rank in range(world_size)]
