"""The kernels for GPUs against the plain ones, in Triton's interpreter, over odd sizes, places, types and values.

Run by test_gpu_interpreted.py in a process of its own: TRITON_INTERPRET must be set before Triton is imported.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradsieve.ops import BINS, gpu_histogram, on_gpu, packed_bytes, reference
from gradsieve.ops.schema import SCHEMAS

assert os.environ.get("TRITON_INTERPRET") == "1"

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 63, 100, 1_000, 1_025, 4_096, 4_099, 9_000]  # a tile has 4096 elements
AWKWARD = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 1e-38, 3.4e38, 1.0, -1.0]
THRESHOLDS = [-1.0, 0.0, 0.1, 1.0, 1e39, math.inf, math.nan]
GARBAGE = {torch.float32: math.nan, torch.float64: math.nan, torch.float16: math.nan, torch.bfloat16: math.nan}
MARGIN = 5  # elements on both sides of a vector that no kernel may touch; so that it is not aligned, too


@pytest.fixture(autouse=True)
def _memory_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def dirty(*args: Any, **keywords: Any) -> Tensor:
        made = plain(*args, **keywords)
        return made.fill_(GARBAGE.get(made.dtype, 77))

    monkeypatch.setattr(torch, "empty", dirty)


@pytest.fixture(params=[True, False], ids=["bins in blocks", "bins in memory"])
def _bins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_histogram, "in_block", lambda: request.param)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def _in_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_histogram, "in_block", lambda: True)
        yield


# Each size with another type and another threshold; all with all in the slow turns.
TURNS = pytest.mark.parametrize("turn", [0, *(slow(turn) for turn in range(1, 4))])

# Types of pieces: one narrow, one of two widths, all together; and each alone in the slow turns.
KINDS = [[torch.bfloat16], DTYPES, *(slow([each]) for each in DTYPES[:3])]
KINDS_AND_BINS = [([torch.float32], True), ([torch.bfloat16], False), (DTYPES, True)]
KINDS_AND_BINS += [
    slow([each], bins) for each in DTYPES for bins in (True, False) if ([each], bins) not in KINDS_AND_BINS
]


def values(n: int, seed: int, dtype: torch.dtype = torch.float32, awkward: bool = True) -> Tensor:
    """Normal numbers, with awkward ones among them, in a vector that begins at an odd place."""
    chance = torch.Generator().manual_seed(1000 * seed + n)
    x = torch.randn(n + 2 * MARGIN, generator=chance)
    if awkward and n:
        where = torch.randint(n, (n // 7 + 1,), generator=chance) + MARGIN
        which = torch.randint(len(AWKWARD), where.shape, generator=chance)
        x[where] = torch.tensor(AWKWARD)[which]
    return x.to(dtype)[MARGIN : MARGIN + n]


def moved(x: Tensor) -> Tensor:
    """A copy at an odd place, too."""
    return torch.cat([x.new_ones(MARGIN), x, x.new_ones(MARGIN)])[MARGIN : MARGIN + len(x)]


def cuts(n: int) -> list[tuple[int, int]]:
    return [(0, n), (n // 3, n // 2), (n, n), (min(n, 7), n)]


def same(found: Tensor, expected: Tensor) -> None:
    """To the last bit; but which of two NaNs an addition returns is the processor's business."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def run(op: str, *arguments: Any, **keywords: Any) -> Any:
    return on_gpu.kernel(op)(*arguments, **keywords)


@TURNS
def test_select_above(turn: int) -> None:
    for number, n in enumerate(SIZES):
        x = values(n, 0, DTYPES[(number + turn) % 4])
        for place in range(3):
            threshold, (start, stop) = THRESHOLDS[(3 * number + place) % 7], cuts(n)[(number + place) % 4]
            expected = reference.select_above(x, threshold, start, stop)
            same(run("select_above", x, threshold, start, stop), expected)
        same(run("select_above", x, threshold, start, stop, count=len(expected)), expected)


