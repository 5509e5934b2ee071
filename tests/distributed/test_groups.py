"""Groups of our own, beside those of a user: groups of uneven membership, destroyed groups."""

from pathlib import Path

import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor

from gradsieve import ProcessGroupWorld
from gradsieve.comm.collectives import Program, all_gather

LIMIT = 10.0  # seconds


def _members(world: ProcessGroupWorld) -> list[int]:
    rank = torch.tensor([dist.get_rank()])
    return [int(part) for part in world.run([_everyone(rank, world.size)])[0]]


def _everyone(own: Tensor, world_size: int) -> Program[list[Tensor]]:
    return (yield from all_gather("ranks", own, [1] * world_size))


def _work(rank: int, world_size: int) -> None:
    """Rank 0 is in one more group than rank 1, and that in one more than rank 2."""
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    for group, ranks in ((None, [0, 1, 2]), (pair, [0, 1])):
        if rank not in ranks:
            continue
        for turn in range(8):
            world = ProcessGroupWorld(group, LIMIT)
            beside = world.again()
            assert _members(world) == _members(beside) == ranks
            world.close()
            assert _members(beside) == ranks
            if turn % 2:
                beside.close()


def test_groups_come_and_go(tmp_path: Path) -> None:
    run_processes(_work, 3, tmp_path)
