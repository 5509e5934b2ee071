"""What a step costs beside communication: the real code of each method, timed on this machine.

Sparsifiers run as virtual workers on random gradients, without a network. Vectors of up to `LARGEST` elements are
timed as they are, `WHOLE` where only a few passes over them are made; longer ones are extrapolated along a line
from two sizes. Times are those of the processor, one thread, so that other programs disturb them little.
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

LARGEST, WHOLE = 1 << 19, 1 << 24  # elements that are timed, with a sparsifier and without one
WARM_UP = WITHOUT_CUT + 4  # steps before a sparsifier knows its threshold
REPEATS = 5  # timed steps, of which the median counts
MIN_COMPRESSION = 2  # PowerSGD's `min_compression_rate`
MATRIX = 1024  # rows and columns of the matrices that a model is taken to have where only its size is known
Shapes = Sequence[Sequence[int]]


def at_size(n: int, timed: Callable[[int], float], largest: int = LARGEST) -> float:
    """Seconds at n elements, from `timed` at n, or from two smaller sizes."""
    if n <= largest:
        return timed(n)
    small, large = timed(largest // 4), timed(largest)
    each = max(0.0, large - small) / (largest - largest // 4)
    return large + each * (n - largest)


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
    return at_size(n, lambda size: _timed(torch.ones(size).div_, size, 1.0), WHOLE)


def half(n: int) -> float:
    """Seconds to round a gradient to float16, divide it, and widen the sum."""

    def timed(size: int) -> float:
        x = torch.ones(size)
        return _timed(lambda: x.copy_(x.to(torch.float16).div_(2)), size)

    return at_size(n, timed, WHOLE)


def power(shapes: Shapes, rank: int) -> float:
    """Seconds of PowerSGD's error feedback, orthogonalisation and products, for all tensors of a model.

    Of a model with more than `WHOLE` elements its first tensors are timed; others take as long per element.
    """
    taken: list[Sequence[int]] = []
    n = sum(map(math.prod, shapes))
    for shape in shapes:
        taken.append(shape)
        if sum(map(math.prod, taken)) >= WHOLE:
            break
    timed = sum(map(math.prod, taken))
    return _power(taken, rank) * n / timed if timed else 0.0


def _power(shapes: Shapes, rank: int) -> float:
    """As torch's `powerSGD_hook` with its defaults, between the all-reduces."""
    sizes = [math.prod(shape) for shape in shapes]
    grad = torch.randn(sum(sizes))
    error = torch.zeros_like(grad)
    factors = []
    for piece, shape in zip(grad.split(sizes), shapes, strict=True):
        if (matrix := compressed(shape, rank)) is not None:
            factors.append((piece.view(matrix), *(torch.randn(side, rank) for side in matrix)))

    def step() -> None:
        nonlocal error
        grad.add_(error)
        before = grad.clone()
        for _, _, q in factors:
            q.copy_(torch.linalg.qr(q).Q)
        for matrix, p, q in factors:
            torch.mm(matrix, q, out=p)
        for _, p, _ in factors:
            p.copy_(torch.linalg.qr(p).Q)
        for matrix, p, q in factors:
            torch.mm(matrix.t(), p, out=q)
        for matrix, p, q in factors:
            torch.mm(p, q.t(), out=matrix)
        error = before - grad

    return _timed(step, len(grad))


def compressed(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """The matrix that PowerSGD sends as two factors; None for a parameter that it sends as it is."""
    matrix = matrix_of(shape)
    if matrix is None or MIN_COMPRESSION * sum(matrix) * rank >= math.prod(matrix):
        return None
    return matrix


def matrix_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """The matrix that PowerSGD sees in a parameter; None for a vector."""
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


def _timed(work: Callable[..., object], n: int, *arguments: object) -> float:
    """Seconds of work on n elements, when other memory was used since the last time, as training does."""
    other = torch.empty(3 * n)

    def step() -> float:
        other.fill_(1.0)
        return _spent(lambda: work(*arguments))

    return _median(step, 1)


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
