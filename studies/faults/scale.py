"""Scale and soak tests: many virtual workers, many processes, and hours of steps; they show what grows.

Run it:  python -m studies.faults.scale [--soak SECONDS] [--processes P]
"""

import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve import VirtualWorld, sparsify, virtual_reducers
from gradsieve_lab.launch import Post, run_workers

N, STEPS = 20_000, 5
COMPARE = 50  # steps between comparisons of replicas


def virtual(workers: int, sparsifier: str) -> dict[str, Any]:
    """Measure seconds per step of all virtual workers, and their collectives."""
    world, reducers = VirtualWorld(workers), virtual_reducers(sparsifier, 0.01, world_size=workers)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(N, generator=generator) for _ in range(workers)]
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        programs = [reducer.reduce(grad, out=grad.clone()) for reducer, grad in zip(reducers, grads, strict=True)]
        world.run(programs)
        seconds.append(time.perf_counter() - started)
    report = reducers[0].report
    assert report is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {
        "workers": workers,
        "sparsifier": sparsifier,
        "collectives": report.collectives,
        "peak MB": round(peak),
    }
    return {**facts, "s per step": round(sorted(seconds)[STEPS // 2], 3), "bytes": round(report.ring_bytes)}


def _worker(post: Post, limit: float, pause: float) -> dict[str, Any]:
    """Train until time is up; replicas are compared every 50 steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)))
    sieve = sparsify(model, "exdyna", density=0.05, check_every=COMPARE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + post.rank)  # data of its own
    started, steps, seen = time.monotonic(), 0, []
    over = torch.zeros(1)
    while not over:
        for _ in range(COMPARE):
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            time.sleep(pause)
        steps += COMPARE
        kilobytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
        seen.append((time.monotonic() - started, kilobytes, len(os.listdir("/proc/self/fd"))))
        over[0] = float(time.monotonic() - started > limit)
        dist.all_reduce(over)
    report = sieve.report
    assert report is not None
    late = seen[len(seen) // 3 :]  # caches fill at first
    hours = [at / 3600 for at, _, _ in late]
    return {
        "steps": steps,
        "comparisons": steps // COMPARE,
        "ms per step": round(1000 * seen[-1][0] / steps, 2),
        "collectives": report.collectives,
        "kB": {"first": seen[0][1], "after a third": late[0][1], "last": late[-1][1]},
        "kB per hour": round(_slope(hours, [kilobytes for _, kilobytes, _ in late]), 1),
        "open files": [seen[0][2], late[0][2], late[-1][2]],
        "open files per hour": round(_slope(hours, [files for _, _, files in late]), 3),
    }


def _slope(at: list[float], values: list[int]) -> float:
    """Slope of the least-squares line; 0 for a single value."""
    return statistics.linear_regression(at, values).slope if len(set(at)) > 1 else 0.0


def measure(
    soak: Annotated[float, typer.Option(help="Seconds of the soak with 4 processes; 0: none.")] = 0.0,
    processes: Annotated[int, typer.Option(help="Real processes on loopback for 10 seconds; 0: none.")] = 0,
    pause: Annotated[float, typer.Option(help="Seconds of sleep after each step of real processes.")] = 0.0,
    workers: Annotated[str, typer.Option(help="Virtual worlds, by size; empty: none.")] = "64,256,1024",
) -> None:
    """Print what grows with the number of ranks and with time."""
    found: dict[str, Any] = {}
    sizes = [int(size) for size in workers.split(",") if size]
    found["virtual"] = [virtual(size, name) for name in ("exdyna", "topk") for size in sizes]
    if processes:
        found["processes"] = {
            "workers": processes,
            "pause": pause,
            "worker 0": run_workers(_worker, processes, 10.0, pause)[0],
        }
    if soak:
        found["soak"] = {"seconds": soak, "pause": pause, "workers": run_workers(_worker, 4, soak, pause)}
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(measure)
