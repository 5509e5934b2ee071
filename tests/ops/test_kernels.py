"""The fast kernels against the plain ones, over odd sizes and odd values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import ops
from gradsieve.ops import reference

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 31, 63, 64, 65, 127, 128, 1_000, 4_095, 4_097, 70_001]
AWKWARD = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 1e-38, 3.4e38, 1.0, -1.0]

vectors = st.lists(
    st.one_of(st.sampled_from(AWKWARD), st.floats(width=32, allow_nan=True, allow_infinity=True)), max_size=300
)
thresholds = st.one_of(st.sampled_from([0.0, -1.0, 1.0, 1e-45, math.inf, math.nan, 1e39]), st.floats(width=32))


def cut(n: int, a: float, b: float) -> tuple[int, int]:
    low, high = sorted((int(a * n), int(b * n)))
    return low, high


@given(values=vectors, threshold=thresholds, a=st.floats(0, 1), b=st.floats(0, 1))
def test_select_above(values: list[float], threshold: float, a: float, b: float) -> None:
    x = torch.tensor(values)
    start, stop = cut(len(x), a, b)
    found = ops.select_above(x, threshold, start, stop)
    assert found.dtype == torch.int64
    assert torch.equal(found, reference.select_above(x, threshold, start, stop))
    assert not x[found].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 1.0])
def test_select_above_at_every_density(dtype: torch.dtype, n: int, density: float) -> None:
    x = torch.rand(n, generator=torch.Generator().manual_seed(n)).to(dtype) - 0.5
    threshold = 0.5 * (1 - density)
    assert torch.equal(ops.select_above(x, threshold), reference.select_above(x, threshold, 0, n))


@given(
    pairs=st.lists(st.tuples(st.sampled_from(AWKWARD), st.floats(width=32)), max_size=200),
    threshold=thresholds,
    a=st.floats(0, 1),
    b=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    keep=st.sampled_from(["nothing", "elsewhere", "in the gradient"]),
)
def test_accumulate_select(
    pairs: list[tuple[float, float]], threshold: float, a: float, b: float, dtype: torch.dtype, keep: str
) -> None:
    residual = torch.tensor([pair[0] for pair in pairs], dtype=torch.float32)
    grad = torch.tensor([pair[1] for pair in pairs], dtype=torch.float32).to(dtype)
    if keep == "in the gradient" and dtype not in (torch.float32, torch.float64):
        keep = "elsewhere"
    start, stop = cut(len(residual), a, b)

    def run(op) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        r, g, finite = residual.clone(), grad.clone(), torch.tensor(True)
        backup = {"nothing": None, "elsewhere": torch.full_like(r, 7.0), "in the gradient": g}[keep]
        hits = op(r, g, threshold, start, stop, backup=backup, finite=finite)
        kept = torch.empty(0) if backup is None else backup
        return hits, r, kept, finite

    for found, expected in zip(run(ops.accumulate_select_), run(reference.accumulate_select_), strict=True):
        assert found.dtype == expected.dtype
        # Bits, so that NaNs compare: but which of two NaNs an addition returns is the processor's business.
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("swap", [False, True])
def test_accumulate_select_at_every_size(dtype: torch.dtype, n: int, swap: bool) -> None:
    if swap and dtype.itemsize < 4:
        swap = False
    generator = torch.Generator().manual_seed(n)
    residual, grad = torch.randn(n, generator=generator), torch.randn(n, generator=generator).to(dtype)
    for threshold in (0.0, 1.0, 100.0):
        for start, stop in ((0, n), (n // 3, n // 2), (n, n)):
            r, g = residual.clone(), grad.clone()
            hits = ops.accumulate_select_(r, g, threshold, start, stop, backup=g if swap else None)
            assert torch.equal(r, residual + grad.float())
            assert torch.equal(hits, reference.select_above(r, threshold, start, stop))
            assert torch.equal(g, residual.to(dtype) if swap else grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 4_096, 4_999])
def test_finite_flag_is_sticky(bad: float, place: int) -> None:
    finite = torch.tensor(True)
    grad = torch.ones(5_000)
    ops.accumulate_select_(torch.zeros(5_000), grad, 2.0, finite=finite)
    assert finite
    grad[place] = bad
    ops.accumulate_select_(torch.zeros(5_000), grad, 2.0, finite=finite)
    assert not finite
    ops.accumulate_select_(torch.zeros(5_000), torch.ones(5_000), 2.0, finite=finite)
    assert not finite


def test_finite_sum_that_overflows() -> None:
    finite = torch.tensor(True)
    ops.accumulate_select_(torch.full((3,), 3e38), torch.full((3,), 3e38), 1.0, finite=finite)
    assert not finite


@given(values=vectors, a=st.floats(0, 1), b=st.floats(0, 1))
def test_log_histogram(values: list[float], a: float, b: float) -> None:
    x = torch.tensor(values)
    start, stop = cut(len(x), a, b)
    counts = ops.log_histogram(x, start, stop)
    assert torch.equal(counts, reference.log_histogram(x, start, stop))
    assert int(counts.sum()) == stop - start


def test_histogram_tells_how_many_a_threshold_selects() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    counts = ops.log_histogram(x)
    for index in (1, 3_000, 4_000, 4_064, 4_100):
        assert int(counts[index:].sum()) == len(ops.select_above(x, ops.bin_edge(index)))
    widths = [ops.bin_edge(i + 1) / ops.bin_edge(i) for i in range(3_000, 4_500)]
    assert max(widths) < 1.033


@given(values=vectors, dtype=st.sampled_from(DTYPES))
def test_all_finite(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    assert ops.all_finite(x) == bool(reference.all_finite(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 65, 5_000])
def test_gather_clear_and_scatter(dtype: torch.dtype, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator)
    indices = torch.randperm(n, generator=generator)[: n // 2]
    fast, plain = x.clone(), x.clone()
    values = ops.gather_clear_(fast, indices)
    assert torch.equal(values, reference.gather_clear_(plain, indices))
    assert torch.equal(fast, plain)
    out, expected = torch.full((n,), math.nan, dtype=dtype), torch.full((n,), math.nan, dtype=dtype)
    ops.scatter_update_(out, indices, values)
    reference.scatter_update_(expected, indices, values)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_indices_outside(index: int) -> None:
    """Positions come from other workers: a wrong one must never write into somebody's memory."""
    indices = torch.tensor([0, index])
    with pytest.raises(IndexError, match=rf"indices must be in \[0, 5\), got {index}"):
        ops.gather_clear_(torch.zeros(5), indices)
    if index > 0:
        with pytest.raises(IndexError, match=f"indices must be below 5, got {index}"):
            ops.scatter_update_(torch.zeros(5), indices, torch.zeros(2))


