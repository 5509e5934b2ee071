"""One line for DistributedDataParallel: `sparsify(ddp_model, density=1e-3)`.

DDP calls the hook bucket by bucket as gradients become ready. Each bucket is added to the residual at once, which
overlaps with the rest of the backward pass; when the last one is in, one exchange for the whole model follows,
updates are written into the buckets in place, and the futures of all buckets complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve import checkpoint, ops
from gradsieve._check import BadInput, BadType, at_least
from gradsieve.collectives import Ledger, Traffic, watched
from gradsieve.exchange import Exchanged, sparse_sum
from gradsieve.reducer import SparseReducer
from gradsieve.replicas import check_replicas
from gradsieve.schedules import Schedule
from gradsieve.sparsifiers import Sparsifier, make_sparsifier
from gradsieve.sparsifiers._exclusive import Exclusive
from gradsieve.steps import StepReport
from gradsieve.worlds import Meter, ProcessGroupWorld


def sparsify(
    ddp_model: nn.Module,
    sparsifier: str | Sparsifier = "shared_threshold",
    density: float | Schedule = 1e-3,
    *,
    scaler: Any = None,
    dense_steps: int = 0,
    process_group: dist.ProcessGroup | None = None,
    check_every: int = 0,
    measure: bool = False,
    values: str = "fp32",
    **options: Any,
) -> "Sieve":
    """Send only part of the model's gradient from now on; returns the sieve that does it.

    Args:
        ddp_model: a `DistributedDataParallel` without a communication hook, also if it was compiled.
        sparsifier: a name of `SPARSIFIERS` (with its options as further arguments), or a `Sparsifier`.
        density: the fraction of the gradient to send in a step, in (0, 1], or a function of the step.
        scaler: the `GradScaler`, if one is used: what is kept back must follow its scale.
        dense_steps: number of initial steps that send the full gradient.
        process_group: the group to exchange over; by default the model's.
        check_every: compare all workers' parameters after so many steps; 0 is never.
        measure: whether reports contain the residual's norm, which costs a pass over it.
        values: "fp32", "bf16" or "fp8", how values travel; what rounding leaves out is kept and sent later.
    """
    model = _checked(getattr(ddp_model, "_orig_mod", ddp_model))
    at_least("check_every", check_every, 0)
    if isinstance(sparsifier, str):
        sparsifier = make_sparsifier(sparsifier, **options)
    elif options:
        raise BadType(f"options must come with a sparsifier's name, got {sorted(options)} beside {sparsifier!r}")
    world = Meter(ProcessGroupWorld(process_group or model.process_group))
    parameters = _dense_parameters(model)
    reducer = SparseReducer(
        sparsifier,
        density,
        dense_steps=dense_steps,
        rank=dist.get_rank(process_group or model.process_group),
        world_size=world.size,
        sizes=[parameter.numel() for parameter in parameters.values()],
        measure=measure,
        values=values,
        labels={
            f"parameter {number}": _describe(name, parameter)
            for number, (name, parameter) in enumerate(reversed(parameters.items()))
        },
    )
    ops.warm_up()
    sieve = Sieve(model, parameters, reducer, world, scaler, check_every)
    model.register_comm_hook(None, sieve._hook)
    model.register_forward_pre_hook(sieve._drop_unfinished)
    return sieve


@dataclass(frozen=True)
class _Place:
    """Where a parameter's gradient lies: elements of the arena, and of which bucket."""

    start: int
    stop: int
    bucket: int
    offset: int


