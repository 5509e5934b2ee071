"""One line for DistributedDataParallel: `sparsify(ddp_model, density=0.01)`."""

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradsieve import fsdp, ops
from gradsieve._check import BadInput, at_least, dict_of, has_methods, path_of
from gradsieve.ddp.advice import Advice, NoAdvice
from gradsieve.ddp.hook import BucketHook
from gradsieve.ddp.layout import checked, dense_parameters, labels_in_order, layout_of, retire
from gradsieve.ddp.watch import watch_first_step
from gradsieve.density import Density, Schedule
from gradsieve.feedback import Feedback
from gradsieve.gradients import largest_update
from gradsieve.reducer import SparseReducer
from gradsieve.regrouping import Regrouped, regroup_reducer
from gradsieve.reports import StepReport
from gradsieve.sparsifiers import Sparsifier, as_sparsifier, name_of
from gradsieve.state import checkpoint
from gradsieve.totals import Totals
from gradsieve.worlds import ProcessGroupWorld, group_of
from gradsieve.worlds.waiting import DEFAULT_S, during, seconds

NO_REGROUP = "a lost rank takes its shards along; start again from a checkpoint"


def sparsify(
    ddp_model: nn.Module,
    sparsifier: str | Sparsifier[Any] = "shared_threshold",
    density: float | Schedule | Density = 1e-3,
    *,
    scaler: Any = None,
    dense_steps: int = 0,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    check_every: int = 0,
    measure: bool = False,
    values: str = "fp32",
    feedback: Feedback | None = None,
    timeout: float | timedelta = DEFAULT_S,
    join: bool = False,
    advise: bool = True,
    **options: Any,
) -> "Sieve":
    """Send only part of the model's gradient from now on; returns the sieve, a handle.

    Args:
        ddp_model: a `DistributedDataParallel` without a communication hook, also if it was compiled; or a model
            that `fully_shard` spreads over the ranks of a node.
        sparsifier: a name of `SPARSIFIERS` (with its options as further arguments), or a `Sparsifier`.
        density: the fraction of the gradient to send per step, in (0, 1]; a function of the step; or a `Budget`.
        scaler: the `GradScaler`, if one is used: the residual must follow its scale.
        dense_steps: number of initial steps that send the full gradient.
        process_group: the group to exchange over; by default the model's. For a model of `fully_shard`, the ranks
            of all nodes that hold the same shard, or their mesh: `mesh["replicate"]`.
        check_every: number of steps between comparisons of all workers' parameters; 0 is never.
        measure: whether reports contain the residual's norm, which costs a pass over it.
        values: "fp32", "bf16" or "fp8", how values travel; what rounding leaves out is kept and sent later.
        feedback: what gradients add to the residual, `Plain()`, `Momentum(...)` or `LowPass(...)`; by default what
            the sparsifier's paper has.
        timeout: seconds that an exchange may take before `PeerLost` names the missing rank; 5 minutes by default.
        join: this worker joins others that already train and call `sieve.regroup` at the same time.
        advise: whether rank 0 may warn, once, after 50 steps, that plain DDP would be faster on this network.
    """
    at_least("check_every", check_every, 0)
    chosen, limit = as_sparsifier(sparsifier, options), seconds(timeout)
    if scaler is not None:
        has_methods("scaler", scaler, "GradScaler", "get_scale")

    def make(world: ProcessGroupWorld, sizes: list[int], labels: Mapping[str, str]) -> SparseReducer:
        ops.warm_up()
        return SparseReducer(
            chosen,
            density,
            dense_steps=dense_steps,
            rank=world.rank,
            world_size=world.size,
            sizes=sizes,
            measure=measure,
            values=values,
            feedback=feedback,
            labels=labels,
        )

    inner = getattr(ddp_model, "_orig_mod", ddp_model)
    if isinstance(inner, nn.Module) and fsdp.is_fully_sharded(inner):
        if join:
            raise BadInput(f"join must be False for a model of fully_shard: {NO_REGROUP}")
        return Sieve(fsdp.attach(inner, make, process_group, limit, scaler=scaler, check_every=check_every))
    model = checked(inner)
    parameters = dense_parameters(model)
    device = next(iter(parameters.values())).device
    group = model.process_group if process_group is None else group_of(process_group)
    world = ProcessGroupWorld(group, limit, device=device)
    reducer = make(world, [parameter.numel() for parameter in parameters.values()], labels_in_order(parameters))
    layout = layout_of(model)
    limit_of_values = min(largest_update(parameter.dtype) for parameter in parameters.values())
    reducer.open(layout.n, device, limit_of_values)
    momentum = getattr(reducer.method.feedback, "momentum", 0.0)
    watch_first_step(parameters.values(), momentum=momentum, scaled=scaler is not None)
    advice = Advice(world, world.rank, layout.n, device) if advise else NoAdvice()
    hook = BucketHook(reducer, layout, world, parameters, scaler=scaler, check_every=check_every, advice=advice)
    sieve = Sieve(hook)
    sieve.attach(model)
    if join:
        sieve._regroup(joins=True)
    return sieve