def test_select_above_with_a_wrong_count() -> None:
    """Nothing is written elsewhere, and what is missing is seen to be missing."""
    x = torch.ones(5_000)
    assert torch.equal(run("select_above", x, 1.0, 0, 5_000, count=4_500), torch.arange(4_500))
    more = run("select_above", x, 1.0, 10, 5_000, count=5_000)
    assert torch.equal(more[:4_990], torch.arange(10, 5_000))
    assert more[4_990:].tolist() == [-1] * 10


@settings(max_examples=10)
@given(threshold=st.floats(width=64), dtype=st.sampled_from(DTYPES))
def test_select_above_any_threshold(threshold: float, dtype: torch.dtype) -> None:
    """The elements next to a threshold, on both sides."""
    near = torch.tensor([threshold], dtype=torch.float64).to(dtype)
    ends = [near, -near, torch.nextafter(near, near * 2), torch.nextafter(near, near * 0)]
    x = torch.cat([*ends, torch.tensor(AWKWARD).to(dtype)])
    same(run("select_above", x, threshold, 0, len(x)), reference.select_above(x, threshold, 0, len(x)))


@TURNS
@pytest.mark.parametrize("keep", ["nothing", "elsewhere", "wider", "in the gradient"])
def test_accumulate_select(turn: int, keep: str) -> None:
    for number, n in enumerate(SIZES):
        dtype = DTYPES[(number + turn) % 4]
        if keep == "in the gradient" and dtype.itemsize < 4:
            dtype = DTYPES[number % 2]
        residual, grad = values(n, 1), values(n, 2, dtype)
        threshold, (start, stop) = THRESHOLDS[(number + turn) % 7], cuts(n)[(number + turn) % 4]

        def once(op: Any) -> list[Tensor]:
            r, g, finite = moved(residual), moved(grad), torch.tensor(True)  # noqa: B023
            wider = {"elsewhere": moved(r * 7), "wider": moved(r.double()), "in the gradient": g}
            backup = wider.get(keep)
            hits = op(r, g, threshold, start, stop, backup=backup, finite=finite)  # noqa: B023
            return [hits, r, g, finite, *([] if backup is None else [backup])]

        ours, theirs = once(on_gpu.kernel("accumulate_select_")), once(reference.accumulate_select_)
        for found, expected in zip(ours, theirs, strict=True):
            same(found, expected)


@pytest.mark.parametrize("place", [0, 4_095, 4_096, 4_999])
def test_accumulate_select_finite_flag_is_sticky(place: int) -> None:
    finite, grad = torch.tensor(True), torch.ones(5_000)
    run("accumulate_select_", torch.zeros(5_000), grad, 2.0, 0, 5_000, finite=finite)
    assert finite
    grad[place] = -math.inf
    run("accumulate_select_", torch.zeros(5_000), grad, 2.0, 0, 0, finite=finite)
    assert not finite
    run("accumulate_select_", torch.zeros(5_000), torch.ones(5_000), 2.0, 0, 5_000, finite=finite)
    assert not finite


def test_accumulate_select_touches_nothing_else() -> None:
    whole, margin = torch.full((4_200,), 7.0), 50
    run("accumulate_select_", whole[margin:-margin], torch.ones(4_100), 1.0, 0, 4_100, finite=torch.tensor(True))
    assert bool((whole[:margin] == 7).all())
    assert bool((whole[-margin:] == 7).all())
    assert bool((whole[margin:-margin] == 8).all())


@pytest.mark.usefixtures("_bins")
@TURNS
def test_log_histogram(turn: int) -> None:
    for number, n in enumerate(SIZES):
        x, (start, stop) = values(n, 3), cuts(n)[(number + turn) % 4]
        same(run("log_histogram", x, start, stop), reference.log_histogram(x, start, stop))