def test_negative_indices_are_skipped() -> None:
    """What goes into another bucket is marked so, on every device alike."""
    indices, values = torch.tensor([-1, 3, -1, 0]), torch.tensor([9.0, 2.0, 9.0, 1.0])
    for scatter in (ops.scatter_update_, reference.scatter_update_):
        out = torch.full((5,), 7.0)
        scatter(out, indices, values)
        assert out.tolist() == [1.0, 0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ops.select_above(torch.zeros(2, 2), 1.0), ValueError, "x must be a contiguous vector"),
        (lambda: ops.select_above(torch.zeros(8)[::2], 1.0), ValueError, "x must be a contiguous vector"),
        (lambda: ops.select_above(torch.zeros(3, dtype=torch.int32), 1.0), TypeError, "got int32"),
        (lambda: ops.select_above(torch.zeros(3), 1.0, 2, 5), ValueError, "stop <= 3, got 2 and 5"),
        (lambda: ops.select_above(torch.zeros(3), 1.0, -1, 2), ValueError, "got -1 and 2"),
        (lambda: ops.accumulate_select_(torch.zeros(3), torch.zeros(4), 1.0), ValueError, "residual's shape"),
        (lambda: ops.accumulate_select_(torch.zeros(3).double(), torch.zeros(3), 1.0), TypeError, "residual"),
        (
            lambda: ops.accumulate_select_(torch.zeros(3), torch.zeros(3).to(torch.complex64), 1.0),
            TypeError,
            "grad",
        ),
        (
            lambda: ops.accumulate_select_(torch.zeros(3), torch.zeros(3), 1.0, backup=torch.zeros(3).half()),
            TypeError,
            "backup must be one of float32, float64, got float16",
        ),
        (lambda: ops.scatter_update_(torch.zeros(3), torch.zeros(2).long(), torch.zeros(1)), ValueError, "values"),
        (lambda: ops.log_histogram(torch.zeros(3).double()), TypeError, "x must be one of float32"),
    ],
)
def test_bad_input(call, error: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=words):
        call()


@given(places=st.sets(st.integers(0, 2**40), max_size=100), start=st.integers(0, 2**40), room=st.integers(1, 2**20))
def test_pack_sorted(places: set[int], start: int, room: int) -> None:
    indices = torch.tensor(sorted(places), dtype=torch.int64) + start
    stop = start + max(places, default=0) + room
    packed = ops.pack_sorted(indices, start, stop)
    assert len(packed) == ops.packed_bytes(len(places), stop - start)
    assert torch.equal(packed, reference.pack_sorted(indices, start, stop))
    assert torch.equal(ops.unpack_sorted(packed, len(places), start, stop), indices)
    assert torch.equal(reference.unpack_sorted(packed, len(places), start, stop), indices)


