"""The kernel that looks at drift, against the plain one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import AWKWARD, DTYPES, SIZES, cut, thresholds
from torch import Tensor

from gradsieve import ops
from gradsieve.ops import reference


def pieces(x: Tensor, count: int) -> list[Tensor]:
    """Uneven pieces, each in memory of its own; some are empty."""
    chance = torch.Generator().manual_seed(count)
    borders = torch.randint(len(x) + 1, (count - 1,), generator=chance).sort().values.tolist()
    return [part.clone() for part in x.tensor_split(borders)]


def check(
    shared: Tensor, weights: Tensor, threshold: float, start: int, stop: int, second: Tensor | None = None
) -> None:
    for count in (1, 7):
        moments = [] if second is None else pieces(second, count)
        check_pieces(shared, pieces(weights, count), threshold, start, stop, moments)


def check_pieces(
    shared: Tensor, weights: list[Tensor], threshold: float, start: int, stop: int, second: list[Tensor]
) -> None:
    found, expected = (torch.zeros(ops.BINS, dtype=torch.int64) for _ in range(2))
    positions, values, bad = ops.drift_select(shared, weights, threshold, start, stop, counts=found, second=second)
    others, theirs, worst = reference.drift_select(
        shared, weights, threshold, start, stop, counts=expected, second=second
    )
    assert torch.equal(positions, others)
    assert bad == int(worst)
    if not second:
        assert torch.equal(values, theirs)
        assert torch.equal(found, expected)
    else:  # torch's root is not always the nearest float, so an element may be one bin off
        torch.testing.assert_close(values, theirs, rtol=1e-6, atol=0)
        assert int((found.cumsum(0) - expected.cumsum(0)).abs().max()) <= 2
    assert torch.equal(ops.drift_select(shared, weights, threshold, start, stop, second=second)[0], others)


@given(
    pairs=st.lists(
        st.tuples(st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([*AWKWARD, 0.5])), max_size=200
    ),
    threshold=thresholds,
    a=st.floats(0, 1),
    b=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_any_values(
    pairs: list[tuple[float, float]], threshold: float, a: float, b: float, dtype: torch.dtype
) -> None:
    shared = torch.tensor([pair[0] for pair in pairs], dtype=torch.promote_types(dtype, torch.float32))
    weights = torch.tensor([pair[1] for pair in pairs], dtype=torch.float32).to(dtype)
    check(shared, weights, threshold, *cut(len(shared), a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [*SIZES, 200_000])
def test_every_size(dtype: torch.dtype, n: int) -> None:
    chance = torch.Generator().manual_seed(n)
    shared = torch.randn(n, generator=chance, dtype=torch.promote_types(dtype, torch.float32))
    weights = (shared + torch.randn(n, generator=chance)).to(dtype)
    for threshold in (0.0, 1.0, 3.0, math.inf):  # at 0 the buffers must grow
        check(shared, weights, threshold, 0, n)
        check(shared, weights, threshold, n // 3, n // 2)
        check(shared, weights, threshold, n // 3, n, torch.rand(n, generator=chance).to(dtype))


def test_first_bad_position() -> None:
    weights = torch.zeros(10_000)
    weights[[7_000, 9_000]] = torch.tensor([math.nan, math.inf])
    for parts in ([weights], pieces(weights, 9)):
        assert ops.drift_select(torch.zeros(10_000), parts, 0.5)[2] == 7_000
        assert ops.drift_select(torch.zeros(10_000), parts, 0.5, 7_001)[2] == 9_000
        assert ops.drift_select(torch.zeros(10_000), parts, 0.5, 0, 7_000)[2] == -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_second_moment_yet(dtype: torch.dtype) -> None:
    """A parameter without gradients has drifted nowhere, whatever its weights are."""
    shared = torch.zeros(9, dtype=torch.promote_types(dtype, torch.float32))
    weights, second = [torch.ones(4, dtype=dtype), torch.ones(5, dtype=dtype)], [torch.ones(4), torch.empty(0)]
    check_pieces(shared, weights, 0.5, 2, 8, second)
    assert ops.drift_select(shared, weights, 0.5, 2, 8, second=second)[0].tolist() == [2, 3]


@given(
    n=st.integers(0, 300),
    count=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    dtypes=st.sampled_from([[dtype] for dtype in DTYPES] + [DTYPES]),
)
def test_gather_and_scatter(n: int, count: int, seed: int, dtypes: list[torch.dtype]) -> None:
    chance = torch.Generator().manual_seed(seed)
    parts = [
        part.to(dtypes[i % len(dtypes)]) for i, part in enumerate(pieces(torch.randn(n, generator=chance), count))
    ]
    positions = torch.where(torch.rand(n, generator=chance) < 0.3)[0]
    whole = torch.cat([part.double() for part in parts])
    values = ops.gather_pieces(parts, positions)
    assert torch.equal(values.double(), whole[positions])
    others = [part.clone() for part in parts]
    ops.scatter_pieces_(parts, positions, values + 1)
    reference.scatter_pieces_(others, positions, values + 1)
    assert all(torch.equal(a, b) for a, b in zip(parts, others, strict=True))
    missed = torch.ones(n, dtype=torch.bool)
    missed[positions] = False
    assert torch.equal(torch.cat([part.double() for part in parts])[missed], whole[missed])


@pytest.mark.parametrize("positions", [[2, 1], [-1, 1], [0, 5]])
def test_bad_positions(positions: list[int]) -> None:
    parts = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(ValueError, match="positions must rise from 0 at least to below 5"):
        ops.gather_pieces(parts, torch.tensor(positions))
    with pytest.raises(ValueError, match="positions must rise from 0 at least to below 5"):
        ops.scatter_pieces_(parts, torch.tensor(positions), torch.zeros(2))


@pytest.mark.parametrize(
    ("shared", "weights", "words"),
    [
        (torch.zeros(3), torch.zeros(4), "weights must have shared's 3 elements, got 4"),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3), "shared must be one of float32, float64"),
        (torch.zeros(2, 2), torch.zeros(2, 2), "shared must be a contiguous vector"),
    ],
)
def test_bad_input(shared: Tensor, weights: Tensor, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        ops.drift_select(shared, [weights], 1.0)
