"""Sparsifiers whose workers have parts of their own: no overlap, no build-up, nobody's part is missing."""

import pytest
import torch

from gradsieve import ops
from helpers import KINDS, Group, gradients


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16])
def test_picks_are_disjoint(exclusive: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group, n = Group(exclusive, 0.01, world_size), 5_000
    seen: list[torch.Tensor] = []
    pack = ops.pack_sorted

    def spy(indices: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        seen.append(indices)
        return pack(indices, start, stop)

    monkeypatch.setattr(ops, "pack_sorted", spy)
    for step, kind in enumerate(["normal", *KINDS, "normal", "normal"]):
        seen.clear()
        grads = gradients(kind, n, world_size, step)
        group.step(grads)
        report = group.reports[0]
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
