"""Speed of kernels relative to passes over memory: one thread, all cases of a group in one run."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.worlds.virtual import VirtualWorld
from gradsieve_lab.bench.memory import peak_extra_fraction
from gradsieve_lab.bench.timing import Row, side_by_side, spread

DENSITIES = (0.001, 0.01, 0.1)
MEASURED_AT = 0.001  # density of most measurements
WORKERS = (1, 2, 4, 8, 16)


def bench_kernels(n: int, repeats: int, progress: Callable[[str, int, int], None]) -> list[Row]:
    """Measure all rows; `progress(what, done, total)` is called along the way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(n, generator=torch.Generator().manual_seed(0))
        rows: list[Row] = []
        groups: list[tuple[str, Callable[[], list[Row]]]] = [
            *((f"kernels, density {d:g}", lambda d=d: _kernels(x, d, repeats)) for d in DENSITIES),
            *((f"step, density {d:g}", lambda d=d: _step(x, d, repeats)) for d in DENSITIES),
            ("selection against workers", lambda: _selection(x, repeats)),
            ("memory of a step", lambda: [_memory(n)]),
        ]
        for done, (what, group) in enumerate(groups):
            progress(what, done, len(groups))
            rows += group()
        progress("done", len(groups), len(groups))
        return rows
    finally:
        torch.set_num_threads(threads)


def threshold_for(x: Tensor, density: float) -> float:
    """The magnitude that a fraction `density` of x exceeds."""
    return float(x.abs().kthvalue(len(x) - max(1, round(density * len(x))) + 1).values)


def _rows(
    benchmark: str, times: dict[str, list[float]], n: int, density: float, workers: int = 1
) -> dict[str, Row]:
    return {
        case: Row(benchmark, case, n, density, workers, *spread(values), "ms") for case, values in times.items()
    }


def _kernels(x: Tensor, density: float, repeats: int) -> list[Row]:
    n, threshold = len(x), threshold_for(x, density)
    residual, grad, out = torch.zeros_like(x), x.clone(), torch.zeros_like(x)
    picked = ops.select_above(x, threshold)
    values = x[picked]
    cases: dict[str, Callable[[], object]] = {
        "x.sum()": lambda: x.sum(),
        "torch.where(|x| >= t)": lambda: torch.where(x.abs() >= threshold),
        "torch.topk(|x|, k)": lambda: torch.topk(x.abs(), len(picked), sorted=False),
        "select_above": lambda: ops.select_above(x, threshold),
        "log_histogram": lambda: ops.log_histogram(x),
        "all_finite": lambda: ops.all_finite(x),
        "gather_clear_": lambda: ops.gather_clear_(out, picked),
        "scatter_update_": lambda: ops.scatter_update_(out, picked, values),
    }
    if density != MEASURED_AT:
        del cases["torch.topk(|x|, k)"]
    rows = _rows("kernels", side_by_side(cases, repeats), n, density)
    adding: dict[str, Callable[[], object]] = {
        "residual.add_(grad)": lambda: residual.add_(grad),
        "accumulate_select_": lambda: ops.accumulate_select_(residual, grad, threshold),
    }
    adds = _rows("kernels", side_by_side(adding, repeats, prepare=residual.zero_), n, density)
    read, add = rows["x.sum()"], adds["residual.add_(grad)"]
    return [row.with_ratio(read) for row in rows.values()] + [row.with_ratio(add) for row in adds.values()]


def _step(x: Tensor, density: float, repeats: int) -> list[Row]:
    """A whole ExDyna step in a world of one worker; the update replaces the gradient."""
    n, grad, residual = len(x), x.clone(), torch.zeros_like(x)
    places = torch.Generator().manual_seed(0)
    world = VirtualWorld(1)
    reducer = SparseReducer(make_sparsifier("exdyna"), density, rank=0, world_size=1, measure=False)

    def step() -> None:
        world.run([reducer.reduce(grad, out=grad)])

    def next_gradient() -> None:
        """Another gradient of the same distribution, cheaper than drawing one: x, rotated by a random offset."""
        offset = int(torch.randint(n, (1,), generator=places))
        grad[: n - offset], grad[n - offset :] = x[offset:], x[:offset]

    for _ in range(40):  # residuals grow fastest in the first steps
        next_gradient()
        step()
    cases: dict[str, Callable[[], object]] = {
        "residual.add_(grad)": lambda: residual.add_(grad),
        "exdyna step": step,
    }
    times = side_by_side(cases, repeats, prepare=next_gradient)
    rows = _rows("step", times, len(x), density)
    add = rows["residual.add_(grad)"]
    return [row.with_ratio(add) for row in rows.values()]


def _selection(x: Tensor, repeats: int) -> list[Row]:
    """The selection time of one of P workers, which searches 1/P of the vector; Top-k searches all of it."""
    n, threshold = len(x), threshold_for(x, MEASURED_AT)
    cases = {str(p): (lambda p=p: ops.select_above(x, threshold, 0, n // p)) for p in WORKERS}
    times = side_by_side(cases, repeats)
    rows = [
        Row("selection", "one worker's selection", n, MEASURED_AT, p, *spread(times[str(p)]), "ms") for p in WORKERS
    ]
    return [row.with_ratio(rows[0]) for row in rows]


def _memory(n: int) -> Row:
    extra = peak_extra_fraction(n, MEASURED_AT)
    row = Row("memory", "extra memory of a step", n, MEASURED_AT, 1, extra, extra, extra, "of n floats")
    unit = Row("memory", "n floats", n, MEASURED_AT, 1, 1.0, 1.0, 1.0, "of n floats")
    return row.with_ratio(unit)
