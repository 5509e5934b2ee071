"""Process groups of our own, beside the user's.

torch names a group of some ranks by the number of groups that this process is in. Ranks may be in different
numbers of groups: they would wait for each other under different names. And after a group was destroyed its name
comes again, under which the store still has its old addresses. So ranks agree on a number that none of them has
used before. A group of all ranks gets a name that is used once anyway.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradsieve.worlds.transport import Transport

# The last number used, for each default group: with another one, the store is another one, too.
_last: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def new_group(group: dist.ProcessGroup | None, **options: Any) -> dist.ProcessGroup:
    """Another group of the same workers; every one of them must call it. `options` are those of torch's."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) == dist.get_world_size():
        whole: dist.ProcessGroup = dist.new_group(**options)
        return whole
    with _numbered(group):
        part: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, **options)
    return part


@contextmanager
def _numbered(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context in which torch counts as many groups on all ranks of a group."""
    names: Any = distributed_c10d._world.pg_names
    own = torch.tensor([max(len(names), _last.get(dist.group.WORLD, -1) + 1)])
    sent = Transport(group).take(own)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    number = _last[dist.group.WORLD] = int(sent)
    fillers = {object(): f"filler {place}" for place in range(number - len(names))}
    names.update(fillers)
    try:
        yield
    finally:
        for filler in fillers:
            del names[filler]
