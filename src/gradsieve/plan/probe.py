"""What a plan is made from, measured where training will run: the links between ranks, and the computing."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve.comm.collectives import all_to_all
from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve.plan.links import Link
from gradsieve.worlds import ProcessGroupWorld

REPEATS = 15  # of which the median counts
_SIDE, _PRODUCTS = 256, 3  # matrix products between two collectives, a millisecond or so of work
LONG_S = 0.25  # seconds of an all-reduce from which the bandwidth can be read
FIRST, LARGEST = 1 << 16, 1 << 26  # bytes of all-reduces, each four times the one before
STEPS, WARM_UP = 5, 2  # of training
BUSY_S = 0.15  # seconds of processor time that show whether it is shared


def measure_link(world: ProcessGroupWorld, device: torch.device) -> Link:
    """Bandwidth and latency between the ranks of a world; every rank must call it, and all get the same."""
    backend = "nccl" if "nccl" in str(dist.get_backend(world.group)) else "gloo"
    if world.size == 1:
        return Link(1e12, 0.0, 0.0, 0.0, backend)
    rows = torch.zeros(world.size, 1, dtype=torch.uint8, device=device)
    one, small, matrix = [1] * world.size, torch.zeros(1, device=device), torch.ones(_SIDE, _SIDE, device=device)

    def after_work(collective: Callable[[], object], times: int) -> float:
        """Seconds of some work and then so many collectives."""

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
    bandwidth = _bandwidth(world, device, wake + ring_again)
    return Link(bandwidth, max(0.0, hop - message), message, wake, backend)


def _bandwidth(world: ProcessGroupWorld, device: torch.device, latency: float) -> float:
    size = FIRST
    while True:
        x = torch.zeros(size // 4, device=device)
        taken = _seconds(world, device, lambda x=x: dist.all_reduce(x, group=world.group), 1)  # type: ignore[misc]
        if taken >= LONG_S or size >= LARGEST:
            break
        size *= 4
    taken = min(taken, _seconds(world, device, lambda: dist.all_reduce(x, group=world.group), 2))
    return ring_all_reduce_bytes(size, world.size) / max(taken - latency, 1e-9)


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
    """Seconds of a forward and a backward pass and a step of SGD that changes nothing, on this process alone."""
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


def contention() -> float:
    """How many times longer work takes here than the processor needs for it: 1 where nobody else wants it.

    Ranks that share a machine call it at the same time, and so see what each other takes.
    """
    x = torch.ones(1 << 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wall, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < BUSY_S:
        x.mul_(1.0)
    taken, spent = time.perf_counter() - wall, time.thread_time() - used
    torch.set_num_threads(threads)
    return max(1.0, taken / spent)


def mean(value: float, world: ProcessGroupWorld, device: torch.device) -> float:
    """Over all ranks."""
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=world.group)
    return float(total) / world.size
