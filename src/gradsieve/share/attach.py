"""One line for any model and optimizer: `share(model, optimizer, "exdyna", density=1e-3)`."""

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gradsieve import ops
from gradsieve._check import BadInput, BadType, at_least, has_methods, one_of
from gradsieve.density import Density, Schedule, as_density
from gradsieve.share.auto import HIDDEN, SHOWN, Auto, AutoDensity
from gradsieve.share.parameters import advice, second_moments, shared_parameters
from gradsieve.share.replica import Replica
from gradsieve.share.sieve import ShareSieve
from gradsieve.sparsifiers import Sparsifier, as_sparsifier
from gradsieve.worlds import ProcessGroupWorld, group_of
from gradsieve.worlds.waiting import DEFAULT_S, seconds


def share(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    sparsifier: str | Sparsifier[Any] = "exdyna",
    density: float | str | Auto | Schedule | Density = 1e-3,
    *,
    every: int = 1,
    delay: int = 0,
    dense_steps: int = 0,
    values: str = "fp32",
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    check_every: int = 0,
    scaler: Any = None,
    judge: str = "auto",
    on_nonfinite: str = "raise",
    measure: bool = False,
    timeout: float | timedelta = DEFAULT_S,
    join: bool = False,
    **options: Any,
) -> ShareSieve:
    """Average the weights that drifted farthest apart, after every optimizer step; returns the sieve, a handle.

    All workers start from rank 0's weights. The parameters shared are those of the optimizer that are not frozen.

    Args:
        model: any module; a `DistributedDataParallel` inside a node, FSDP2's DTensors and compiled ones too.
        optimizer: any optimizer, or a list of them; the last one's steps are counted.
        sparsifier: a name of `SPARSIFIERS` (with its options as further arguments), or a `Sparsifier`.
        density: the fraction of the weights to average in a round, in (0, 1], or a function of the step; or "auto",
            or `Auto(at_least, at_most)`: as much as can be sent in 80 % of the time of the next forward and
            backward pass (delay=1), or in 20 % of it, in addition (delay=0).
        every: number of completed optimizer steps between rounds.
        delay: 0, or 1 to exchange during the next forward and backward pass and apply after the next step.
        dense_steps: number of initial steps in which gradients are averaged, as plain DDP does.
        values: "fp32", "bf16" or "fp8", how values travel; what rounding leaves out stays in the drift.
        process_group: the group to exchange over; by default all processes.
        check_every: number of rounds between comparisons of all workers' agreed weights; 0 is never.
        scaler: the `GradScaler`, if one is used: a rank whose step it skips must still take part.
        judge: how exdyna and micro choose entries: by their "drift", or by "curvature", the drift times the fourth
            root of the second moment that Adam-like optimizers keep; "auto" is curvature if all optimizers have
            one.
        on_nonfinite: "raise" an error on all ranks if weights of one are not finite, or "restore" that rank.
        measure: whether reports contain the drift's norm, which costs a pass over the weights.
        timeout: seconds that an exchange may take before `PeerLost` names the missing rank; 5 minutes by default.
        join: this worker joins others that already train and call `sieve.regroup` at the same time.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if (
        not isinstance(optimizers, list | tuple)
        or not optimizers
        or not all(isinstance(each, Optimizer) for each in optimizers)
    ):
        raise BadType(f"optimizer must be a torch optimizer or a list of them, got {optimizer!r}")
    if not isinstance(model, nn.Module):
        raise BadType(f"model must be a torch.nn.Module, got {type(model).__name__}")
    at_least("check_every", check_every, 0)
    limit = seconds(timeout)
    if scaler is not None:
        has_methods("scaler", scaler, "GradScaler", "get_scale", "step")
    sparsifier, optimizers = as_sparsifier(sparsifier, options), list(optimizers)
    if scaler is not None and dense_steps:
        fused = any(getattr(each, "_step_supports_amp_scaling", False) for each in optimizers)
        if fused or len(optimizers) > 1:
            kind = "a fused optimizer" if fused else "several optimizers"
            raise BadInput(f"dense_steps must be 0 with a scaler and {kind}, got {dense_steps}")
    parameters = shared_parameters(model, optimizers)
    world = ProcessGroupWorld(group_of(process_group), limit, device=next(iter(parameters.values())).device)
    replica = Replica(
        parameters,
        sparsifier,
        _schedule(density, delay),
        rank=world.rank,
        world_size=world.size,
        every=every,
        dense_steps=dense_steps,
        values=values,
        measure=measure,
        second=second_moments(optimizers, judge, sparsifier),
        on_nonfinite=on_nonfinite,
    )
    ops.warm_up()
    if world.rank == 0 and (words := advice(optimizers, world.size)):
        warnings.warn(words, stacklevel=2)
    ways: dict[str, Any] = {"delay": delay, "check_every": check_every, "scaler": scaler, "join": join}
    return ShareSieve(model, optimizers, replica, world, **ways)


def _schedule(density: float | str | Auto | Schedule | Density, delay: int) -> Density | AutoDensity:
    if isinstance(density, str):
        one_of("density", density, ["auto"])
        density = Auto()
    if isinstance(density, Auto):
        return AutoDensity(density, HIDDEN if delay else SHOWN)
    return as_density(density)
