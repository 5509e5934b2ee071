"""How values travel: as they are, or rounded to fewer bytes.

A row of values becomes a message. In float8 the message begins with a byte that holds a scale, a power of two that
makes the largest value fit: the range of eight bits alone is too small. Rounding is idempotent: values that were
rounded once, all of them or a part, are not changed by rounding again.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

FP8 = torch.float8_e4m3fn  # to 448, in steps of an eighth of a power of two; no infinity, but a NaN
VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}

_TOP = 8  # the largest value of a message, after rounding, lies between 2**7 and 2**8
_BIAS = 127
_ROUNDED_UP = 31 / 32  # mantissas from here on are rounded up to 1


def encode(values: Tensor, wire: torch.dtype) -> Tensor:
    """Each row of values, along the last dimension, as a message. In float8, non-finite values become NaN."""
    if wire is not FP8:
        return values.to(wire)
    finite = values.isfinite()
    largest = pad(values.abs().where(finite, 0), (0, 1)).amax(-1, keepdim=True)  # of an empty row: 0
    mantissa, exponent = torch.frexp(largest)
    # A value that will be rounded up to a power of two counts as that: or a second rounding would shift by one
    # less.
    shift = (_TOP - exponent - (mantissa >= _ROUNDED_UP).int()).clamp(max=_BIAS)
    scaled = torch.ldexp(values, shift).where(finite, math.nan)
    return torch.cat([(shift + _BIAS).to(torch.uint8), scaled.to(FP8).view(torch.uint8)], -1)


def decode(messages: Tensor, wire: torch.dtype) -> Tensor:
    """The values in the messages, which may arrive as bytes."""
    if wire is not FP8:
        return messages.view(wire)
    values = messages[..., 1:].contiguous().view(FP8).float()
    return torch.ldexp(values, _BIAS - messages[..., :1].int())


def rounded(values: Tensor, wire: torch.dtype) -> Tensor:
    """The values after encoding and decoding, in their own type."""
    return decode(encode(values, wire), wire).to(values.dtype)


def message_length(count: int, wire: torch.dtype) -> int:
    """Number of elements in the message of `count` values."""
    return count + (wire is FP8)


def message_bytes(count: int, wire: torch.dtype) -> int:
    """Number of bytes in the message of `count` values."""
    return message_length(count, wire) * wire.itemsize
