"""Predictions of `gradsieve plan` against measured steps, between hosts with limited links (Linux, root).

    python benchmarks/plan.py --minutes 8       measures cells that benchmarks/data/plan.csv does not have yet
    python benchmarks/plan.py --again           predicts again, from what was measured

Each cell is a number of hosts, a rate and a model size. Its processes first measure what a plan needs: the link
between them, how busy processors are, what kernels cost, and a step that exchanges nothing ("compute alone"). Then
they train with each method. Predictions see only the former, and `overlap` of the run itself.
"""

import argparse
import csv
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradsieve import plan
from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve.plan import probe
from gradsieve.plan.links import Link
from gradsieve.plan.ways import Way
from gradsieve.plan.ways_of import Job, ways_of
from gradsieve.share import ShareSieve
from gradsieve.worlds import ProcessGroupWorld
from gradsieve_lab.bench.cases import ALONE, LATE, PLAIN, SHARE, Case, make_case
from gradsieve_lab.bench.timing import spread, write_rows
from gradsieve_lab.conditions import conditions
from gradsieve_lab.launch import Post, run_workers
from gradsieve_lab.netlab.network import network
from gradsieve_lab.netlab.rates import parse_links, parse_rate

OUT = Path(__file__).parent / "data" / "plan.csv"
HOSTS, RATES, WIDTHS = (8, 4, 2), ("20mbit", "100mbit", "1gbit"), (1024, 512, 170)
DENSITIES = (0.01,)
LAYERS = 10
GRADIENTS, FP16, POWERSGD = "shared_threshold", "fp16 hook", "PowerSGD rank 4"
# How a case of the bench is called in a plan.
WAYS = {
    (PLAIN, 1.0): "plain DDP",
    (FP16, 1.0): "fp16 hook",
    (POWERSGD, 1.0): "PowerSGD rank 4",
    **{(GRADIENTS, density): f"gradients {density:g}" for density in DENSITIES},
    **{(SHARE, density): f"weights {density:g}" for density in DENSITIES},
    **{(LATE, density): f"weights {density:g} delay=1" for density in DENSITIES},
}
WARM_UP = 12  # steps, where a threshold must be found
LONG_S, FEW = 3.0, 2  # steps that take longer than this are warmed up once and timed twice
VERY_LONG_S = 10.0  # where a full gradient takes longer, only plain DDP is measured of those that send it, and once
ENOUGH_S, LEAST, MOST = 1.5, 4, 15  # others as often as fits into this time, within limits
STREAK = 8  # steps in a row with delay=1, whose last exchange is waited for


Found = tuple[dict[str, list[float]], list[float], Link, list[Way], dict[str, float]]


@dataclass(frozen=True)
class Row:
    """One method in one cell."""

    hosts: int
    links: str
    n: int
    way: str
    measured_ms: float
    low: float
    high: float
    predicted_ms: float
    compute_ms: float  # measured: a step that exchanges nothing
    local_ms: float  # timed: what the method computes, as busy as processors are
    bandwidth_mbit: float  # measured between the hosts
    latency_ms: float
    message_ms: float
    wake_ms: float
    overlap: float  # workers that picked a position, on average
    commit: str = ""
    torch: str = ""
    machine: str = ""
    date: str = ""

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def times(case: Case) -> list[float]:
    """Milliseconds of steps, all workers at once; those of the slowest are what counts."""
    late = isinstance(case.sieve, ShareSieve) and bool(case.sieve.driver.delay)
    first = torch.tensor(_ms(case, 1))
    dist.all_reduce(first, dist.ReduceOp.MAX)
    slow = float(first) > LONG_S * 1e3
    for _ in range(0 if slow else (WARM_UP if case.sieve is not None else 2)):
        case.step()
    if case.name == POWERSGD and slow:
        case.step()  # the first two send everything
    if late:
        return [_ms(case, STREAK) for _ in range(FEW)]
    few = 1 if float(first) > VERY_LONG_S * 1e3 else FEW
    again = torch.tensor(few if slow else min(max(round(ENOUGH_S * 1e3 / _ms(case, 1)), LEAST), MOST))
    dist.all_reduce(again, dist.ReduceOp.MIN)
    return [_ms(case, 1) for _ in range(int(again))]


