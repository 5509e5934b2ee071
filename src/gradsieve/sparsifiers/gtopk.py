"""gTop-k: pairs of workers merge their picks, log2(P) times, and keep the k largest sums each time.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program, all_to_all
from gradsieve.comm.exchange import summed
from gradsieve.comm.pairs import Pairs, decode, encode, encoded_bytes
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Sparsifier, largest
from gradsieve.states import State


@dataclass(frozen=True)
class GTopK(Sparsifier[State]):
    """`S` = what remains of the workers' own top k after all merges: k positions, whatever the number of workers.

    Two differences to the paper. Its merges also make the update, so a sum that is dropped in one merge and whose
    position comes back through another loses what the first branch had contributed, although the residual there
    was cleared. Here merges only decide S, and everybody's values at S are summed afterwards: nothing is lost, for
    one all-reduce of k values more. And partners swap instead of one sending to the other, so that after the last
    merge all hold S and no broadcast follows.
    """

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        own = largest(acc, step.k)
        return Selection((yield from merge_all(Pairs(own, acc[own]), step)))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.agreed(acc, selection, step)


def merge_all(mine: Pairs, step: Step) -> Program[Tensor]:
    """The positions left of everybody's pairs, the same on all workers: each adds up what arrives of values.

    In round j the workers whose ranks differ in bit j swap. Where the number of workers is no power of two, those
    beyond the last one hand their pairs to a worker of the first rounds, and receive the result from it.
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
    length = encoded_bytes(count, span, step.wire)
    for target, source in rounds:
        message = encode(mine, span, step.wire)
        reply = yield from _pass_on("merge", message, target, source, length, step)
        if reply is not None:
            mine = merge(decode(message, count, span, step.wire), decode(reply, count, span, step.wire))
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
    replies = yield from all_to_all(tag, message[: sum(splits)], splits, step.rank, lengths)
    return None if source is None else replies[source]
