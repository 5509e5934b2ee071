"""Messages of a process group: on which device they are sent, and how messages of different lengths are gathered.

NCCL sends tensors on GPUs only, gloo those on the host; a group `cpu:gloo,cuda:nccl` sends both. A tensor that the
group cannot send from its device, such as the text of a handshake over NCCL or weights on a device that gloo does
not support, is copied and the reply is copied back. All data are sent as bytes: not every backend supports every
type.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import pad

BALANCED = 1.25  # times the mean: while no message is longer, all are padded to the longest
SHORT_BYTES = 1 << 14  # gloo: up to this many bytes, one collective costs less than sends and receives


class Transport:
    """Sends bytes between the workers of a group (the default one if None).

    device: to which tensors are copied that the group cannot send; by default the current one.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor on a device from which the group can send it."""
        if tensor.device.type in self.backends:
            return tensor
        if "cpu" in self.backends:
            return ops.read(tensor)[0]
        return tensor.to(self.device or _current(next(iter(self.backends))), non_blocking=True)

    def bring_back(self, reply: Any, device: torch.device) -> Any:
        """The reply on the device where the program expects it."""
        parts = reply if isinstance(reply, list) else [reply]
        if any(part.device != device for part in parts):
            here = ops.read(*parts)
            parts = here if device.type == "cpu" else [part.to(device, non_blocking=True) for part in here]
        return parts if isinstance(reply, list) else parts[0]

    def gather(self, tensor: Tensor, lengths: Sequence[int] | None) -> list[Tensor]:
        """All workers' rows: one collective, without a copy per worker if the message is long."""
        if lengths is None:
            own = tensor.new_full((1,), len(tensor), dtype=torch.int64)
            lengths = self._read(self.gather(own, [1] * self.size))
        if self._by_gloo(tensor):
            return self._gather_by_gloo(tensor, lengths)
        if max(lengths) * self.size <= BALANCED * sum(lengths):
            return self._gather_padded(tensor, lengths)
        received = _rooms(tensor, lengths)
        dist.all_to_all([*map(_raw, received)], [_raw(tensor)] * self.size, group=self.group)
        return received

    def all_to_all(self, tensor: Tensor, splits: Sequence[int], lengths: Sequence[int] | None) -> list[Tensor]:
        """The rows that each worker sends to this one."""
        if lengths is None:
            one = [1] * self.size
            lengths = self._read(self.all_to_all(ops.send(splits, tensor), one, one))
        row = tensor.new_empty(1, *tensor.shape[1:]).nbytes
        received = tensor.new_empty(sum(lengths), *tensor.shape[1:])
        rows = list(received.split(list(lengths)))
        if self._by_gloo(tensor) and row * self.size > SHORT_BYTES:  # the same row on all ranks
            self._swap(tensor.split(list(splits)), rows)
            return rows
        dist.all_to_all_single(
            _raw(received),
            _raw(tensor),
            [length * row for length in lengths],
            [split * row for split in splits],
            group=self.group,
        )
        return rows

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        dist.broadcast(_raw(tensor), group=self.group, group_src=root)
        return tensor

    def _gather_padded(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        longest = max(lengths)
        received = tensor.new_empty(self.size * longest, *tensor.shape[1:])
        # Renamed in torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(_raw(received), _raw(pad(tensor, longest)), group=self.group)
        rows = received.view(self.size, longest, *tensor.shape[1:])
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _gather_by_gloo(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Gather in one round: gloo's own all-gather is a ring and needs equal lengths."""
        if max(lengths) * tensor.new_empty(1, *tensor.shape[1:]).nbytes <= SHORT_BYTES:
            copies = tensor.repeat(self.size, *[1] * (tensor.dim() - 1))
            return self.all_to_all(copies, [len(tensor)] * self.size, lengths)
        received = _rooms(tensor, lengths)
        self._swap([tensor] * self.size, received)
        return received

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send a row to each worker and receive one from each, where both are not empty.

        Receives are posted first. gloo tells the sender of each on the connection that carries this worker's rows:
        posted behind those, it would arrive after them, and one direction would wait for the other.
        """
        received[self.rank].copy_(sent[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [
            dist.irecv(_raw(received[other]), group=self.group, group_src=other)
            for other in reversed(others)
            if len(received[other])
        ]
        works += [
            dist.isend(_raw(sent[other]), group=self.group, group_dst=other) for other in others if len(sent[other])
        ]
        for work in works:
            if work is not None:
                work.wait()

    def _by_gloo(self, tensor: Tensor) -> bool:
        return self.backends[tensor.device.type] == "gloo"

    def _read(self, parts: list[Tensor]) -> list[int]:
        numbers: list[int] = ops.read(torch.cat(parts))[0].tolist()
        return numbers


def _rooms(tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Memory for messages of these lengths, like a tensor."""
    return list(tensor.new_empty(sum(lengths), *tensor.shape[1:]).split(list(lengths)))


def _raw(tensor: Tensor) -> Tensor:
    """As bytes: not every backend knows every type."""
    return tensor.view(-1).view(torch.uint8)


def _current(kind: str) -> torch.device:
    return torch.device(kind, torch.get_device_module(kind).current_device())