@TURNS
def test_all_finite(turn: int) -> None:
    for number, n in enumerate(SIZES):
        x = values(n, 4, DTYPES[(number + turn) % 4], awkward=False)
        assert bool(run("all_finite", x))
        for place, bad in {0: math.nan, n - 1: -math.inf, n // 2: math.inf}.items() if n else ():
            broken = moved(x)
            broken[place] = bad
            assert not run("all_finite", broken)
            assert not reference.all_finite(broken)


def pieces(x: Tensor, count: int, dtypes: list[torch.dtype]) -> list[Tensor]:
    """Uneven pieces, some empty, each in memory of its own; every second one begins at an odd place."""
    chance = torch.Generator().manual_seed(count)
    borders = torch.randint(len(x) + 1, (count - 1,), generator=chance).sort().values.tolist()
    parts = x.tensor_split(sorted([*borders, *borders[:1]]))
    types = [dtypes[number % len(dtypes)] for number in range(len(parts))]
    return [
        moved(part.to(each)) if number % 2 else part.clone().to(each)
        for number, (part, each) in enumerate(zip(parts, types, strict=True))
    ]


@TURNS
@pytest.mark.parametrize(("dtypes", "_bins"), [*KINDS_AND_BINS, slow(DTYPES, False)], indirect=["_bins"], ids=str)
@pytest.mark.usefixtures("_bins")
def test_drift_select(dtypes: list[torch.dtype], turn: int) -> None:
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    for number, n in enumerate((0, 1, 100, 1_025, 4_099, 4_096)):
        shared, x = values(n, 5, wide, awkward=False), values(n, 6)
        count = 6 if (number + turn) % 3 else 1
        weights, second = pieces(x, count, dtypes), []
        if (number + turn) % 2 == 0:  # not every parameter has second moments
            moments = pieces(values(n, 7, awkward=n == 100).abs(), count, DTYPES[:1])
            second = [each.new_empty(0) if i % 3 == 2 else each for i, each in enumerate(moments)]
        threshold, (start, stop) = (0.0, 1.0, math.nan, 2.0)[(number + turn) % 4], cuts(n)[number % 4]
        check_drift(shared, weights, threshold, start, stop, second)


def check_drift(
    shared: Tensor, weights: list[Tensor], threshold: float, start: int, stop: int, second: list[Tensor]
) -> None:
    found, expected = (torch.full((BINS,), 3) for _ in range(2))
    keywords = {"second": second}
    ours = run("drift_select", shared, weights, threshold, start, stop, **keywords, counts=found)
    theirs = reference.drift_select(shared, weights, threshold, start, stop, **keywords, counts=expected)
    assert int(ours[2]) == int(theirs[2])
    if not second:
        same(ours[0], theirs[0])
        same(ours[1], theirs[1])
        same(found, expected)
    else:  # torch's root on CPUs is not always the nearest float: an element may be one bin or one bar off
        assert len(set(ours[0].tolist()) ^ set(theirs[0].tolist())) <= 2
        if len(ours[0]) == len(theirs[0]):
            torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
        assert int((found.cumsum(0) - expected.cumsum(0)).abs().max()) <= 2
    again = run("drift_select", shared, weights, threshold, start, stop, **keywords, count=len(ours[0]))
    for left, right in zip(again, ours, strict=True):
        same(left, right)


@pytest.mark.usefixtures("_bins")
def test_drift_select_counts_only() -> None:
    shared, weights = torch.randn(5_000), [torch.zeros(2_000), torch.zeros(3_000)]
    weights[1][7] = math.inf
    found, expected = (torch.zeros(BINS, dtype=torch.int64) for _ in range(2))
    positions, drifts, bad = run("drift_select", shared, weights, 0.0, 10, 4_000, second=[], counts=found, count=0)
    reference.drift_select(shared, weights, 0.0, 10, 4_000, second=[], counts=expected)
    assert len(positions) == len(drifts) == 0
    assert int(bad) == 2_007
    same(found, expected)


@pytest.mark.usefixtures("_in_blocks")
@settings(max_examples=10)
@given(
    pairs=st.lists(st.tuples(st.floats(width=32), st.sampled_from([*AWKWARD, 0.5])), min_size=1, max_size=30),
    threshold=st.one_of(st.sampled_from(THRESHOLDS), st.floats(width=32)),
    dtype=st.sampled_from(DTYPES),
)
def test_drift_select_any_values(pairs: list[tuple[float, float]], threshold: float, dtype: torch.dtype) -> None:
    shared = torch.tensor([pair[0] for pair in pairs], dtype=torch.promote_types(dtype, torch.float32))
    weights = torch.tensor([pair[1] for pair in pairs], dtype=torch.float32).to(dtype)
    check_drift(shared, [weights], threshold, 0, len(shared), [])


def test_drift_select_follows_pieces_that_move() -> None:
    """Tables of addresses are kept: never those of other pieces."""
    shared = torch.zeros(9)
    for size in (4, 5, 4):
        for weight in (1.0, 2.0, 3.0):
            parts = [torch.full((size,), weight), torch.full((9 - size,), -weight)]
            found = run("drift_select", shared, parts, 0.5, 0, 9, second=[])[1]
            assert torch.equal(found, -torch.cat(parts))


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
def test_pieces(dtypes: list[torch.dtype]) -> None:
    for n, count in ((1, 1), (100, 2), (1_025, 33)):
        parts = pieces(values(n, 8), count, dtypes)
        for share in (0.0, 0.3, 1.0):
            chance = torch.Generator().manual_seed(n)
            positions = torch.where(torch.rand(n, generator=chance) < share)[0]
            found = run("gather_pieces", parts, positions)
            same(found, reference.gather_pieces(parts, positions))
            others, new = [moved(part) for part in parts], found * 1.0001 + 1e-3
            ours = [moved(part) for part in parts]
            run("scatter_pieces_", ours, positions, new)
            reference.scatter_pieces_(others, positions, new)
            for left, right in zip(ours, others, strict=True):
                same(left, right)


@TURNS
def test_gather_clear_and_scatter_update(turn: int) -> None:
    for number, n in enumerate((1, 63, 1_025, 2_100)):
        x = values(n, 9, DTYPES[(number + turn) % 4])
        half = torch.randperm(n, generator=torch.Generator().manual_seed(n))[: n // 2]
        for indices in (half[:0], half, torch.arange(n), torch.zeros(3, dtype=torch.int64)):
            ours, theirs = moved(x), moved(x)
            found = run("gather_clear_", ours, indices)
            same(found, reference.gather_clear_(theirs, indices))
            same(ours, theirs)
        for given_type in (torch.float32, torch.float64, x.dtype):
            out, expected, new = moved(x), moved(x), (x[half].double() * 1.0001).to(given_type)
            run("scatter_update_", out, half, new)
            reference.scatter_update_(expected, half, new)
            same(out, expected)


def test_scatter_update_skips_negative_indices() -> None:
    out = torch.full((6,), math.nan)
    run("scatter_update_", out[1:5], torch.tensor([-1, 2, -7, 0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert out[1:5].tolist() == [4.0, 0.0, 2.0, 0.0]
    assert out[[0, 5]].isnan().all()


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_indices_outside(index: int) -> None:
    """Positions come from other workers: a wrong one must never write into somebody's memory."""
    whole, indices = torch.ones(15), torch.tensor([0, index])
    with pytest.raises(RuntimeError, match=r"indices must be in \[0, 5\), got others"):
        run("gather_clear_", whole[5:10], indices)
    if index > 0:
        with pytest.raises(RuntimeError, match=r"indices must be in \[0, 5\), got others"):
            run("scatter_update_", whole[5:10], indices, torch.full((2,), 9.0))
    with pytest.raises(RuntimeError, match=r"indices must be in \[0, 5\), got others"):
        run("scatter_pieces_", [whole[5:7], whole[7:10]], indices, torch.full((2,), 9.0))
    with pytest.raises(RuntimeError, match=r"indices must be in \[0, 5\), got others"):
        run("gather_pieces", [whole[5:7], whole[7:10]], indices)
    assert bool((whole[:5] == 1).all())
    assert bool((whole[10:] == 1).all())


@settings(max_examples=15)
@given(places=st.sets(st.integers(0, 2**40), max_size=60), start=st.integers(0, 2**40), room=st.integers(1, 2**20))
def test_pack_and_unpack(places: set[int], start: int, room: int) -> None:
    indices = torch.tensor(sorted(places), dtype=torch.int64) + start
    check_packing(indices, start, start + max(places, default=0) + room)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.9, 1.0])
def test_pack_and_unpack_many(share: float) -> None:
    for n in (1, 63, 1_025, 9_000):
        chance = torch.Generator().manual_seed(n)
        indices = torch.where(torch.rand(n, generator=chance) < share)[0]
        check_packing(indices + 12, 12, 12 + n)


def check_packing(indices: Tensor, start: int, stop: int) -> None:
    packed = run("pack_sorted", indices, start, stop)
    same(packed, reference.pack_sorted(indices, start, stop))
    assert len(packed) == packed_bytes(len(indices), stop - start)
    received = moved(packed)  # not where words begin
    same(run("unpack_sorted", received, len(indices), start, stop), indices)


@pytest.mark.parametrize("byte", [0, 255])
def test_unpack_damaged(byte: int) -> None:
    for indices in (torch.tensor([1, 5]), torch.arange(3_000) * 3):
        stop = int(indices[-1]) + 5
        packed = torch.full_like(run("pack_sorted", indices, 0, stop), byte)
        with pytest.raises(RuntimeError, match=f"packed must hold {len(indices)} positions, got fewer or more"):
            run("unpack_sorted", packed, len(indices), 0, stop)


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += name in ("_local_scalar_dense", "nonzero", "unique", "masked_select")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_in_blocks")
@pytest.mark.parametrize("op", SCHEMAS)
def test_host_waits(op: str) -> None:
    """Where an output's size is only known on the device, for that one number; otherwise never."""
    x, indices, parts = torch.ones(5_000), torch.arange(0, 5_000, 3), [torch.ones(2_000), torch.ones(3_000)]
    counts = torch.zeros(BINS, dtype=torch.int64)
    calls: dict[str, list[Any]] = {
        "select_above": [x, 1.0, 0, 5_000],
        "accumulate_select_": [x, x.clone(), 1.0, 0, 5_000],
        "log_histogram": [x, 0, 5_000],
        "drift_select": [x, parts, 1.0, 0, 5_000],
        "gather_pieces": [parts, indices],
        "scatter_pieces_": [parts, indices, x[indices]],
        "all_finite": [x],
        "gather_clear_": [x, indices],
        "scatter_update_": [x, indices, x[indices]],
        "pack_sorted": [indices, 0, 5_000],
        "unpack_sorted": [reference.pack_sorted(indices, 0, 5_000), len(indices), 0, 5_000],
    }
    keywords: dict[str, Any] = {"second": [], "counts": counts} if op == "drift_select" else {}
    with Waits() as waits:
        run(op, *calls[op], **keywords)
    assert waits.count == (op in ("select_above", "accumulate_select_", "drift_select"))
    if op in ("select_above", "drift_select"):
        with Waits() as waits:
            run(op, *calls[op], **keywords, count=5_000)
        assert waits.count == 0


def test_launches_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            used.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Device)
    x = torch.tensor([1.0, -2.0])
    assert on_gpu._launcher("select_above")(x, 1.5, 0, 2).tolist() == [1]
    assert on_gpu._launcher("gather_pieces")([x], torch.tensor([1])).tolist() == [-2]
    assert on_gpu._launcher("gather_pieces")([], torch.empty(0, dtype=torch.int64)).tolist() == []
    assert used == [x.device] * 3