class Sieve:
    """What `sparsify` returns: reports, state, checkpoints, settings. `report` is None before the first step."""

    def __init__(self, hook: BucketHook | fsdp.ShardHook) -> None:
        self.hook, self.reducer, self.world = hook, hook.reducer, hook.world
        self.regrouped: Regrouped | None = None  # what the last change of the group did, on newcomers, too

    @property
    def report(self) -> StepReport | None:
        return self.hook.report

    def attach(self, model: DistributedDataParallel) -> None:
        """Become the communication hook of a model."""
        model = checked(model)
        self._attached = weakref.ref(model)
        model.register_comm_hook(None, self._buckets().on_bucket)
        model.register_forward_pre_hook(self.hook.drop_unfinished)

    def regroup(
        self, process_group: dist.ProcessGroup | None = None, *, ddp_model: nn.Module | None = None
    ) -> Regrouped:
        """Continue with another group, of any size and membership, after `PeerLost` or at any other time.

        All of its workers call it; newcomers call `sparsify(..., join=True)` instead. Survivors keep their
        residuals, newcomers start with zeros; weights are those of the worker that is ahead. The optimizer's state
        is left to the user: newcomers and those that are `behind` need that of another worker.

        Args:
            process_group: the new group; by default that of `ddp_model`, or else all processes.
            ddp_model: the same model, wrapped again in the new group: DDP itself keeps the group it was made with.
                The old wrapper cannot be used any more.
        """
        hook = self._buckets()
        model = None if ddp_model is None else checked(ddp_model)
        if model is not None:
            parameters = dense_parameters(model)
            labels = labels_in_order(parameters)
            if labels != self.reducer.labels:
                raise BadInput(f"ddp_model must have the same parameters as before, got {list(labels.values())}")
            process_group = model.process_group if process_group is None else process_group
        world = ProcessGroupWorld(process_group, self.world.timeout, device=self.world.device)
        self.world.close()
        self.world = hook.world = world
        hook.advice = NoAdvice()  # it was about the group before
        if model is not None:
            if (old := self._attached()) is not None:
                retire(old)
            hook.parameters, hook.layout = parameters, layout_of(model)
            self.attach(model)
        return self._regroup(joins=False)

    def _buckets(self) -> BucketHook:
        if not isinstance(self.hook, BucketHook):
            raise BadInput(f"regroup must have a DistributedDataParallel, got a model of fully_shard: {NO_REGROUP}")
        return self.hook

    def _regroup(self, *, joins: bool) -> Regrouped:
        self.hook.drop_unfinished()
        rank, size, tensors = self.world.rank, self.world.size, list(self.hook.parameters.values())
        scale = torch.tensor([self.hook.scale], dtype=torch.float64)
        program = regroup_reducer(self.reducer, rank, size, [*tensors, scale], joins=joins)
        with self._during():
            found = self.world.run([program])[0]
        self.hook.scale, self.regrouped = float(scale), found
        return found

    def summary(self) -> Totals:
        """Totals since `sparsify` was called: steps, bytes, density, seconds. Printable."""
        return self.hook.totals

    def __repr__(self) -> str:
        reducer = self.reducer
        return (
            f"Sieve({name_of(reducer.method.sparsifier)!r}, density={reducer.density:g}, "
            f"values={reducer.values!r}, {self.hook.totals.n:,} elements, {self.world.size} workers, "
            f"step {reducer.step})"
        )

    def set_density(self, density: float | Schedule | Density, dense_steps: int = 0) -> None:
        """Change the density from the next step on; every rank must call it. A budget keeps its count."""
        self.hook.together("set_density")
        self.reducer.set_density(density, dense_steps)

    def check_replicas(self) -> None:
        """Compare all workers' parameters; every worker must call it. Raises `ReplicasDiffer`."""
        with self._during():
            self.hook.together("check_replicas")
            self.hook.check_replicas()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank has its own."""
        self.hook.drop_unfinished()
        return {"scale": self.hook.scale, **self.reducer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict()` returned on this rank, with the same world size."""
        self._load(dict_of("state_dict", state_dict), resized=False)

    def _load(self, state: dict[str, Any], *, resized: bool) -> None:
        scale = state.pop("scale", None)
        if not isinstance(scale, float) or not scale > 0:
            raise BadInput(f"scale must be a positive number, got {scale!r}")
        self.hook.drop_unfinished()
        self.reducer.load_state_dict(state, resized=resized)
        self.hook.scale = scale

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None, *, shared: bool = True) -> None:
        """Write a checkpoint; every rank must call it. A crash leaves the previous one whole.

        Args:
            folder: one that all ranks see.
            extra: what rank 0 saves in addition, such as the model's state: dicts and lists of numbers, strings,
                tensors.
            shared: False if there is no such folder: every rank then writes and reads its own part, in a folder of
                its own below `folder`, and keeps its own `extra`. The number of ranks must stay the same.
        """

        def build() -> checkpoint.Content:
            kept = None if extra is None else ops.on_host(dict_of("extra", extra))
            return checkpoint.Content(self._place(folder), ops.on_host(self.state_dict()), kept)

        with self._during():
            self.hook.together("save")
            program = checkpoint.save_built(build, self.reducer.labels, shared=shared, beside=self.hook.beside)
            self.world.run([program])

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Read the last checkpoint, of any world size; every rank must call it. Nothing is loaded partially.

        Returns the `extra` of rank 0, on every rank; keys that were numbers come back as strings, tuples as lists.
        """

        def build() -> checkpoint.Content:
            return checkpoint.Content(self._place(folder), self.state_dict())

        with self._during():
            self.hook.together("load")
            program = checkpoint.load_built(build, self.reducer.labels, beside=self.hook.beside)
            state = self.world.run([program])[0]
        extra: dict[str, Any] = state.pop("extra")
        self._load(state, resized=state.pop("resized"))
        return extra

    def _place(self, folder: str | Path) -> Path:
        return path_of("folder", folder) / self.hook.part

    def _during(self) -> AbstractContextManager[None]:
        return during(f"step {self.reducer.step}")
