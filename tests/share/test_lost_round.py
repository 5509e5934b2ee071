"""A round that was being made beside the last step, and failed with its group."""

from pathlib import Path

import torch
import torch.distributed as dist

from gradsieve import share
from gradsieve.share.background import Task
from gradsieve.worlds.streams import SideStream


def test_a_round_whose_group_was_destroyed_does_not_keep_from_regrouping(tmp_path: Path) -> None:
    def world(name: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{name}", rank=0, world_size=1)

    def round_of_a_destroyed_group() -> None:
        dist.get_backend(group)

    world("before")
    group = dist.group.WORLD
    assert group is not None
    model = torch.nn.Linear(4, 4)
    sieve = share(model, torch.optim.SGD(model.parameters(), lr=0.1), density=0.5, delay=1)
    dist.destroy_process_group()
    task = Task(round_of_a_destroyed_group, SideStream(torch.device("cpu")))
    task.run()
    assert isinstance(task._error, ValueError)
    sieve.driver._running = task  # type: ignore[assignment]
    world("after")
    try:
        assert sieve.regroup().lost_norm == 0.0
    finally:
        sieve.close()
        dist.destroy_process_group()
