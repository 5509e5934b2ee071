"""Positions and their values in one message: the values, then the positions packed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm import wire
from gradsieve.comm.collectives import Program, all_to_all
from gradsieve.comm.step import Span


class Pairs(NamedTuple):
    """Rising positions, and a value for each; values may be followed by one more, the health flag."""

    indices: Tensor
    values: Tensor


def encode(pairs: Pairs, span: Span, values_as: torch.dtype) -> Tensor:
    """As bytes; all positions lie in `span`."""
    values = wire.encode(pairs.values, values_as).view(torch.uint8)
    return torch.cat([values, ops.pack_sorted(pairs.indices, *span)])


def decode(message: Tensor, count: int, span: Span, values_as: torch.dtype) -> Pairs:
    """The pairs that were encoded, `count` of them."""
    packed = ops.packed_bytes(count, span[1] - span[0])
    values, positions = message.split([len(message) - packed, packed])
    # A copy, because a view as another type must begin at a multiple of its size.
    return Pairs(ops.unpack_sorted(positions.contiguous(), count, *span), wire.decode(values.clone(), values_as))


def encoded_bytes(count: int, span: Span, values_as: torch.dtype, flags: int = 0) -> int:
    """Length of a message of `count` pairs."""
    return wire.message_bytes(count + flags, values_as) + ops.packed_bytes(count, span[1] - span[0])


def trade(
    tag: str,
    parts: Sequence[Pairs],
    spans: Sequence[Span],
    counts: Sequence[int],
    sources: Sequence[Span],
    rank: int,
    values_as: torch.dtype,
) -> Program[list[Pairs]]:
    """Send part i, with positions in `spans[i]`, to worker i; receive `counts[i]` pairs in `sources[i]` from it."""
    messages = [encode(part, span, values_as) for part, span in zip(parts, spans, strict=True)]
    lengths = [encoded_bytes(count, source, values_as) for count, source in zip(counts, sources, strict=True)]
    replies = yield from all_to_all(tag, torch.cat(messages), [len(message) for message in messages], rank, lengths)
    return [
        decode(reply, count, source, values_as)
        for reply, count, source in zip(replies, counts, sources, strict=True)
    ]
