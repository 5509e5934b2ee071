"""A process group for the simulated device, over gloo, which refuses what NCCL refuses.

It carries tensors of the device only, in the types that NCCL knows; gathers are of equal lengths. Registered as
`sim-nccl`; `sim-both` carries tensors on the host as well, as a group `cpu:gloo,cuda:nccl` does.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from sim_device import NAME, SimTensor, _check_streams, _note_written

KNOWN = {
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


class SimNCCL(dist.ProcessGroup):
    """Each collective takes the memory behind the tensors to gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("sim", store), rank, size, timeout)
        self._calls: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802
        return "sim-nccl"

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        with self._carried("all_reduce", tensors, tensors) as raws:
            self._gloo.allreduce(raws, options or c10d.AllreduceOptions()).wait()
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        with self._carried("broadcast", tensors, tensors) as raws:
            self._gloo.broadcast(raws, options).wait()
        return _done(tensors)

    def _allgather_base(self, output: Tensor, input: Tensor, options: Any = None) -> Any:
        if output.numel() != input.numel() * self.size():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        with self._carried("all_gather", [input, output], [output]) as (sent, received):
            self._gloo._allgather_base(received, sent, c10d.AllgatherOptions()).wait()
        return _done([output])

    all_gather_single = _allgather_base

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        if any(output.shape != inputs[0].shape for output in outputs[0]):
            raise ValueError("Tensors must have identical size")
        with self._carried("all_gather", [*inputs, *outputs[0]], outputs[0]) as (sent, *received):
            self._gloo.allgather([received], [sent], c10d.AllgatherOptions()).wait()
        return _done(outputs[0])

    def alltoall_base(self, output: Tensor, input: Tensor, received: Any, sent: Any, options: Any = None) -> Any:
        with self._carried("all_to_all_single", [input, output], [output]) as (rows, room):
            self._gloo.alltoall_base(room, rows, received, sent, c10d.AllToAllOptions()).wait()
        return _done([output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        with self._carried("all_to_all", [*inputs, *outputs], outputs) as raws:
            sent, received = raws[: len(inputs)], raws[len(inputs) :]
            lengths, splits = [*map(len, received)], [*map(len, sent)]  # of which NCCL lets each be another one
            rows = received[0].new_empty(sum(lengths))
            self._gloo.alltoall_base(rows, torch.cat(sent), lengths, splits, c10d.AllToAllOptions()).wait()
            for room, part in zip(received, rows.split(lengths), strict=True):
                room.copy_(part)
        return _done(outputs)

    def barrier(self, options: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done([])

    @contextlib.contextmanager
    def _carried(self, name: str, tensors: list[Tensor], written: list[Tensor]) -> Iterator[list[Tensor]]:
        for tensor in tensors:
            if not isinstance(tensor, SimTensor):
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type} ({name})")
            if tensor.dtype not in KNOWN:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        self._calls.append(name)
        _check_streams(name, tensors)
        yield [tensor.raw for tensor in tensors]  # type: ignore[attr-defined]
        _note_written(name, [tensor.raw for tensor in written])  # type: ignore[attr-defined]


class SimBoth(SimNCCL):
    """As a group of two backends: tensors on the host go to gloo as they are."""

    @contextlib.contextmanager
    def _carried(self, name: str, tensors: list[Tensor], written: list[Tensor]) -> Iterator[list[Tensor]]:
        if any(isinstance(tensor, SimTensor) for tensor in tensors):
            with super()._carried(name, tensors, written) as raws:
                yield raws
        else:
            self._calls.append(f"{name} on the host")
            yield tensors


def _done(tensors: list[Tensor]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return c10d._create_work_from_future(future)


dist.Backend.register_backend("sim-nccl", SimNCCL, devices=[NAME])
dist.Backend.register_backend("sim-both", SimBoth, devices=["cpu", NAME])