@pytest.mark.parametrize(("n", "count", "most_bits"), [(10**6, 10**3, 12), (10**6, 10**4, 9), (10**6, 10**6, 2)])
def test_packed_size(n: int, count: int, most_bits: float) -> None:
    assert ops.packed_bytes(count, n) * 8 <= count * most_bits
    assert ops.packed_bytes(0, n) == 0


def test_packing_refuses() -> None:
    for indices in ([3, 2], [1, 1], [-1, 2], [2, 10]):
        with pytest.raises(ValueError, match="indices must rise from 0 at least to below 10"):
            ops.pack_sorted(torch.tensor(indices), 0, 10)
    packed = ops.pack_sorted(torch.tensor([1, 5]), 0, 10)
    with pytest.raises(ValueError, match="packed must have"):
        ops.unpack_sorted(packed[:-1], 2, 0, 10)
    with pytest.raises(ValueError, match="packed must hold 2 positions, got fewer"):
        ops.unpack_sorted(torch.zeros_like(packed), 2, 0, 10)
    with pytest.raises(ValueError, match="packed must hold 2 positions, got more"):
        ops.unpack_sorted(torch.full_like(packed, 255), 2, 0, 10)


@given(
    workers=st.lists(
        st.tuples(st.sets(st.integers(0, 5_000), max_size=40), st.integers(0, 2**40), st.integers(1, 2**20)),
        min_size=1,
        max_size=6,
    )
)
def test_unpack_parts(workers: list[tuple[set[int], int, int]]) -> None:
    """Messages of several workers, one after the other."""
    parts = [torch.tensor(sorted(places), dtype=torch.int64) + start for places, start, _ in workers]
    spans = [(start, start + max(places, default=0) + room) for places, start, room in workers]
    packed = [ops.pack_sorted(part, *span) for part, span in zip(parts, spans, strict=True)]
    counts = [len(part) for part in parts]
    assert ops.packed_lengths(counts, spans) == [len(each) for each in packed]
    assert torch.equal(ops.unpack_parts(packed, counts, spans), torch.cat(parts))


def test_unpack_parts_names_the_worker() -> None:
    good, span = ops.pack_sorted(torch.tensor([1, 5]), 0, 10), (0, 10)
    with pytest.raises(ValueError, match="packed must have 2 bytes from worker 1, got 1"):
        ops.unpack_parts([good, good[:-1]], [2, 2], [span] * 2)
    for wrong in (torch.zeros_like(good), torch.full_like(good, 255)):
        with pytest.raises(ValueError, match="packed must hold 2 positions from worker 1, got another number"):
            ops.unpack_parts([good, wrong, good], [2] * 3, [span] * 3)


def _samples(name: str) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    x = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.25])
    indices = torch.tensor([0, 3])
    return {
        "select_above": [((x, 1.0, 0, 5), {}), ((x.double(), 1.0, 1, 4), {})],
        "accumulate_select_": [
            ((x.clone(), x, 1.0, 0, 5), {}),
            ((x.clone(), x.half(), 1.0, 1, 3), {}),
            ((x.clone(), x, 1.0, 0, 5), {"backup": torch.zeros(5), "finite": torch.tensor(True)}),
        ],
        "log_histogram": [((x, 0, 5), {})],
        "drift_select": [
            ((x, [x + 1], 0.5, 0, 5), {"second": [x.abs()]}),
            (
                (x, [x[:2].bfloat16(), x[2:].bfloat16()], 0.5, 1, 4),
                {"second": [], "counts": torch.zeros(ops.BINS, dtype=torch.int64)},
            ),
        ],
        "gather_pieces": [(([x[:2].clone(), x[2:].clone()], indices), {}), (([x.half()], indices), {})],
        "scatter_pieces_": [
            (([x[:2].clone(), x[2:].clone()], indices, torch.ones(2)), {}),
            (([x.half()], indices, torch.ones(2)), {}),
        ],
        "all_finite": [((x,), {})],
        "gather_clear_": [((x.clone(), indices), {})],
        "scatter_update_": [
            ((x.clone(), indices, torch.ones(2)), {}),
            ((x.bfloat16(), indices, torch.ones(2)), {}),
        ],
        "pack_sorted": [((indices, 0, 5), {})],
        "unpack_sorted": [((ops.pack_sorted(indices, 0, 5), 2, 0, 5), {})],
    }[name]


@pytest.mark.parametrize("name", ops.schema.SCHEMAS)
def test_opcheck(name: str) -> None:
    op = getattr(torch.ops.gradsieve, name).default
    for args, kwargs in _samples(name):
        torch.library.opcheck(op, args, kwargs)


def test_default_kernel_is_the_plain_one_elsewhere() -> None:
    """The dispatcher has a kernel for devices without one of their own."""
    for name in ops.schema.SCHEMAS:
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"gradsieve::{name}", "CUDA")
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"gradsieve::{name}", "CPU")
