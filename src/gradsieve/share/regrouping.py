"""Change of the group of replicas: survivors keep their weights, newcomers start from the agreed ones."""

from collections.abc import Sequence

from torch import Tensor

from gradsieve.comm.collectives import Program
from gradsieve.regrouping import Member, Regrouped, broadcast_from, leader_of, members, summary
from gradsieve.share.replica import Replica
from gradsieve.sparsifiers.base import vector_norm


def regroup_replica(
    replica: Replica, rank: int, world_size: int, buffers: Sequence[Tensor], *, joins: bool
) -> Program[Regrouped]:
    """Move a replica to the new group. `buffers` become those of the worker that is ahead."""
    weights = replica.weights
    drift = vector_norm(weights.drift(weights.all, weights.read(weights.all)))
    counters = {"steps": replica.steps, "rounds": replica.rounds, "state": replica.state.shared_values()}
    group = yield from members(Member(replica.rank, replica.world_size, replica.rounds, joins, drift, counters))
    found, head = summary(group), leader_of(group)
    before = weights.shared.clone()
    yield from broadcast_from(head, [weights.shared, *buffers])
    if joins:
        weights.write_(weights.all, weights.shared)
    elif rank in found.behind:
        # The round that the others completed contains this worker's drift, which must not count twice.
        moved = (weights.shared != before).nonzero().flatten()
        weights.write_(moved, weights.shared[moved])
    replica.move(rank, world_size, group[head].shared)
    return found
