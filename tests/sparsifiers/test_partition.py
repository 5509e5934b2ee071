"""Blocks tile the vector, bounds tile the blocks, and no distribution of work keeps the balance away."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from studies.sparsifiers.released import ReleasedBlocks, released_bounds, released_rebalance

from gradsieve.sparsifiers.exdyna.partition import (
    UNIT,
    Blocks,
    even_bounds,
    grouped,
    learn,
    make_blocks,
    moved,
    rebalance,
)


def check_tiling(blocks: Blocks | ReleasedBlocks, bounds: tuple[int, ...]) -> None:
    edges = [blocks.start(bound) for bound in bounds]
    assert edges[0] == 0
    assert edges[-1] == blocks.n
    assert edges == sorted(edges)


@given(n=st.integers(1, 10**10), asked=st.integers(1, 5_000), world_size=st.integers(1, 3_000))
def test_blocks_of_any_size(n: int, asked: int, world_size: int) -> None:
    blocks = make_blocks(n, asked, world_size)
    assert 1 <= blocks.count <= n
    check_tiling(blocks, even_bounds(blocks.count, world_size))
    for block in {0, blocks.count // 2, blocks.count - 1}:
        size = blocks.start(block + 1) - blocks.start(block)
        assert size in (n // blocks.count, n // blocks.count + 1)


@given(n=st.integers(1, 3_000), asked=st.integers(1, 200))
def test_counts_of_every_block(n: int, asked: int) -> None:
    blocks = make_blocks(n, asked, 1)
    counts = blocks.counts(torch.arange(n))
    assert counts.tolist() == [blocks.start(b + 1) - blocks.start(b) for b in range(blocks.count)]


@pytest.mark.parametrize(("n", "world_size"), [(1, 1), (5, 16), (1_000, 3), (32_769, 7), (1_000_003, 16)])
def test_tiles_after_2_000_random_rebalances(n: int, world_size: int) -> None:
    blocks, generator = make_blocks(n, 64, world_size), torch.Generator().manual_seed(n)
    bounds, load = even_bounds(blocks.count, world_size), torch.zeros(blocks.count, dtype=torch.int64)
    last = grouped(load)
    for step in range(2_000):
        heavy = torch.rand(blocks.count, generator=generator) ** (1 + step % 50)
        counts = (heavy * 1_000).long()
        load, last = learn(load, counts, last)
        bounds = rebalance(load, bounds)
        assert len(bounds) == world_size + 1
        check_tiling(blocks, bounds)


def test_released_rules_tile_after_2_000_random_rebalances() -> None:
    for world_size in (2, 3, 7, 16):
        blocks, generator = ReleasedBlocks(100_003), torch.Generator().manual_seed(world_size)
        bounds = released_bounds(world_size)
        for _ in range(2_000):
            counts = (torch.rand(world_size, generator=generator) ** 3 * 100 + 1).long().tolist()
            bounds = released_rebalance(bounds, counts, blocks)
            check_tiling(blocks, bounds)
            assert min(b - a for a, b in itertools.pairwise(bounds)) >= 1024 / (4 * world_size)


def test_heavy_average_light() -> None:
    """The released sweep never moves here, since no neighbours are heavy and light; ours solves it at once."""
    counts = [150, 100, 50]
    released = released_bounds(3)
    assert released_rebalance(released, counts, ReleasedBlocks(98_304)) == released
    load = torch.cat([torch.full((30,), count) for count in counts]) * UNIT
    bounds = rebalance(load, (0, 30, 60, 90))
    parts = [int(load[a:b].sum()) for a, b in itertools.pairwise(bounds)]
    assert max(parts) * 3 / sum(parts) < 1.03


@given(
    load=st.lists(st.integers(0, 10_000), min_size=40, max_size=300).filter(any),
    world_size=st.integers(1, 10),
)
def test_no_part_exceeds_its_share_by_more_than_a_block(load: list[int], world_size: int) -> None:
    loads = torch.tensor(load) * UNIT
    bounds = rebalance(loads, even_bounds(len(load), world_size))
    parts = [int(loads[a:b].sum()) for a, b in itertools.pairwise(bounds)]
    share, heaviest_block = int(loads.sum()) / world_size, int(loads.max())
    assert max(parts) <= share * 1.07 + heaviest_block


def test_bounds_stay_while_they_are_good() -> None:
    load = torch.tensor([100, 101, 99, 100] * 8) * UNIT
    bounds = (0, 8, 16, 24, 32)
    assert rebalance(load, bounds) is bounds


def test_load_remembers_and_forgets_faster_when_the_work_moved() -> None:
    first, second, nothing = torch.tensor([10, 0]), torch.tensor([0, 10]), torch.zeros(2, dtype=torch.int64)
    load, last = learn(nothing, first, nothing)
    assert load.tolist() == [10 * UNIT, 0]
    load, last = learn(load, second, last)  # it may be chance
    assert load.tolist() == [8.75 * UNIT, 1.25 * UNIT]
    load, last = learn(load, second, last)  # it is not
    assert load.tolist() == [4.375 * UNIT, 5.625 * UNIT]


def test_chance_is_not_movement() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = 4096
    steps = [
        torch.bincount(torch.randint(blocks, (400,), generator=generator), minlength=blocks) for _ in range(60)
    ]
    usual = grouped(torch.full((blocks,), 400 * UNIT // blocks))
    assert not any(moved(now, last, usual) for last, now in itertools.pairwise(grouped(s * UNIT) for s in steps))
    hot = [torch.bincount(torch.randint(400, (400,), generator=generator), minlength=blocks) for _ in range(60)]
    assert all(moved(now, last, usual) for last, now in itertools.pairwise(grouped(s * UNIT) for s in hot))
