"""A training step over real gloo processes on loopback: ours beside plain DDP and torch's own hooks."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.bench.timing import Row, spread
from gradsieve.ddp import sparsify

LAYERS, WIDTH, BATCH = 10, 1024, 32
PLAIN = "plain DDP"
GOALS = {2: 1.0, 4: 0.9}  # times plain DDP, by number of processes
CASES = (PLAIN, "fp16 hook", "PowerSGD rank 1", "topk", "cltk", "micro", "exdyna", "compute alone")


def bench_step(workers: int, density: float, repeats: int, cases: tuple[str, ...] = CASES) -> list[Row]:
    """One row a case, of the slowest worker; all cases take turns in the same processes."""
    n = LAYERS * (WIDTH * WIDTH + WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        arguments = (workers, folder, density, repeats, cases, results)
        processes = [context.Process(target=_work, args=(rank, *arguments), daemon=True) for rank in range(workers)]
        for process in processes:
            process.start()
        try:
            times = [_next(results, processes) for _ in processes]
        finally:
            for process in processes:
                process.join(30)
                if process.is_alive():
                    process.kill()
    slowest = {case: [max(parts) for parts in zip(*(t[case] for t in times), strict=True)] for case in cases}
    rows = {case: Row("step", case, n, density, workers, *spread(slowest[case]), "ms") for case in cases}
    plain = rows[PLAIN]
    return [
        row.with_ratio(plain, at_most=GOALS.get(workers) if case == "exdyna" else None)
        for case, row in rows.items()
    ]


def _next(results: Any, processes: list[Any]) -> dict[str, list[float]]:
    """The next worker's times; raises if one died without any."""
    while results.empty():
        if any(process.exitcode not in (None, 0) for process in processes):
            raise RuntimeError("a worker of the benchmark died; its traceback is above")
        time.sleep(0.05)
    times: dict[str, list[float]] = results.get()
    return times


def _work(
    rank: int, workers: int, folder: str, density: float, repeats: int, cases: tuple[str, ...], results: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=120),
    )
    steps = {case: _make(case, rank, density) for case in cases}
    times: dict[str, list[float]] = {case: [] for case in cases}
    warm_up = 12
    for round_ in range(warm_up + repeats):
        for case, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            if round_ >= warm_up:
                times[case].append((time.perf_counter() - started) * 1e3)
    results.put(times)
    dist.barrier()
    dist.destroy_process_group()


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
