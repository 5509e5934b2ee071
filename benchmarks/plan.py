"""Predictions of `gradsieve plan` against measured steps, between hosts with limited links (Linux, root).

    python benchmarks/plan.py --minutes 25      measures cells that benchmarks/data/plan.csv does not have yet
    python benchmarks/plan.py --fresh           forgets what the file has, and measures all
    python benchmarks/plan.py --list            says how long each missing cell takes, and all of them
    python benchmarks/plan.py --again           predicts again, from what was measured

Each cell is a number of hosts, a rate and a model size. Its processes hold one model for each method, and one that
exchanges nothing ("compute alone"). In every round each of them trains for a moment, one after the other, so that
whatever else the machine does disturbs all of them; medians over rounds count. What a plan needs is measured in
the same processes: the link between them, how busy processors are, what kernels cost. Predictions see only that,
computing alone, and `overlap` of the run itself.
"""

import argparse
import csv
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
from gradsieve.plan.links import Link
from gradsieve.plan.ways import Way
from gradsieve.plan.ways_of import Job, ways_of
from gradsieve.share import ShareSieve
from gradsieve_lab.bench.cases import ALONE, LATE, PLAIN, SHARE, Case, make_case
from gradsieve_lab.bench.timing import spread, write_rows
from gradsieve_lab.conditions import conditions
from gradsieve_lab.launch import Post, run_workers
from gradsieve_lab.netlab.network import network
from gradsieve_lab.netlab.rates import parse_links, parse_rate

OUT = Path(__file__).parent / "data" / "plan.csv"
HOSTS, RATES, WIDTHS = (8, 4, 2), ("20mbit", "100mbit", "1gbit"), (1024, 512, 170)
DENSITY = 0.01
LAYERS = 10
GRADIENT_WAY = f"gradients {DENSITY:g}"
GRADIENTS, FP16, POWERSGD = "shared_threshold", "fp16 hook", "PowerSGD rank 4"
# How a case of the bench is called in a plan.
WAYS = {
    (PLAIN, 1.0): "plain DDP",
    (FP16, 1.0): "fp16 hook",
    (POWERSGD, 1.0): "PowerSGD rank 4",
    (GRADIENTS, DENSITY): GRADIENT_WAY,
    (SHARE, DENSITY): f"weights {DENSITY:g}",
    (LATE, DENSITY): f"weights {DENSITY:g} delay=1",
}
WARM_UP, FEW = 12, 2  # untimed steps, where a threshold must be found, and elsewhere
LONG_S, VERY_LONG_S = 1.5, 10.0  # steps that take longer are not warmed up; timed in two rounds, or in one
TURN_S, MOST_STEPS = 0.2, 8  # a turn of a method: so many seconds of steps in a row, but not more than this
ROUNDS_S, LEAST, MOST = 10.0, 3, 12  # rounds go on for so long, within limits


Found = tuple[dict[str, list[float]], Link, list[Way], dict[str, float]]


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
    work_ns: float  # of a processor, for a byte
    half_ns: float  # to sum a float16, beyond two bytes of float32
    crowding: float  # times longer that computing takes beside a second thread
    overhead_ms: float  # measured with a tiny model, beyond or below what is predicted for that
    overlap: float  # workers that picked a position, on average
    commit: str = ""
    torch: str = ""
    machine: str = ""
    date: str = ""

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


class Turns:
    """One method's turns on one worker; all workers make them at the same time."""

    def __init__(self, case: Case) -> None:
        self._case, self.ms = case, list[float]()
        self._late = isinstance(case.sieve, ShareSieve) and bool(case.sieve.driver.delay)
        self.overlap = 1.0
        self._step_s = _slowest_of(self._seconds(1))
        long = case.sieve is None and self._step_s > LONG_S
        self._rounds = MOST if not long else 1 if self._step_s > VERY_LONG_S else 2
        if not long:
            self._step_s = _slowest_of(self._seconds(WARM_UP if case.sieve is not None else FEW))
        self._before = 0 if long else 1  # steps before those that are timed: an exchange beside them is under way
        self._steps = min(max(round(TURN_S / self._step_s), 3 if self._late else 1), MOST_STEPS)

    def take(self) -> None:
        """Train for a moment, unless enough is known."""
        if len(self.ms) == self._rounds:
            return
        if self._before:
            self._seconds(self._before, wait=False)
        self.ms.append(self._seconds(self._steps) * 1e3)

    def _seconds(self, steps: int, *, wait: bool = True) -> float:
        """Per step; with delay=1 the last exchange would go on beside the next step, and is waited for untimed."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self._case.step()
        taken = (time.perf_counter() - started) / steps
        if wait and isinstance(self._case.sieve, ShareSieve):
            self._case.sieve.driver.wait()
        return taken

    def end(self) -> None:
        sieve = self._case.sieve
        if self._case.name == GRADIENTS and sieve is not None and sieve.report is not None:
            self.overlap = max(1.0, sieve.report.selected / sieve.report.union)
        if isinstance(sieve, ShareSieve):
            sieve.close()


def _slowest_of(seconds: float) -> float:
    """The same on all workers, which then do the same."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def work(post: Post, width: int, seconds: float) -> Found:
    """What one worker measured: each method's steps, the link, ways and overlaps."""
    turns = {"": Turns(make_case(ALONE, post.rank, 1.0, width))}
    turns |= {way: Turns(make_case(name, post.rank, density, width)) for (name, density), way in WAYS.items()}
    started = time.perf_counter()
    for round_ in range(MOST):
        for each in turns.values():
            each.take()
        if round_ + 1 >= LEAST and _slowest_of(time.perf_counter() - started) > seconds:
            break
    for each in turns.values():
        each.end()
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(LAYERS)))
    alone = _slowest_of(statistics.median(turns[""].ms))
    planned = plan(model, step_ms=alone, densities=[DENSITY], every=[1], overlap=turns[GRADIENT_WAY].overlap)
    return (
        {way: each.ms for way, each in turns.items()},
        planned.link,
        list(planned.ways),
        {way: each.overlap for way, each in turns.items()},
    )


