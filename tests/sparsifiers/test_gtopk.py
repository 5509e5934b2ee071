"""gTop-k: the merges agree on k positions, and what they drop on the way is not lost."""

import math

import pytest
import torch

from gradsieve import VirtualWorld
from gradsieve.comm.pairs import Pairs
from gradsieve.comm.step import Step
from gradsieve.sparsifiers.gtopk import merge, merge_all
from helpers import Group, gradients


def merged(values: list[list[float]], k: int) -> list[list[int]]:
    """What each worker holds after all merges of these accumulators' top k."""
    size, n = len(values), len(values[0])
    programs = []
    for rank, row in enumerate(values):
        acc = torch.tensor(row)
        picked = acc.abs().topk(k).indices.sort().values
        programs.append(merge_all(Pairs(picked, acc[picked]), Step(0, n, k, rank, size)))
    return [indices.tolist() for indices in VirtualWorld(size).run(programs)]


def test_merge_adds_and_keeps_the_largest() -> None:
    one = Pairs(torch.tensor([0, 3, 5]), torch.tensor([1.0, -4.0, 2.0]))
    other = Pairs(torch.tensor([3, 4, 5]), torch.tensor([3.5, -3.0, 2.0]))
    for found in (merge(one, other), merge(other, one)):
        assert found.indices.tolist() == [0, 4, 5]  # -4 + 3.5 falls behind
        assert found.values.tolist() == [1, -3, 4]


def test_merge_of_equal_magnitudes_does_not_depend_on_the_order() -> None:
    one = Pairs(torch.tensor([1, 5]), torch.tensor([1.0, -1.0]))
    other = Pairs(torch.tensor([2, 7]), torch.tensor([1.0, 1.0]))
    assert merge(one, other).indices.tolist() == merge(other, one).indices.tolist() == [1, 2]


@pytest.mark.parametrize("world_size", range(1, 17))
def test_all_agree_on_k_positions(world_size: int) -> None:
    group, n = Group("gtopk", 0.01, world_size), 2_000
    for step in range(4):
        update = group.step_lawfully(gradients("normal", n, world_size, step))
        assert group.reports[0].union == int((update != 0).sum()) == 20
    rounds = math.ceil(math.log2(world_size)) + (world_size & (world_size - 1) > 0)
    assert group.reports[0].collectives == rounds + 1


def test_finds_the_global_top_k_where_no_merge_drops_it() -> None:
    values = [[0.0] * 8 for _ in range(5)]
    for row in values:
        row[2], row[6] = 3.0, -2.0
    values[4][0] = 100.0  # of the worker beyond the last power of two
    values[3][7] = -90.0
    assert merged(values, 3) == [[0, 2, 7]] * 5


def test_what_an_intermediate_merge_drops_still_counts() -> None:
    """Position 1 of worker 0 loses in the first merge and comes back through the others: its part must stay."""
    n = 8
    rows = {0: {1: 3.0}, 1: {2: 5.0}, 2: {1: 9.0}, 3: {1: 1.0}}
    grads = [torch.zeros(n) for _ in rows]
    for rank, row in rows.items():
        for position, value in row.items():
            grads[rank][position] = value
    group = Group("gtopk", 1 / n, 4)
    update = group.step_lawfully(grads)
    assert update.tolist() == [0, (3 + 9 + 1) / 4, 0, 0, 0, 0, 0, 0]
    assert [residual.tolist()[1:3] for residual in group.residuals(n)] == [[0, 0], [0, 5], [0, 0], [0, 0]]


def test_volume_grows_with_the_logarithm_of_the_workers() -> None:
    n, k = 20_000, 200
    words = {}
    for world_size in (2, 4, 16):
        group = Group("gtopk", k / n, world_size)
        for step in range(3):
            group.step(gradients("normal", n, world_size, step))
        ledger = group.reducers[0].ledger
        rounds = int(math.log2(world_size))
        assert ledger.by_tag["merge"].calls == rounds
        assert ledger.by_tag["merge"].ring_bytes < rounds * 2 * k * 4  # an index is packed: less than a word
        words[world_size] = ledger.total.ring_bytes / 4
        assert words[world_size] < (2 * rounds + 2) * k
    assert words[16] < 4 * words[2]


def test_values_travel_narrow() -> None:
    wide, narrow = (Group("gtopk", 0.01, 3, values=values) for values in ("fp32", "bf16"))
    for group in (wide, narrow):
        for step in range(2):
            group.step(gradients("normal", 10_000, 3, step))
    halves = [group.reducers[1].ledger.by_tag["merge"].handed_bytes for group in (wide, narrow)]
    assert halves[0] - halves[1] == 2 * 100  # worker 1 of 3 sends one message of k values