class Sieve:
    """What `sparsify` returns: reports, state, checkpoints, and knobs. `report` is None before the first step."""

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: dict[str, nn.Parameter],
        reducer: SparseReducer,
        world: Meter,
        scaler: Any,
        check_every: int,
    ) -> None:
        self.report: StepReport | None = None
        self.reducer, self.world, self.scaler, self.check_every = reducer, world, scaler, check_every
        self._parameters, self._scale = parameters, 1.0
        self._may_be_unused = bool(model.find_unused_parameters or model.static_graph)
        sizes = [parameter.numel() for parameter in parameters.values()]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._starts = {id(p): end - p.numel() for p, end in zip(parameters.values(), ends, strict=True)}
        reducer.open(sum(sizes), next(iter(parameters.values())).device)
        self._buckets: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._places: list[_Place] = []
        self._layout: tuple[list[_Place], Tensor, Tensor, Tensor] | None = None
        self._beside = Ledger()  # this step's traffic outside the reducer

    def set_density(self, density: float | Schedule, dense_steps: int = 0) -> None:
        """Another density, or another function of the step, from the next step on."""
        self.reducer.set_density(density, dense_steps)

    def set_total_steps(self, total_steps: int) -> None:
        """The run will be longer or shorter than said before, for spend="budget"; every rank must call it."""
        if not isinstance(self.reducer.sparsifier, Exclusive):
            raise BadType(f"set_total_steps needs exdyna or micro, got {self.reducer.sparsifier}")
        self.reducer.sparsifier.set_total_steps(total_steps)

    def check_replicas(self) -> None:
        """Compare all workers' parameters; every worker must call it. Raises `ReplicasDiffer`."""
        self.world.run([check_replicas(self._parameters, self.reducer.step)])

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank has its own."""
        self._drop_unfinished()
        return {"scale": self._scale, **self.reducer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken on this rank, with the same world size."""
        state = dict(state_dict)
        scale = state.pop("scale", None)
        if not isinstance(scale, float) or not scale > 0:
            raise BadInput(f"scale must be a positive number, got {scale!r}")
        self._drop_unfinished()
        self.reducer.load_state_dict(state)
        self._scale = scale

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; every rank must call it. A crash leaves the previous one whole.

        `extra` is what rank 0 wants kept with it, such as the model's state: dicts of numbers, strings, tensors.
        """
        self.world.run([checkpoint.save(Path(folder), self.state_dict(), self.reducer.labels, extra)])

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Read the last checkpoint, of any world size; every rank must call it. Nothing is half-loaded.

        Returns what rank 0 gave as `extra`, on every rank; keys that were numbers come back as strings.
        """
        state = self.world.run([checkpoint.load(Path(folder), self.state_dict(), self.reducer.labels)])[0]
        extra: dict[str, Any] = state.pop("extra")
        if state.pop("resized"):
            state["state"] = self.reducer.sparsifier.fitting(state["state"])
        self.load_state_dict(state)
        return extra

    def _hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
            raise BadType(
                "the hook must be called by DDP's own reducer, got a call of torch._dynamo's python_reducer: "
                'set torch._dynamo.config.optimize_ddp to "ddp_optimizer"'
            )
        if bucket.index() == 0:
            self._begin_step()
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type == "cuda" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        try:
            if buffer.is_sparse:
                buffer = self._mean_of_sparse(buffer)
            else:
                self._add(bucket, buffer)
            self._buckets.append((future, buffer))
            if bucket.is_last():
                self._exchange()
                self._buckets, self._places = [], []
        except BaseException:
            self.reducer.abandon()
            self._buckets, self._places = [], []
            raise
        return future

    def _begin_step(self) -> None:
        self._drop_unfinished()
        self._beside = Ledger()
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        if scale != self._scale:
            self.reducer.rescale(scale / self._scale)
            self._scale = scale

    def _drop_unfinished(self, *called_with: Any) -> None:
        """Forget a backward pass that raised an error before all gradients were ready."""
        if self._buckets:
            self.reducer.abandon()
            self._buckets, self._places = [], []

    def _add(self, bucket: Any, buffer: Tensor) -> None:
        for place in self._places_in(bucket):
            piece = buffer[place.offset : place.offset + place.stop - place.start]
            # The bucket keeps the old residual until the update is written: a copy only where it is too narrow.
            before = piece if piece.element_size() >= 4 else torch.empty_like(piece, dtype=torch.float32)
            self.reducer.add(piece, place.start, before, hold_back=self._may_be_unused and not piece.any())
            self._places.append(place)

    def _places_in(self, bucket: Any) -> list[_Place]:
        """Where a bucket's parts belong; neighbours in both become one part, unless parameters may be unused."""
        places: list[_Place] = []
        offset, number = 0, len(self._buckets)
        for parameter in bucket.parameters():
            start, size = self._starts[id(parameter)], parameter.numel()
            if places and places[-1].stop == start and not self._may_be_unused:
                places[-1] = replace(places[-1], stop=start + size)
            else:
                places.append(_Place(start, start + size, number, offset))
            offset += size
        return places

    def _mean_of_sparse(self, buffer: Tensor) -> Tensor:
        """Gradients of sparse embeddings are few rows already: summed exactly, outside the sieve."""
        return self.world.run([watched(sparse_sum(buffer), self._beside, self.world.size)])[0] / self.world.size

    def _exchange(self) -> None:
        if self.check_every and self.reducer.step and self.reducer.step % self.check_every == 0:
            self.check_replicas()
        self.world.run([self.reducer.finish(self._write)])
        self.report = _with_traffic(self.reducer.end_step(), self._beside.total)
        for future, buffer in self._buckets:
            future.set_result(buffer)

    def _write(self, sent: Exchanged) -> None:
        """Put the update where the gradients were."""
        buffers = [buffer for _, buffer in self._buckets]
        if not sent.finite:
            for buffer in buffers:
                if not buffer.is_sparse:
                    buffer.fill_(torch.nan)
        elif sent.indices is None:
            for place in self._places:
                target = buffers[place.bucket][place.offset : place.offset + place.stop - place.start]
                target.copy_(sent.values[place.start : place.stop])
        else:
            starts, shifts, owners = self._layout_of(self._places)
            which = torch.searchsorted(starts, sent.indices, right=True) - 1
            targets, owners = sent.indices + shifts[which], owners[which]
            for number, buffer in enumerate(buffers):
                if not buffer.is_sparse:
                    mine = owners == number
                    ops.scatter_update_(buffer, targets[mine], sent.values[mine])

    def _layout_of(self, places: list[_Place]) -> tuple[Tensor, Tensor, Tensor]:
        """Tables from arena to buckets; they change only when DDP rebuilds its buckets."""
        if self._layout is None or self._layout[0] != places:
            order = sorted(places, key=lambda place: place.start)
            device = self.reducer.residual.device
            starts = torch.tensor([place.start for place in order], device=device)
            shifts = torch.tensor([place.offset - place.start for place in order], device=device)
            owners = torch.tensor([place.bucket for place in order], device=device)
            self._layout = (list(places), starts, shifts, owners)
        return self._layout[1:]