def _ms(case: Case, steps: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        case.step()
    if isinstance(case.sieve, ShareSieve):
        case.sieve.driver.wait()
    return (time.perf_counter() - started) / steps * 1e3


def work(post: Post, width: int, rate: str) -> Found:
    """What one worker measured: each method's steps, those of computing alone, the link, ways and overlaps."""
    world = ProcessGroupWorld()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    device = next(model.parameters()).device
    link = probe.measure_link(world, device)
    alone = times(make_case(ALONE, post.rank, 1.0, width))
    found, overlap = {}, {}
    very_long = dense_seconds(post.workers, rate, LAYERS * (width * width + width)) > VERY_LONG_S
    for name, density in WAYS:
        if very_long and name in (FP16, POWERSGD):
            continue
        case = make_case(name, post.rank, density, width)
        found[WAYS[name, density]] = times(case)
        if name == GRADIENTS and case.sieve is not None and case.sieve.report is not None:
            overlap[WAYS[name, density]] = max(1.0, case.sieve.report.selected / case.sieve.report.union)
        if isinstance(case.sieve, ShareSieve):
            case.sieve.close()
        del case
        gc.collect()
    ways = plan(model, link=link, step_ms=statistics.median(alone), densities=DENSITIES, every=[1]).ways
    return found, alone, link, list(ways), overlap


def cell(hosts: int, rate: str, n: int) -> list[Row]:
    width = width_of(n)
    with network(parse_links(rate, hosts)) as made:
        results = run_workers(work, hosts, width, rate, places=made.places(hosts))
    link: Link = results[0][2]
    compute = spread(_slowest([result[1] for result in results]))[0]
    rows, where = [], conditions()
    for index, way in enumerate(results[0][3]):
        if way.name not in results[0][0]:
            continue
        taken = spread(_slowest([result[0][way.name] for result in results]))
        local = statistics.fmean(result[3][index].local for result in results)
        row = Row(
            hosts,
            rate,
            n,
            way.name,
            *taken,
            0.0,
            compute,
            local * 1e3,
            link.bits / 1e6,
            link.latency * 1e3,
            link.message * 1e3,
            link.wake * 1e3,
            results[0][4].get(way.name, 1.0),
            **{name: where[name] for name in ("commit", "torch", "machine", "date")},
        )
        rows.append(row)
    return again(rows)


def width_of(n: int) -> int:
    return round((n / LAYERS) ** 0.5 - 0.5)


def _slowest(parts: list[list[float]]) -> list[float]:
    return [max(each) for each in zip(*parts, strict=True)]


def again(rows: list[Row]) -> list[Row]:
    """The rows with the predictions of today's model."""
    found = []
    for row in rows:
        side = width_of(row.n)
        model = nn.Sequential(*(nn.Linear(side, side, device="meta") for _ in range(LAYERS)))
        link = Link(row.bandwidth_mbit * 1e6 / 8, row.latency_ms / 1e3, row.message_ms / 1e3, row.wake_ms / 1e3)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        job = Known(row.n, shapes, row.hosts, row.compute_ms / 1e3, local=row.local_ms / 1e3)
        ways = {way.name: way for way in ways_of(job, densities=DENSITIES, every=[1], overlap=row.overlap)}
        found.append(replace(row, predicted_ms=ways[row.way].step(link) * 1e3))
    return found


@dataclass(frozen=True)
class Known(Job):
    """A job whose costs were timed before."""

    local: float = 0.0

    def cost(self, timed: Callable[[], float]) -> float:
        return self.local


def read() -> list[Row]:
    if not OUT.exists():
        return []
    with OUT.open() as file:
        return [
            Row(**{each.name: each.type(row[each.name]) for each in fields(Row)}) for row in csv.DictReader(file)
        ]  # type: ignore[operator]


def write(rows: list[Row]) -> None:
    write_rows([asdict(row) for row in rows], OUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no cell that would not end within so many"
    )
    parser.add_argument("--again", action="store_true", help="predict again, measure nothing")
    given = parser.parse_args()
    rows = read()
    if given.again:
        write(again(rows))
        return
    deadline = time.monotonic() + 60 * given.minutes
    cells = (
        (hosts, rate, LAYERS * (width * width + width)) for width, rate, hosts in product(WIDTHS, RATES, HOSTS)
    )
    for hosts, rate, n in sorted(cells, key=lambda each: expected(*each)):
        known = any((row.hosts, row.links, row.n) == (hosts, rate, n) for row in rows)
        if known or time.monotonic() + expected(hosts, rate, n) > deadline:
            continue
        started = time.monotonic()
        fresh = cell(hosts, rate, n)
        rows += fresh
        write(rows)
        worst = max(abs(row.error) for row in fresh)
        taken = time.monotonic() - started
        sys.stdout.write(f"{hosts} hosts, {rate}, {n:,} parameters: {taken:.0f} s, worst error {worst:.0%}\n")
        sys.stdout.flush()


def expected(hosts: int, rate: str, n: int) -> float:
    """Seconds that a cell takes, about."""
    dense = dense_seconds(hosts, rate, n)
    times = 2 if dense > VERY_LONG_S else 7 if dense > LONG_S else 12
    return times * dense + 12 + hosts * (2 + 4 * n / 1e7)


def dense_seconds(hosts: int, rate: str, n: int) -> float:
    """Of a full gradient on the wire."""
    return ring_all_reduce_bytes(4 * n, hosts) * 8 / parse_rate(rate)


if __name__ == "__main__":
    main()
