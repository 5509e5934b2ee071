"""A training step over real gloo processes on loopback: ours beside plain DDP and torch's own hooks."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.bench.memory import process_status
from gradsieve.bench.timing import Row, spread
from gradsieve.ddp import sparsify
from gradsieve.launch import Post, run_workers
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.worlds.virtual import VirtualWorld

LAYERS, WIDTH, BATCH = 10, 1024, 32
N = LAYERS * (WIDTH * WIDTH + WIDTH)
WARM_UP = 12  # steps that do not count
PLAIN = "plain DDP"
GOALS = {2: 1.0, 4: 0.9}  # times plain DDP, by number of processes
CASES = (PLAIN, "fp16 hook", "PowerSGD rank 1", "topk", "cltk", "micro", "exdyna", "compute alone")


def bench_step(workers: int, density: float, repeats: int, cases: tuple[str, ...] = CASES) -> list[Row]:
    """One row a case, of the slowest worker; all cases take turns in the same processes."""
    times = run_workers(_times, workers, density, repeats, cases)
    slowest = {case: [max(parts) for parts in zip(*(t[case] for t in times), strict=True)] for case in cases}
    rows = {case: Row("step", case, N, density, workers, *spread(slowest[case]), "ms") for case in cases}
    goals = {"exdyna": GOALS.get(workers)}
    return [row.with_ratio(rows[PLAIN], at_most=goals.get(case)) for case, row in rows.items()]


def bench_memory(workers: int, density: float) -> Row:
    """What the hook adds to the peak of a process, in copies of the model: each case in processes of its own."""
    plain, ours = (max(run_workers(_peak, workers, density, case)) for case in (PLAIN, "exdyna"))
    extra = (ours - plain) / (4 * N)
    row = Row("memory", "exdyna beyond plain DDP", N, density, workers, extra, extra, extra, "models")
    model = Row("memory", "one float32 model", N, density, workers, 1.0, 1.0, 1.0, "models")
    return row.with_ratio(model, at_most=1.1)


def _times(post: Post, density: float, repeats: int, cases: tuple[str, ...]) -> dict[str, list[float]]:
    steps = {case: _make(case, post.rank, density) for case in cases}
    times: dict[str, list[float]] = {case: [] for case in cases}
    for round_ in range(WARM_UP + repeats):
        for case, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            if round_ >= WARM_UP:
                times[case].append((time.perf_counter() - started) * 1e3)
    return times


def _peak(post: Post, density: float, case: str) -> int:
    """The peak of a process that trains, beyond what it held before; kernels are compiled first in any case."""
    reducer = SparseReducer(make_sparsifier("exdyna"), 0.01, rank=0, world_size=1)
    for _ in range(10):
        VirtualWorld(1).run([reducer.reduce(torch.randn(70_000))])
    before = process_status("VmRSS")
    step = _make(case, post.rank, density)
    for _ in range(WARM_UP):
        step()
    return process_status("VmHWM") - before


def _make(case: str, rank: int, density: float) -> Callable[[], None]:
    """A model of its own for each case, and the function that trains it by a step."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers)
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    if case != "compute alone":
        # torch's PowerSGD hangs on gloo when there are several buckets.
        model = ddp = DistributedDataParallel(model, bucket_cap_mb=1000 if case.startswith("PowerSGD") else None)
        if case == "fp16 hook":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif case.startswith("PowerSGD"):
            state = powerSGD_hook.PowerSGDState(None, int(case.split()[-1]), start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif case != PLAIN:
            sparsify(ddp, case, density=density)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step