def _with_traffic(report: StepReport, traffic: Traffic) -> StepReport:
    return replace(
        report,
        bytes_sent=report.bytes_sent + traffic.handed_bytes,
        ring_bytes=report.ring_bytes + traffic.ring_bytes,
        collectives=report.collectives + traffic.calls,
    )


def _checked(model: nn.Module) -> DistributedDataParallel:
    if not isinstance(model, DistributedDataParallel):
        raise BadType(f"ddp_model must be a DistributedDataParallel, got {type(model).__name__}")
    if model.mixed_precision is not None:
        raise BadInput(
            "ddp_model must not use DDP's mixed_precision, which has a communication hook of its own: use autocast"
        )
    if model._comm_hooks:
        raise BadInput("ddp_model must not have a communication hook yet, got one that has: sparsify it only once")
    return model


def _dense_parameters(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """All parameters whose gradients pass through the sieve, by name, the model's last one first.

    This is about the order in which gradients become ready, and so that of DDP's buckets.
    """
    sparse = {
        id(module.weight)
        for module in model.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    ignored: set[str] = model.parameters_to_ignore
    found = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and id(parameter) not in sparse and name not in ignored
    }
    if not found:
        raise BadInput("ddp_model must have a parameter with a dense gradient, got none")
    found = dict(reversed(found.items()))
    for name, parameter in found.items():
        if parameter.dtype not in ops.GRAD_DTYPES:
            raise BadType(f"parameter {name} must be a real floating-point tensor, got {parameter.dtype}")
    devices = {parameter.device for parameter in found.values()}
    if len(devices) > 1:
        raise BadInput(f"ddp_model must be on one device, got {sorted(map(str, devices))}")
    return found


def _describe(name: str, parameter: Tensor) -> str:
    return f"{name} {list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
