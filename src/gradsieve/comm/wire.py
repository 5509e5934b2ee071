"""How values travel: as they are, or rounded to fewer bytes.

A row of values becomes a message. In eight bits it begins with a byte that says by which power of two the values
were multiplied, so that the largest of them fits: alone, so few bits reach over too few magnitudes. Rounding what
was rounded before, or a part of it, changes nothing more.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

FP8 = torch.float8_e4m3fn  # to 448, in steps of an eighth of a power of two; no infinity, but a NaN
VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}

_TOP = 8  # the largest of a message, once rounded, lies between 2**7 and 2**8
_BIAS = 127
_ROUNDED_UP = 31 / 32  # from here on, four bits of a mantissa become 1


def encode(values: Tensor, wire: torch.dtype) -> Tensor:
    """Each row of values, along the last dimension, as a message. As float8, what is not finite becomes a NaN."""
    if wire is not FP8:
        return values.to(wire)
    finite = values.isfinite()
    largest = pad(values.abs().where(finite, 0), (0, 1)).amax(-1, keepdim=True)  # of an empty row: 0
    mantissa, exponent = torch.frexp(largest)
    # What will be rounded up to a power of two counts as that: or else a second rounding would shift by one less.
    shift = (_TOP - exponent - (mantissa >= _ROUNDED_UP).int()).clamp(max=_BIAS)
    scaled = torch.ldexp(values, shift).where(finite, math.nan)
    return torch.cat([(shift + _BIAS).to(torch.uint8), scaled.to(FP8).view(torch.uint8)], -1)


def decode(messages: Tensor, wire: torch.dtype) -> Tensor:
    """The values in the messages, which may have become bytes on their way."""
    if wire is not FP8:
        return messages.view(wire)
    values = messages[..., 1:].contiguous().view(FP8).float()
    return torch.ldexp(values, _BIAS - messages[..., :1].int())


def rounded(values: Tensor, wire: torch.dtype) -> Tensor:
    """What arrives of the values, as their own type."""
    return decode(encode(values, wire), wire).to(values.dtype)


def message_length(count: int, wire: torch.dtype) -> int:
    """How many elements the message of so many values has."""
    return count + (wire is FP8)


def message_bytes(count: int, wire: torch.dtype) -> int:
    """How many bytes."""
    return message_length(count, wire) * wire.itemsize
