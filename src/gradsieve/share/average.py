"""The mean over workers of whole tensors: plain model averaging."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradsieve.comm.collectives import Program, all_reduce

CHUNK = 1 << 20  # elements of one message: 4 MiB of float32, which all worlds add in rank order


def average_(tensors: Sequence[Tensor], world_size: int) -> Program[None]:
    """Replace every tensor by its mean over workers; those that are not floating point stay as they are.

    Sums are in float32, or in float64 where a tensor is, and pass through one buffer of at most `CHUNK` elements.

    >>> from gradsieve.worlds.virtual import VirtualWorld
    >>> workers = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 2.0])]]
    >>> _ = VirtualWorld(2).run([average_(tensors, 2) for tensors in workers])
    >>> workers[0][0].tolist(), workers[1][0].tolist()
    ([2.0, 2.0], [2.0, 2.0])
    """
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    flats = [tensor.reshape(-1) for tensor in floating]
    total = sum(len(flat) for flat in flats)
    if not total:
        return
    wide = torch.float64 if any(flat.dtype == torch.float64 for flat in flats) else torch.float32
    buffer = torch.empty(min(CHUNK, total), dtype=wide, device=flats[0].device)
    for parts in _chunks(flats):
        lengths = [len(part) for part in parts]
        message = torch.cat([part.to(wide) for part in parts], out=buffer[: sum(lengths)])
        mean = (yield from all_reduce("values", message)) / world_size
        for part, value in zip(parts, mean.split(lengths), strict=True):
            part.copy_(value)
    for tensor, flat in zip(floating, flats, strict=True):
        if not tensor.is_contiguous():  # then `flat` is a copy
            tensor.copy_(flat.view_as(tensor))


def _chunks(flats: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Views of the vectors, in order: `CHUNK` elements at a time."""
    parts: list[Tensor] = []
    room = CHUNK
    for flat in flats:
        while len(flat):
            part, flat = flat[:room], flat[room:]
            parts.append(part)
            room -= len(part)
            if not room:
                yield parts
                parts, room = [], CHUNK
    if parts:
        yield parts