def cell(hosts: int, rate: str, n: int, seconds: float) -> list[Row]:
    with network(parse_links(rate, hosts)) as made:
        results = run_workers(work, hosts, width_of(n), seconds, places=made.places(hosts))
    link, compute = results[0][1], spread(_slowest([result[0][""] for result in results]))[0]
    rows, where = [], conditions()
    for index, way in enumerate(results[0][2]):
        row = Row(
            hosts,
            rate,
            n,
            way.name,
            *spread(_slowest([result[0][way.name] for result in results])),
            0.0,
            compute,
            statistics.fmean(result[2][index].local for result in results) * 1e3,
            link.bits / 1e6,
            link.latency * 1e3,
            link.message * 1e3,
            link.wake * 1e3,
            link.work * 1e9,
            link.half * 1e9,
            way.crowding,
            way.overhead * 1e3,
            results[0][3][way.name],
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
        times = (row.latency_ms / 1e3, row.message_ms / 1e3, row.wake_ms / 1e3)
        link = Link(row.bandwidth_mbit * 1e6 / 8, *times, work=row.work_ns / 1e9, half=row.half_ns / 1e9)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        job = Known(row.n, shapes, row.hosts, row.compute_ms / 1e3, crowding=row.crowding, local=row.local_ms / 1e3)
        ways = {way.name: way for way in ways_of(job, densities=[DENSITY], every=[1], overlap=row.overlap)}
        way = replace(ways[row.way], overhead=row.overhead_ms / 1e3)
        found.append(replace(row, predicted_ms=way.step(link) * 1e3))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no cell that would not end within so many"
    )
    parser.add_argument("--seconds", type=float, default=ROUNDS_S, help="of rounds in a cell")
    parser.add_argument("--fresh", action="store_true", help="measure cells again that the file has")
    parser.add_argument(
        "--list", action="store_true", help="show the cells that would be measured, and their times"
    )
    parser.add_argument("--again", action="store_true", help="predict again, measure nothing")
    given = parser.parse_args()
    rows = [] if given.fresh else read()
    if given.again:
        write(again(rows))
        return
    known = {(row.hosts, row.links, row.n) for row in rows}
    cells = [
        (hosts, rate, LAYERS * (width * width + width)) for hosts, rate, width in product(HOSTS, RATES, WIDTHS)
    ]
    left = sorted((each for each in cells if each not in known), key=lambda each: expected(*each, given.seconds))
    if given.list:
        for each in left:
            say(*each, f"about {expected(*each, given.seconds):.0f} s")
        sys.stdout.write(f"all: {sum(expected(*each, given.seconds) for each in left) / 60:.0f} minutes\n")
        return
    begun = time.monotonic()
    hoped = 0.0  # seconds, for the cells so far
    for each in left:
        started = time.monotonic()
        pace = max(1.0, (started - begun) / hoped) if hoped else 1.0  # a busy machine is slower
        if started - begun + pace * expected(*each, given.seconds) > 60 * given.minutes:
            break  # all others take longer
        hoped += expected(*each, given.seconds)
        fresh = cell(*each, given.seconds)
        rows += fresh
        write(rows)
        worst = max(abs(row.error) for row in fresh)
        say(*each, f"{time.monotonic() - started:.0f} s, worst error {worst:.0%}")


def say(hosts: int, rate: str, n: int, words: str) -> None:
    sys.stdout.write(f"{hosts} hosts, {rate}, {n:,} parameters: {words}\n")
    sys.stdout.flush()


def expected(hosts: int, rate: str, n: int, seconds: float) -> float:
    """Seconds that a cell takes, about: what goes before the rounds, and the rounds."""
    dense = ring_all_reduce_bytes(4 * n, hosts) * 8 / parse_rate(rate)
    compute = hosts * n / 2.5e8  # of a step on two cores
    before = 6 + hosts * 2 + 150 * compute
    full = sum((2 if step > VERY_LONG_S else 3) * step if step > LONG_S else 0.0 for step in (dense, dense / 2))
    return before + full + max(seconds, LEAST * (3 * min(dense, LONG_S) + 30 * compute))


if __name__ == "__main__":
    main()
