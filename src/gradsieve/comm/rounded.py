"""Sums in two rounds: each worker adds up one slice of the vector and sends the sum to all.

Parts are added in rank order, so the sum does not depend on which worker was faster: real processes and virtual
workers agree to the last bit. Values may travel in a narrower type than they have. The rounding error is returned
to the worker that rounded, so the total and all errors together are exactly what went in.
"""

import torch
from torch import Tensor

from gradsieve.comm.collectives import Program, all_gather, all_to_all, pad
from gradsieve.comm.wire import decode, encode


def rounded_sum(
    tag: str, tensor: Tensor, wire: torch.dtype, rank: int, world_size: int
) -> Program[tuple[Tensor, Tensor]]:
    """The sum over workers of a vector that travels as `wire`, and this worker's rounding error.

    Each worker rounds what it sends, and then the sum of its own slice; it does not round its own part of that
    slice before adding.
    """
    rows = slices(tensor, world_size)
    sent = encode(rows, wire)
    one = [1] * world_size
    parts = yield from all_to_all(tag, sent, one, rank, one)
    total = torch.zeros_like(rows[rank])
    for sender, part in enumerate(decode(torch.cat(parts), wire)):
        total += rows[rank] if sender == rank else part
    message = encode(total, wire)
    error = rows - decode(sent, wire)
    error[rank] = total - decode(message, wire)
    sums = torch.stack((yield from all_gather(tag, message, [len(message)] * world_size)))
    everything = decode(sums, wire).flatten().to(tensor.dtype)
    return everything[: len(tensor)], error.flatten()[: len(tensor)]


def slices(tensor: Tensor, world_size: int) -> Tensor:
    """A vector as rows of equal length, one per worker, padded with zeros at the end."""
    length = -(-len(tensor) // world_size)
    return pad(tensor, length * world_size).view(world_size, length)
