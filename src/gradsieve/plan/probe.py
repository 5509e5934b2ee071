"""Measurements for a plan, taken where training will run: the links between ranks, and the computing time."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve.comm.collectives import all_to_all
from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve.plan.links import Link
from gradsieve.worlds import ProcessGroupWorld

REPEATS = 15  # repetitions; the median is used
_SIDE, _PRODUCTS = 256, 3  # of the matrix products between two collectives, about a millisecond of work
LONG_S = 0.25  # seconds that an all-reduce must take to show the bandwidth
FIRST, LARGEST = 1 << 16, 1 << 26  # bytes of all-reduces, each four times the one before
SUMS = 2  # repetitions of the long all-reduce
STEPS, WARM_UP = 5, 2  # training steps
BUSY_S = 0.3  # seconds of work that show whether the CPU is shared


def measure_link(world: ProcessGroupWorld, device: torch.device) -> Link:
    """Measure the link between the ranks of a world; every rank must call it, and all get the same result."""
    backend = "nccl" if "nccl" in str(dist.get_backend(world.group)) else "gloo"
    if world.size == 1:
        return Link(1e12, 0.0, 0.0, 0.0, backend)
    rows = torch.zeros(world.size, 1, dtype=torch.uint8, device=device)
    one, small, matrix = [1] * world.size, torch.zeros(1, device=device), torch.ones(_SIDE, _SIDE, device=device)

    def after_work(collective: Callable[[], object], times: int) -> float:
        """Seconds of some work followed by `times` collectives."""

        def once() -> None:
            for _ in range(_PRODUCTS):
                matrix @ matrix
            for _ in range(times):
                collective()

        return _seconds(world, device, once, REPEATS)

    def exchange() -> object:
        return world.run([all_to_all("probe", rows, one, world.rank, one)])

    def ring() -> object:
        return dist.all_reduce(small, group=world.group)

    work, first, fourth = after_work(exchange, 0), after_work(exchange, 1), after_work(exchange, 4)
    again = max(0.0, fourth - first) / 3
    ring_again = max(0.0, after_work(ring, 4) - after_work(ring, 1)) / 3
    hop = min(ring_again / (2 * (world.size - 1)), again)
    message = (again - hop) / (world.size - 2) if world.size > 2 else 0.0
    wake = max(0.0, first - work - again)
    size, taken, work = _long_sum(world, device)
    sent = ring_all_reduce_bytes(size, world.size)
    bandwidth = sent / max(taken - wake - ring_again, 1e-9)
    halves = torch.zeros(size // 2, dtype=torch.float16, device=device)
    longer = _seconds(world, device, lambda: dist.all_reduce(halves, group=world.group), SUMS) - taken
    half = max(0.0, longer) / len(halves)
    return Link(bandwidth, max(0.0, hop - message), message, wake, backend, work / sent, half)


def _long_sum(world: ProcessGroupWorld, device: torch.device) -> tuple[int, float, float]:
    """Bytes of an all-reduce long enough to show the bandwidth, its seconds, and its CPU seconds."""
    size = FIRST
    while True:
        x = torch.zeros(size // 4, device=device)
        taken = _seconds(world, device, lambda x=x: dist.all_reduce(x, group=world.group), 1)  # type: ignore[misc]
        if taken >= LONG_S or size >= LARGEST:
            break
        size *= 4
    before = time.process_time()
    again = _seconds(world, device, lambda: dist.all_reduce(x, group=world.group), SUMS)
    return size, min(taken, again), mean((time.process_time() - before) / SUMS, world, device)


def _seconds(world: ProcessGroupWorld, device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """The median over repetitions of the slowest rank's time; the same on all ranks."""
    found = []
    for _ in range(repeats):
        dist.barrier(group=world.group)
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world.group)
    return float(slowest.median())


def measure_step(model: nn.Module, loss: Callable[[], Tensor]) -> float:
    """Seconds of a forward pass, a backward pass and an SGD step with lr = 0, in this process alone."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)
    found = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        _wait(model)
        found.append(time.perf_counter() - started)
    return statistics.median(found[WARM_UP:])


def _wait(model: nn.Module) -> None:
    if any(parameter.device.type == "cuda" for parameter in model.parameters()):
        torch.cuda.synchronize()


def contention(world: ProcessGroupWorld, device: torch.device) -> tuple[float, float]:
    """Wall-clock time over CPU time of some work, 1 on an idle machine; and the factor by which it grows while a
    second thread of each worker computes. Every rank must call it.

    Ranks that share a machine work at the same time, so the result includes their effect on each other.
    """
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for threads in (1, 2):
        dist.barrier(group=world.group)
        with ThreadPoolExecutor(threads) as pool:
            found.append(statistics.fmean(pool.map(lambda _: _slowdown(), range(threads))))
    torch.set_num_threads(before)
    one, two = (mean(each, world, device) for each in found)
    return max(1.0, one), min(max(1.0, two / max(1.0, one)), 2.0)  # at worst, two threads share one core


def _slowdown() -> float:
    """Wall-clock time over CPU time of `BUSY_S` seconds of work."""
    x = torch.ones(1 << 16)
    started, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < BUSY_S:
        x.mul_(1.0)
    return (time.perf_counter() - started) / max(time.thread_time() - used, 1e-9)


def mean(value: float, world: ProcessGroupWorld, device: torch.device) -> float:
    """The mean over all ranks."""
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=world.group)
    return float(total) / world.size
