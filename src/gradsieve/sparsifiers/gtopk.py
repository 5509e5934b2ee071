"""gTop-k: pairs of workers merge their picks, log2(P) times, and keep the k largest sums each time.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import exchange, ops
from gradsieve.collectives import AllToAll, Program
from gradsieve.exchange import Exchanged, Step, summed
from gradsieve.sparsifiers._pairs import Pairs, decode, encode, encoded_bytes
from gradsieve.sparsifiers.base import Sparsifier, largest


@dataclass(eq=False)
class GTopK(Sparsifier):
    """`S` = what remains of the workers' own top k after all merges: k positions, whatever the number of workers.

    Two differences to the paper. Its merges also make the update, so a sum that is dropped in one merge and whose
    position comes back through another loses what the first branch had contributed, although the residual there
    was cleared. Here merges only decide S, and everybody's values at S are summed afterwards: nothing is lost, for
    one all-reduce of k values more. And partners swap instead of one telling the other, so that after the last
    merge all hold S and no broadcast follows.
    """

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        return largest(acc, step.k)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        agreed = yield from merge_all(Pairs(picked, acc[picked]), step, pulse.dtype)
        return (yield from exchange.agreed(acc, agreed, pulse, step))


def merge_all(mine: Pairs, step: Step, values_as: torch.dtype) -> Program[Tensor]:
    """The positions left of everybody's pairs, the same on all workers: each adds up what arrives of values.

    In round j the workers whose ranks differ in bit j swap. Where the number of workers is no power of two, those
    beyond the last one hand their pairs to a worker of the first rounds, and are told the result by it.
    """
    span, rank, count = (0, step.n), step.rank, len(mine.indices)
    inner = 1 << (step.world_size.bit_length() - 1)
    outside = rank >= inner
    guest = rank + inner if rank + inner < step.world_size else None  # who hands its pairs to this worker
    host = rank - inner if outside else None
    rounds: list[tuple[int | None, int | None]] = [(host, guest)] if inner < step.world_size else []
    for bit in range(inner.bit_length() - 1):
        partner = None if outside else rank ^ (1 << bit)
        rounds.append((partner, partner))
    length = encoded_bytes(count, span, values_as)
    for target, source in rounds:
        message = encode(mine, span, values_as)
        reply = yield from _pass_on("merge", message, target, source, length, step)
        if reply is not None:
            mine = merge(decode(message, count, span, values_as), decode(reply, count, span, values_as))
    if inner < step.world_size:
        packed = ops.pack_sorted(mine.indices, *span)
        reply = yield from _pass_on("indices", packed, guest, host, len(packed), step)
        if reply is not None:
            return ops.unpack_sorted(reply, count, *span)
    return mine.indices


def merge(one: Pairs, other: Pairs) -> Pairs:
    """As many as in each, the largest sums of both; the same, whichever comes first."""
    indices, total = summed([one.indices, other.indices], [one.values, other.values])
    # A stable sort, so that partners keep the same of equal magnitudes, whatever machine they are on.
    order = torch.sort(total.abs(), descending=True, stable=True).indices
    kept = order[: len(one.indices)].sort().values
    return Pairs(indices[kept], total[kept])


def _pass_on(
    tag: str, message: Tensor, target: int | None, source: int | None, length: int, step: Step
) -> Program[Tensor | None]:
    """Hand a message to one worker, if any, and receive one of `length` bytes from another, if any."""
    splits = [len(message) if rank == target else 0 for rank in range(step.world_size)]
    lengths = [length if rank == source else 0 for rank in range(step.world_size)]
    replies = yield AllToAll(tag, message[: sum(splits)], splits, step.rank, lengths)
    return None if source is None else replies[source]
