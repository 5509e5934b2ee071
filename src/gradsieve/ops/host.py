"""Copies between a device and the host: the only place where the host waits for a device during a step."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


def read(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the host, in one copy: the host waits once, whatever their number.

    >>> read(torch.tensor([1, 2]), torch.tensor(True))
    [tensor([1, 2]), tensor(True)]
    """
    if all(tensor.is_cpu for tensor in tensors):
        return list(tensors)
    rows = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    copied = torch.cat(rows).cpu()
    edges = [0, *accumulate(map(len, rows))]
    # Cloned, because a view as another type must begin at a multiple of its size.
    parts = [copied[start:stop].clone() for start, stop in pairwise(edges)]
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def send(numbers: Sequence[object], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """A few numbers as a tensor on the device of another one; the host does not wait."""
    return torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True)


def on_host(value: Any) -> Any:
    """A nested state with all of its tensors on the host."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: on_host(part) for key, part in value.items()}
    return value
