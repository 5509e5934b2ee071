"""What a step costs beside communication: the real code of each method, timed on this machine.

Sparsifiers run as virtual workers on random gradients, without a network. Vectors of up to `LARGEST` elements are
timed as they are; longer ones are extrapolated along a line from two sizes. Times are those of the processor, one
thread, so that other programs on the machine disturb them little.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsieve.density import as_density
from gradsieve.share.replica import Replica
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.sparsifiers.exdyna.threshold import WITHOUT_CUT
from gradsieve.virtual import virtual_reducers
from gradsieve.worlds.virtual import VirtualWorld

LARGEST = 1 << 19  # elements that are timed; more do not fit into caches, either
WARM_UP = WITHOUT_CUT + 4  # steps before a sparsifier knows its threshold
REPEATS = 5  # timed steps, of which the median counts
MATRIX = 1024  # rows and columns of the matrices that a model is taken to have where only its size is known
Shapes = Sequence[Sequence[int]]


def at_size(n: int, timed: Callable[[int], float]) -> float:
    """Seconds at n elements, from `timed` at n, or from two smaller sizes."""
    if n <= LARGEST:
        return timed(n)
    small, large = timed(LARGEST // 4), timed(LARGEST)
    each = max(0.0, large - small) / (LARGEST - LARGEST // 4)
    return large + each * (n - LARGEST)


def gradients(n: int, sparsifier: str, density: float, values: str) -> float:
    """Seconds that one worker of `sparsify` computes in a step: accumulate, select, update, write."""
    return at_size(n, lambda size: _gradients(size, sparsifier, density, values))


def _gradients(n: int, sparsifier: str, density: float, values: str) -> float:
    reducers = virtual_reducers(sparsifier, density, world_size=2, measure=False, values=values)
    turns, world = [_Turns(n, rank) for rank in range(2)], VirtualWorld(2)

    def step() -> float:
        grads = [turn() for turn in turns]
        programs = [reducer.reduce(grad, out=grad) for reducer, grad in zip(reducers, grads, strict=True)]
        return _spent(lambda: world.run(programs)) / 2

    return _median(step, WARM_UP)


def weights(n: int, density: float, values: str, workers: int) -> float:
    """Seconds that one worker of `share` computes in a round: it looks at its own part, one n-th of `workers`."""

    def timed(size: int) -> float:
        two, four = (_weights(size, density, values, number) for number in (2, 4))
        whole = max(0.0, two - four) * 4  # a look at all of the vector
        return max(four - whole * (1 / 4 - 1 / workers), four / 4) if workers > 1 else two

    return at_size(n, timed)


def _weights(n: int, density: float, values: str, workers: int) -> float:
    turns = [_Turns(n, rank) for rank in range(workers)]
    held = [torch.zeros(n) for _ in turns]
    replicas = [
        Replica(
            {"weights": weight},
            make_sparsifier("exdyna"),
            as_density(density),
            rank=rank,
            world_size=workers,
            values=values,
        )
        for rank, weight in enumerate(held)
    ]
    world = VirtualWorld(workers)

    def round_() -> None:
        made = world.run([replica.round() for replica in replicas])
        for replica, outcome in zip(replicas, made, strict=True):
            replica.apply_(outcome)

    def step() -> float:
        for weight, turn in zip(held, turns, strict=True):
            weight.add_(turn(), alpha=1e-3)
        return _spent(round_) / workers

    return _median(step, WARM_UP)


def dense(n: int) -> float:
    """Seconds for what plain DDP does with a gradient besides sending it: divide by the number of workers."""
    return at_size(n, lambda size: _timed(torch.ones(size).div_, 1.0))


def half(n: int) -> float:
    """Seconds to round a gradient to float16, divide it, and widen the sum."""

    def timed(size: int) -> float:
        x = torch.ones(size)
        return _timed(lambda: x.copy_(x.to(torch.float16).div_(2)))

    return at_size(n, timed)


def power(shapes: Shapes, rank: int) -> float:
    """Seconds of PowerSGD's own products, orthogonalisation and error feedback, for all matrices of a model."""
    spent = 0.0
    known: dict[tuple[int, int], float] = {}
    for shape in map(matrix_of, shapes):
        if shape is not None:
            if shape not in known:
                known[shape] = at_size(shape[0] * shape[1], lambda size, s=shape: _power(size, s, rank))  # type: ignore[misc]
            spent += known[shape]
    return spent


def _power(size: int, shape: tuple[int, int], rank: int) -> float:
    rows = min(shape[0], math.isqrt(size * shape[0] // shape[1]) or 1)
    grad = torch.ones(rows, max(1, size // rows))
    error, q = torch.zeros_like(grad), torch.randn(grad.shape[1], rank)

    def step() -> None:
        grad.add_(error)
        error.copy_(grad)
        p = torch.linalg.qr(grad @ q).Q
        torch.matmul(p, (grad.t() @ p).t(), out=grad)
        error.sub_(grad)

    return _timed(step)


def matrix_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """The matrix that PowerSGD sees in a parameter; None for one that it sends as it is."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    return shape[0], math.prod(shape[1:])


def shapes_of(n: int) -> Shapes:
    """Square matrices of together n elements, for a model of which only the size is known."""
    whole, rest = divmod(n, MATRIX * MATRIX)
    return [[MATRIX, MATRIX]] * whole + ([[-(-rest // MATRIX), min(rest, MATRIX)]] if rest else [])


class _Turns:
    """One random vector, turned by another way in every step: as random, but cheaper to make."""

    def __init__(self, n: int, seed: int) -> None:
        self._chance = torch.Generator().manual_seed(seed)
        self._base = torch.randn(n, generator=self._chance)

    def __call__(self) -> Tensor:
        shift = int(torch.randint(len(self._base), (1,), generator=self._chance))
        return self._base.roll(shift)


def _timed(work: Callable[..., object], *arguments: object) -> float:
    return _median(lambda: _spent(lambda: work(*arguments)), 1)


def _median(step: Callable[[], float], warm_up: int) -> float:
    return statistics.median([step() for _ in range(warm_up + REPEATS)][warm_up:])


def _spent(work: Callable[[], object]) -> float:
    """Seconds of one processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.thread_time()
        work()
        return time.thread_time() - started
    finally:
        torch.set_num_threads(threads)
