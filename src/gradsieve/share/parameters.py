"""What is read from an optimizer: its parameters, their second moments, and warnings about it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsieve._check import BadInput, one_of
from gradsieve.share.adamw import ReplicaAdamW
from gradsieve.share.replica import JUDGES
from gradsieve.sparsifiers import Sparsifier
from gradsieve.sparsifiers.exdyna import Exclusive

WITH_SECOND_MOMENTS = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    ReplicaAdamW,
)


LOCAL_MOMENTS = (
    "every worker's {} divides by the noise of its own batch, so its steps are up to {:.1f} times smaller than "
    "those of averaged gradients: use gradsieve.ReplicaAdamW, which counts the noise of all {} workers' batches"
)


def advice(optimizers: Sequence[Optimizer], workers: int) -> str:
    """A warning about using an optimizer on replicas, or an empty string."""
    known = [type(each).__name__ for each in optimizers if isinstance(each, (torch.optim.Adam, torch.optim.AdamW))]
    return LOCAL_MOMENTS.format(known[0], workers**0.5, workers) if known and workers > 1 else ""


def second_moments(
    optimizers: Sequence[Optimizer], judge: str, sparsifier: Sparsifier[Any]
) -> Callable[[Tensor], Tensor | None] | None:
    """A function that returns the second moment of a parameter, if `judge` needs it."""
    one_of("judge", judge, ("auto", *JUDGES))
    able = all(isinstance(each, WITH_SECOND_MOMENTS) for each in optimizers) and isinstance(sparsifier, Exclusive)
    if judge == "curvature" and not able:
        raise BadInput(
            "judge must be drift, curvature needs Adam, AdamW, NAdam, RAdam or RMSprop, and exdyna or micro, got "
            f"{', '.join(type(each).__name__ for each in optimizers)} and {sparsifier}"
        )
    if judge == "drift" or not able:
        return None

    def second(parameter: Tensor) -> Tensor | None:
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            for name in ("exp_avg_sq", "square_avg"):
                if name in state:
                    moment: Tensor = state[name]
                    return moment
        return None

    return second


def shared_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The optimizers' trainable parameters, by their names in the model, each once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found |= {id(each): each for each in group["params"] if each.requires_grad}
    if not found:
        raise BadInput("optimizer must have a trainable parameter, got none")
    return {
        names.get(key, f"optimizer's parameter {number}"): parameter
        for number, (key, parameter) in enumerate(found.items())
    }


def part_of(labels: Mapping[str, str], group: dist.ProcessGroup | None) -> str:
    """The part of a checkpoint that a group of replicas has to itself, as there may be others: of other shards, or,
    with DDP inside nodes, of other ranks of the nodes. Empty if there is one group, or if rank 0 is in it."""
    if place := labels.get("shard"):
        return place.replace(" ", "-")
    first = min(dist.get_process_group_ranks(group)) if group is not None else 0
    return f"group-of-rank-{first}" if first else ""


def parameter_counts(optimizers: Sequence[Optimizer]) -> list[int]:
    """Number of trainable parameters in each of the optimizers' groups."""
    return [
        sum(parameter.requires_grad for parameter in group["params"])
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
