"""One worker a process: collectives go through torch.distributed."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.collectives import AllGather, AllReduce, Collective, Program, pad

T = TypeVar("T")

# torch 2.13 gave the gather into one tensor a new name and warns at the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupWorld:
    """Answers the collectives of this process's program through a process group (the default one if None)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("a process group must exist: call torch.distributed.init_process_group first")
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"this process must be a member of the group, got rank {dist.get_rank()} outside it")

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run this process's one program to its end; returns its result in a list of one."""
        if len(programs) != 1:
            raise ValueError(f"programs must be the one of this process, got {len(programs)}")
        program, reply = programs[0], None
        try:
            while True:
                reply = self._answer(program.send(reply))
        except StopIteration as stop:
            return [stop.value]
        finally:
            program.close()

    def _answer(self, call: Collective) -> Any:
        tensor = call.tensor.contiguous()
        if isinstance(call, AllReduce):
            dist.all_reduce(tensor, group=self.group)
            return tensor
        if isinstance(call, AllGather):
            return self._gather(tensor, call.lengths)
        dist.broadcast(tensor, group=self.group, group_src=call.root)
        return tensor

    def _gather(self, tensor: Tensor, lengths: Sequence[int] | None) -> list[Tensor]:
        if lengths is None:
            own = torch.tensor([len(tensor)], dtype=torch.int64, device=tensor.device)
            lengths = self._gather_equal(own).flatten().tolist()
        rows = self._gather_equal(pad(tensor, max(lengths)))
        return [rows[rank, :length] for rank, length in enumerate(lengths)]

    def _gather_equal(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(self.size, *tensor.shape)
        _all_gather_single(out.flatten(0, 1), tensor, group=self.group)
        return out
