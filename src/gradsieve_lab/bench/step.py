"""The time of a training step with gloo processes: our methods, plain DDP and torch's own hooks."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gradsieve import ops
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.worlds.virtual import VirtualWorld
from gradsieve_lab.bench.cases import ALONE, CASES, OURS, PLAIN, SHARING, WARM_UP, N, make_case
from gradsieve_lab.bench.memory import process_status
from gradsieve_lab.bench.timing import Row, spread
from gradsieve_lab.launch import Place, Post, run_workers

LEAST = 3  # repetitions of a slow case
PATIENCE_S = 30.0  # seconds after which a case gets only that many


def bench_step(workers: int, density: float, repeats: int, cases: Sequence[str] = CASES) -> list[Row]:
    """One row per case, of the slowest worker, on loopback."""
    rows = step_rows("step", workers, density, repeats, cases)
    return [row.with_ratio(rows[PLAIN]) for row in rows.values()]


def step_rows(
    benchmark: str,
    workers: int,
    density: float,
    repeats: int,
    cases: Sequence[str],
    *,
    places: Sequence[Place] | None = None,
    links: str = "",
    told: Callable[[str], None] | None = None,
) -> dict[str, Row]:
    """One row per case, by its name; all cases take turns in the same processes."""
    times = run_workers(_times, workers, density, repeats, tuple(cases), places=places, listen=told)
    slowest = {case: [max(parts) for parts in zip(*(t[case] for t in times), strict=True)] for case in cases}
    return {
        case: Row(benchmark, case, N, density, workers, *spread(slowest[case]), "ms", links=links) for case in cases
    }


def bench_memory(workers: int, density: float, case: str = OURS) -> Row:
    """Peak memory that a case adds, in copies of the model; each case runs in separate processes."""
    base = ALONE if case in SHARING else PLAIN
    plain, ours = (max(run_workers(_peak, workers, density, each)) for each in (base, case))
    extra = (ours - plain) / (4 * N)
    row = Row("memory", f"{case} beyond {base}", N, density, workers, extra, extra, extra, "models")
    model = Row("memory", "one float32 model", N, density, workers, 1.0, 1.0, 1.0, "models")
    return row.with_ratio(model)


def _times(post: Post, density: float, repeats: int, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Milliseconds of each case's steps. A case that takes too long ends early, on all workers at once."""
    cases = [make_case(name, post.rank, density) for name in names]
    times: dict[str, list[float]] = {name: [] for name in names}
    done = dict.fromkeys(names, 0)
    spent = dict.fromkeys(names, 0.0)
    while cases:
        for case in list(cases):
            dist.barrier()
            before = time.perf_counter()
            steps = case.turn()
            took = (time.perf_counter() - before) / steps
            done[case.name] += 1
            if done[case.name] > case.warm_up:
                times[case.name].append(took * 1e3)
            slowest = torch.tensor([took])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            spent[case.name] += float(slowest) * steps
            measured = len(times[case.name])
            if measured >= repeats or (measured >= LEAST and spent[case.name] > PATIENCE_S):
                cases.remove(case)
        if post.rank == 0:
            post.tell(f"round {max(done.values())}, {len(cases)} cases left")
    return times


def _peak(post: Post, density: float, name: str) -> int:
    """Peak memory of training, beyond what the process used before; kernels are compiled first."""
    reducer = SparseReducer(make_sparsifier("exdyna"), 0.01, rank=0, world_size=1)
    for _ in range(10):
        VirtualWorld(1).run([reducer.reduce(torch.randn(70_000))])
    ops.warm_up()
    before = process_status("VmRSS")
    case = make_case(name, post.rank, density)
    for _ in range(WARM_UP):
        case.step()
    return process_status("VmHWM") - before
