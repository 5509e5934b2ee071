"""The ways to train one model on one network, with the computing time and memory of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradsieve.density.base import elements
from gradsieve.plan import local
from gradsieve.plan.local import Shapes
from gradsieve.plan.traffic import sparse_step
from gradsieve.plan.ways import Buckets, Factors, Sieved, Way

DENSITIES = (0.001, 0.01, 0.1)
EVERY = (1, 8)
RANKS = (4,)  # of PowerSGD
GRADIENTS = ("shared_threshold", "exdyna")  # sparsifiers whose collectives are known beforehand
OVERLAP = 2.0  # average number of workers that pick the same position, if each may pick any
_PICK_BYTES, _ROUND_BYTES = 12, 20  # memory per selected element: its position, and one or three values


@dataclass(frozen=True)
class Job:
    """The model to train, the number of workers, and the speed of the machine."""

    n: int
    shapes: Shapes
    workers: int
    compute: float  # seconds per step
    contention: float = 1.0  # wall-clock seconds per CPU second
    crowding: float = 1.0  # slowdown of computing beside a second thread
    overhead: Mapping[str, float] = field(default_factory=dict)  # of a step, by kind of way

    def cost(self, timed: Callable[[], float]) -> float:
        """Wall-clock seconds of work, from its CPU seconds."""
        return self.contention * timed()


def ways_of(
    job: Job,
    sparsifier: str = GRADIENTS[0],
    densities: Sequence[float] = DENSITIES,
    every: Sequence[int] = EVERY,
    ranks: Sequence[int] = RANKS,
    values: str = "fp32",
    overlap: float = OVERLAP,
) -> list[Way]:
    """All ways to compare, plain DDP first."""
    found = _usual(job, ranks)
    for density in densities:
        found.append(_gradients(job, sparsifier, density, values, overlap))
    for density in densities:
        found += _weights(job, density, every, values)
    return [replace(way, overhead=job.overhead.get(way.kind, 0.0)) for way in found]


def _usual(job: Job, ranks: Sequence[int]) -> list[Way]:
    n, shapes, common, crowding = job.n, job.shapes, (job.workers, job.compute), job.crowding
    found: list[Way] = [
        Buckets("plain DDP", *common, job.cost(lambda: local.dense(n)), 0, crowding, n, 4),
        Buckets("fp16 hook", *common, job.cost(lambda: local.half(n)), 2 * n, crowding, n, 2),
    ]
    for rank in ranks:
        spent = job.cost(lambda rank=rank: local.power(shapes, rank))  # type: ignore[misc]
        found.append(Factors(f"PowerSGD rank {rank}", *common, spent, 8 * n, crowding, shapes, rank))
    return found


def _gradients(job: Job, sparsifier: str, density: float, values: str, overlap: float) -> Way:
    picked = None if sparsifier == "exdyna" else overlap
    calls = sparse_step(job.n, density, job.workers, overlap=picked, values=values)
    spent = job.cost(lambda: local.gradients(job.n, sparsifier, density, values, min(overlap, job.workers)))
    memory = 4 * job.n + _PICK_BYTES * elements(density, job.n)
    common = (job.workers, job.compute, spent, memory, job.crowding)
    return Sieved("gradients", *common, calls, density, values=values)


def _weights(job: Job, density: float, every: Sequence[int], values: str) -> list[Way]:
    calls = sparse_step(job.n, density, job.workers, values=values)
    spent = job.cost(lambda: local.weights(job.n, density, values, job.workers))
    memory = 4 * job.n + _ROUND_BYTES * elements(density, job.n)
    common = (job.workers, job.compute, spent, memory, job.crowding)
    return [Sieved("weights", *common, calls, density, often, delay, values) for often in every for delay in (0, 1)]
