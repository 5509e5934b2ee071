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
    """`S` = what remains of the workers' own top k after all merges: k positions for any number of workers.

    Two differences from the paper. Its merges also produce the update: if a sum is dropped in one merge and its
    position returns through another, the first branch's contribution is lost although its residual was cleared.
    Here merges only decide S, and all workers' values at S are summed afterwards: nothing is lost, at the price of
    one more all-reduce of k values. And partners swap pairs instead of one sending to the other, so after the last
    merge all workers hold S and no broadcast is needed.
    """

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        own = largest(acc, step.k)
        return Selection((yield from merge_all(Pairs(own, acc[own]), step)))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.agreed(acc, selection, step)


def merge_all(mine: Pairs, step: Step) -> Program[Tensor]:
    """The positions that remain of all workers' pairs, the same on all workers; values are added at each merge.

    In round j, workers whose ranks differ in bit j swap. If the number of workers is not a power of two, those
    beyond the last power pass their pairs to one of the others first, and receive the result at the end.
    """
    span, rank, count = (0, step.n), step.rank, len(mine.indices)
    inner = 1 << (step.world_size.bit_length() - 1)
    outside = rank >= inner
    guest = rank + inner if rank + inner < step.world_size else None  # passes its pairs to this worker
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
    """Add up two sets of pairs and keep the largest sums, as many as in each set; the order does not matter."""
    indices, total = summed([one.indices, other.indices], [one.values, other.values])
    # A stable sort: partners on different machines keep the same ones of equal magnitudes.
    order = torch.sort(total.abs(), descending=True, stable=True).indices
    kept = order[: len(one.indices)].sort().values
    return Pairs(indices[kept], total[kept])


def _pass_on(
    tag: str, message: Tensor, target: int | None, source: int | None, length: int, step: Step
) -> Program[Tensor | None]:
    """Send a message to one worker, if any, and receive one of `length` bytes from another, if any."""
    splits = [len(message) if rank == target else 0 for rank in range(step.world_size)]
    lengths = [length if rank == source else 0 for rank in range(step.world_size)]
    replies = yield from all_to_all(tag, message[: sum(splits)], splits, step.rank, lengths)
    return None if source is None else replies[source]
