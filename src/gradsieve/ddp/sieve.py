"""One line for DistributedDataParallel: `sparsify(ddp_model, density=0.01)`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from gradsieve import ops
from gradsieve._check import BadInput, at_least
from gradsieve.ddp.hook import BucketHook
from gradsieve.ddp.layout import Layout, checked, dense_parameters, describe
from gradsieve.density import Density, Schedule
from gradsieve.feedback import Feedback
from gradsieve.reducer import SparseReducer
from gradsieve.reports import StepReport
from gradsieve.sparsifiers import Sparsifier, as_sparsifier
from gradsieve.state import checkpoint
from gradsieve.worlds import ProcessGroupWorld


def sparsify(
    ddp_model: nn.Module,
    sparsifier: str | Sparsifier[Any] = "shared_threshold",
    density: float | Schedule | Density = 1e-3,
    *,
    scaler: Any = None,
    dense_steps: int = 0,
    process_group: dist.ProcessGroup | None = None,
    check_every: int = 0,
    measure: bool = False,
    values: str = "fp32",
    feedback: Feedback | None = None,
    **options: Any,
) -> "Sieve":
    """Send only part of the model's gradient from now on; returns the sieve that does it.

    Args:
        ddp_model: a `DistributedDataParallel` without a communication hook, also if it was compiled.
        sparsifier: a name of `SPARSIFIERS` (with its options as further arguments), or a `Sparsifier`.
        density: the fraction of the gradient to send per step, in (0, 1]; a function of the step; or a `Budget`.
        scaler: the `GradScaler`, if one is used: what is kept back must follow its scale.
        dense_steps: number of initial steps that send the full gradient.
        process_group: the group to exchange over; by default the model's.
        check_every: compare all workers' parameters after so many steps; 0 is never.
        measure: whether reports contain the residual's norm, which costs a pass over it.
        values: "fp32", "bf16" or "fp8", how values travel; what rounding leaves out is kept and sent later.
        feedback: what gradients add to the residual, `Plain()`, `Momentum(...)` or `LowPass(...)`; by default what
            the sparsifier's paper has.
    """
    model = checked(getattr(ddp_model, "_orig_mod", ddp_model))
    at_least("check_every", check_every, 0)
    sparsifier = as_sparsifier(sparsifier, options)
    world = ProcessGroupWorld(process_group or model.process_group)
    parameters = dense_parameters(model)
    reducer = SparseReducer(
        sparsifier,
        density,
        dense_steps=dense_steps,
        rank=world.rank,
        world_size=world.size,
        sizes=[parameter.numel() for parameter in parameters.values()],
        measure=measure,
        values=values,
        feedback=feedback,
        labels={
            f"parameter {number}": describe(name, parameter)
            for number, (name, parameter) in enumerate(reversed(parameters.items()))
        },
    )
    ops.warm_up()
    unused = bool(model.find_unused_parameters or model.static_graph)
    layout = Layout(parameters.values(), apart=unused)
    reducer.open(layout.n, next(iter(parameters.values())).device)
    sieve = Sieve(BucketHook(reducer, layout, world, parameters, scaler=scaler, check_every=check_every))
    model.register_comm_hook(None, sieve.hook.on_bucket)
    model.register_forward_pre_hook(sieve.hook.drop_unfinished)
    return sieve


class Sieve:
    """What `sparsify` returns: reports, state, checkpoints, and knobs. `report` is None before the first step."""

    def __init__(self, hook: BucketHook) -> None:
        self.hook, self.reducer, self.world = hook, hook.reducer, hook.world

    @property
    def report(self) -> StepReport | None:
        return self.hook.report

    def set_density(self, density: float | Schedule | Density, dense_steps: int = 0) -> None:
        """Another density from the next step on; every rank must call it. A budget keeps what it has spent."""
        self.reducer.set_density(density, dense_steps)

    def check_replicas(self) -> None:
        """Compare all workers' parameters; every worker must call it. Raises `ReplicasDiffer`."""
        self.hook.check_replicas()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank has its own."""
        self.hook.drop_unfinished()
        return {"scale": self.hook.scale, **self.reducer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken on this rank, with the same world size."""
        self._load(dict(state_dict), resized=False)

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
            extra: what rank 0 wants kept with it, such as the model's state: dicts and lists of numbers, strings,
                tensors.
            shared: False if there is no such folder: every rank then writes and reads its own part, in a folder of
                its own below `folder`, and keeps its own `extra`. The number of ranks must stay the same.
        """
        state, labels = self.state_dict(), self.reducer.labels
        self.world.run([checkpoint.save(Path(folder), state, labels, extra, shared=shared)])

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Read the last checkpoint, of any world size; every rank must call it. Nothing is half-loaded.

        Returns what rank 0 gave as `extra`, on every rank; keys that were numbers come back as strings, tuples as
        lists.
        """
        state = self.world.run([checkpoint.load(Path(folder), self.state_dict(), self.reducer.labels)])[0]
        extra: dict[str, Any] = state.pop("extra")
        self._load(state, resized=state.pop("resized"))
        return extra
