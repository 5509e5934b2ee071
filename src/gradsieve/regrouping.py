"""Change of the group of workers: some left, some joined. What is kept, what newcomers receive, what was lost.

Survivors keep their residuals (weights, with `share`). All continue with the weights and the shared states of the
worker that is ahead: when a group fails, some workers may have completed a step that others have not.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.collectives import Program, all_gather, broadcast
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers.base import vector_norm


@dataclass(frozen=True)
class Regrouped:
    """What a change of the group did. Ranks are those of the new group, except for `lost`."""

    world_size: int
    step: int  # the next one
    newcomers: list[int]
    behind: list[int]  # had not completed the last step that another has; their gradient of that step is lost
    lost: list[int]  # ranks of the old group that left
    # Norm of the residuals (drifts) that were lost, and of those that are kept, over all workers. Those of dead
    # workers cannot be read: each is estimated by the average of the survivors.
    lost_norm: float
    kept_norm: float


@dataclass(frozen=True)
class Member:
    """What one worker reports about itself."""

    rank: int  # in the old group
    world_size: int  # of the old group
    step: int
    joins: bool
    norm: float
    shared: dict[str, Any]  # states that are the same on all workers


def members(own: Member) -> Program[list[Member]]:
    """All workers of the new group, by rank."""
    text = json.dumps(vars(own), default=lambda tensor: tensor.tolist())
    replies = yield from all_gather("regroup", torch.tensor(list(text.encode()), dtype=torch.uint8))
    return [Member(**json.loads(bytes(reply.tolist()))) for reply in replies]


def leader_of(group: Sequence[Member]) -> int:
    """The first worker that is farthest ahead."""
    return max(range(len(group)), key=lambda rank: (not group[rank].joins, group[rank].step, -rank))


def summary(group: Sequence[Member]) -> Regrouped:
    """What the change did, the same on all workers."""
    head = group[leader_of(group)]
    old = [each for each in group if not each.joins]
    lost = sorted(set(range(head.world_size)) - {each.rank for each in old}) if old else []
    squares = sum(each.norm**2 for each in old)
    return Regrouped(
        world_size=len(group),
        step=head.step,
        newcomers=[rank for rank, each in enumerate(group) if each.joins],
        behind=[rank for rank, each in enumerate(group) if not each.joins and each.step < head.step],
        lost=lost,
        lost_norm=math.sqrt(squares / len(old) * len(lost)) if old else 0.0,
        kept_norm=math.sqrt(squares),
    )


def regroup_reducer(
    reducer: SparseReducer, rank: int, world_size: int, tensors: Sequence[Tensor], *, joins: bool
) -> Program[Regrouped]:
    """Move a reducer to the new group; the model's `tensors` become those of the worker that is ahead."""
    norm, states = vector_norm(reducer.residual), reducer.states
    own = Member(reducer.rank, reducer.world_size, reducer.step, joins, norm, states.shared_values())
    group = yield from members(own)
    found, head = summary(group), leader_of(group)
    if found.behind:
        yield from _catch_up(reducer, head, rank in found.behind)
    yield from broadcast_from(head, tensors)
    if joins:
        reducer.residual.zero_()
    reducer.move(rank, world_size, found.step, group[head].shared)
    return found


def _catch_up(reducer: SparseReducer, head: int, behind: bool) -> Program[None]:
    """Clear what the last step sent in the residuals of workers that are behind: their new weights contain it."""
    everything = torch.arange(len(reducer.residual))
    own = everything if reducer.last_sent is None else reducer.last_sent.cpu()
    length = int((yield from broadcast("regroup", torch.tensor([len(own)]), head)))
    own = own.clone() if len(own) == length else torch.zeros(length, dtype=torch.int64)
    positions = yield from broadcast("regroup", own, head)
    if behind:
        reducer.residual[positions.to(reducer.residual.device)] = 0


def broadcast_from(root: int, tensors: Sequence[Tensor]) -> Program[None]:
    """Replace every tensor by that of one worker."""
    for tensor in tensors:
        own = tensor.detach()
        own.copy_((yield from broadcast("weights", own.reshape(-1), root)).view_as(own))
