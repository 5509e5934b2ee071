"""Sparsifiers whose workers have parts of their own: no overlap, no build-up, nobody's part is missing."""

import pytest
import torch

from gradsieve.collectives import AllGather
from helpers import KINDS, Group, gradients


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16])
def test_picks_are_disjoint(exclusive: str, world_size: int) -> None:
    group, n = Group(exclusive, 0.01, world_size), 5_000
    seen: list[torch.Tensor] = []

    def spy(program):  # type: ignore[no-untyped-def]
        reply = None
        while True:
            try:
                call = program.send(reply)
            except StopIteration as stop:
                return stop.value
            if isinstance(call, AllGather) and call.tag == "indices":
                seen.append(call.tensor)
            reply = yield call

    for step, kind in enumerate(["normal", *KINDS, "normal", "normal"]):
        seen.clear()
        grads = gradients(kind, n, world_size, step)
        group.world.run([spy(r.reduce(g)) for r, g in zip(group.reducers, grads, strict=True)])
        report = next(reducer.end_step() for reducer in group.reducers)
        together = torch.cat(seen)
        assert len(seen) == world_size
        assert len(together.unique()) == len(together) == sum(report.counts) == report.union
        assert [len(part) for part in seen] == report.counts


def test_no_build_up(exclusive: str) -> None:
    for world_size in (1, 4, 16):
        group = Group(exclusive, 0.01, world_size)
        for step in range(12):
            group.step(gradients("normal", 20_000, world_size, step))
            assert group.reports[0].union <= 200
            assert group.reports[0].union == group.reports[0].selected
