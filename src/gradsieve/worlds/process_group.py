"""One worker per process: collectives go through torch.distributed."""

import atexit
import functools
import gc
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve._check import BadInput, BadType
from gradsieve.comm.collectives import AllGather, AllReduce, AllToAll, Collective, Program
from gradsieve.comm.rounded import rounded_sum
from gradsieve.worlds.groups import new_group
from gradsieve.worlds.transport import Transport
from gradsieve.worlds.waiting import Unwatched, Watch, bounded, seconds

T = TypeVar("T")

# Bytes up to which vectors are summed in two rounds, each worker a slice. A ring takes 2 * (P - 1) rounds, but
# needs less memory and keeps links evenly busy, which is better for large vectors.
_SMALL = 1 << 22


# Torch's gloo threads may still release Python objects when a DDP script ends; if the interpreter is gone by then,
# they abort the process ("terminate called without an active exception": plain DDP, in 6 of 28 runs). Collecting
# garbage before the interpreter ends leaves them nothing to release.
atexit.register(gc.collect)


def group_of(group: Any) -> dist.ProcessGroup | None:
    """A process group, or that of a device mesh with one dimension."""
    if not hasattr(group, "get_group"):
        found: dist.ProcessGroup | None = group
        return found
    if group.ndim != 1:
        raise BadInput(f'process_group must be a mesh of one dimension, such as mesh["replicate"], got {group}')
    made: dist.ProcessGroup = group.get_group()
    return made


class ProcessGroupWorld:
    """Answers the collectives of this process's program through a process group (the default one if None).

    Args:
        timeout: seconds after which every collective ends with an error that names the missing rank.
        device: to which tensors on the host, such as a handshake's, are copied if the group sends only those on
            devices; by default the current one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("a process group must exist: call torch.distributed.init_process_group first")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise BadType(f"process_group must be a torch.distributed.ProcessGroup, got {group!r}")
        self.group, self.device = group, device
        self.timeout = None if timeout is None else seconds(timeout)
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise BadInput(f"this process must be a member of the group, got rank {dist.get_rank()} outside it")
        self.watch: Watch = Unwatched()
        if self.timeout is not None:
            self.group, self.watch = bounded(group, self.timeout)

    def close(self) -> None:
        """Destroy the group that was made for this world, if it still exists."""
        if self.timeout is not None and self.group is not None and self.watch.owns_group:
            with suppress(Exception):  # the user may have destroyed all groups before
                dist.destroy_process_group(self.group)

    def again(self) -> "ProcessGroupWorld":
        """The same workers in a group of their own, for another thread; every worker must call it."""
        if self.timeout is not None and self.watch.owns_group:  # it makes another one
            return ProcessGroupWorld(self.group, self.timeout, device=self.device)
        backend: str = dist.get_backend(self.group)
        if backend == "undefined":  # one for each kind of device
            backend = dist.get_backend_config(self.group)
        return ProcessGroupWorld(new_group(self.group, backend=backend), self.timeout, device=self.device)

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run this process's one program to its end; returns its result in a list of one."""
        if len(programs) != 1:
            raise BadInput(f"programs must be the one of this process, got {len(programs)}")
        program, reply = programs[0], None
        try:
            while True:
                call = program.send(reply)
                with self.watch.collective(call.tag):
                    reply = self._answer(call)
        except StopIteration as stop:
            return [stop.value]
        finally:
            program.close()

    def _answer(self, call: Collective) -> Any:
        here = call.tensor.device
        reply = self._carried(call, self._transport.take(call.tensor.contiguous()))
        return self._transport.bring_back(reply, here)

    @functools.cached_property
    def _transport(self) -> Transport:
        return Transport(self.group, self.device)

    def _carried(self, call: Collective, tensor: Tensor) -> Any:
        if isinstance(call, AllReduce):
            return self._sum(tensor)
        if isinstance(call, AllGather):
            return self._transport.gather(tensor, call.lengths)
        if isinstance(call, AllToAll):
            return self._transport.all_to_all(tensor, call.splits, call.lengths)
        return self._transport.broadcast(tensor, call.root)

    def _sum(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes > _SMALL or tensor.dim() != 1 or self.size == 1:
            dist.all_reduce(tensor, group=self.group)
            return tensor
        total, _ = self.run([rounded_sum("sum", tensor, tensor.dtype, self.rank, self.size)])[0]
        return tensor.copy_(total)
