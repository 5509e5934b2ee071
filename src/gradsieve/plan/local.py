"""Computing time of an exchange: the real code of each method, timed on this machine.

Sparsifiers run as virtual workers on random gradients, without a network. Vectors of up to `LARGEST` elements
(`WHOLE` for methods that make only a few passes) are timed directly; longer ones are extrapolated linearly from
two sizes. Times are CPU times of one thread, so that other programs hardly affect them.
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

LARGEST, WHOLE = 1 << 21, 1 << 24  # most elements that are timed directly, with and without a sparsifier
MOST_WORKERS = 16  # that are timed together
WARM_UP = WITHOUT_CUT + 4  # steps before a sparsifier knows its threshold
REPEATS = 7  # timed steps; the median is used
_CACHES = 1 << 24  # elements that no processor's caches hold
MIN_COMPRESSION = 2  # PowerSGD's `min_compression_rate`
MATRIX = 1024  # rows and columns of the assumed matrices of a model of which only the size is known
Shapes = Sequence[Sequence[int]]


def at_size(n: int, timed: Callable[[int], float], largest: int = LARGEST) -> float:
    """Seconds for n elements: `timed(n)`, or extrapolated from two smaller sizes."""
    if n <= largest:
        return timed(n)
    small, large = timed(largest // 4), timed(largest)
    each = max(0.0, large - small) / (largest - largest // 4)
    return large + each * (n - largest)


def gradients(n: int, sparsifier: str, density: float, values: str, overlap: float) -> float:
    """Computing seconds per step and worker of `sparsify`: accumulate, select, merge picks, update, write.

    A step is timed with as many workers as pick the same position, on the same gradient: so each receives as many
    picks as in training.
    """
    training, workers = _Training(n), min(max(round(overlap), 2), MOST_WORKERS)
    return at_size(n, lambda size: _gradients(size, sparsifier, density, values, workers, training))


def _gradients(n: int, sparsifier: str, density: float, values: str, workers: int, training: "_Training") -> float:
    reducers = virtual_reducers(sparsifier, density, world_size=workers, measure=False, values=values)
    source, world = _RandomGradients(n, 0), VirtualWorld(workers)

    def step() -> float:
        grads = [source()]
        grads += [grads[0].clone() for _ in range(workers - 1)]
        programs = [reducer.reduce(grad, out=grad) for reducer, grad in zip(reducers, grads, strict=True)]
        training.compute()
        return _spent(lambda: world.run(programs)) / workers

    return _median(step, WARM_UP)


def weights(n: int, density: float, values: str, workers: int) -> float:
    """Computing seconds per round and worker of `share`, which searches its own part of the vector."""

    training = _Training(n)

    def timed(size: int) -> float:
        two, four = (_weights(size, density, values, number, training) for number in (2, 4))
        whole = max(0.0, two - four) * 4  # to search the whole vector
        return max(four - whole * (1 / 4 - 1 / workers), four / 4) if workers > 1 else two

    return at_size(n, timed)


def _weights(n: int, density: float, values: str, workers: int, training: "_Training") -> float:
    sources = [_RandomGradients(n, rank) for rank in range(workers)]
    held = [torch.zeros(n) for _ in sources]
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
        for weight, source in zip(held, sources, strict=True):
            weight.add_(source(), alpha=1e-3)
        training.compute()
        return _spent(round_) / workers

    return _median(step, WARM_UP)


def dense(n: int) -> float:
    """Seconds that plain DDP takes besides sending: to divide the gradient by the number of workers."""
    return at_size(n, lambda size: _timed(torch.ones(size).div_, size, 1.0), WHOLE)


def half(n: int) -> float:
    """Seconds to round a gradient to float16, divide it, and widen the sum."""

    def timed(size: int) -> float:
        x = torch.ones(size)
        return _timed(lambda: x.copy_(x.to(torch.float16).div_(2)), size)

    return at_size(n, timed, WHOLE)


def power(shapes: Shapes, rank: int) -> float:
    """Seconds of PowerSGD's error feedback, orthogonalisation and products, for all tensors of a model.

    In a model with more than `WHOLE` elements, only the first tensors are timed; the others scale by size.
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
    """The computations of torch's `powerSGD_hook` with its defaults, without the all-reduces."""
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
    """The shape of the matrix that PowerSGD sends as two factors; None for a parameter it does not compress."""
    matrix = matrix_of(shape)
    if matrix is None or MIN_COMPRESSION * sum(matrix) * rank >= math.prod(matrix):
        return None
    return matrix


def matrix_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """The matrix shape that PowerSGD gives a parameter; None for a vector."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    return shape[0], math.prod(shape[1:])


def shapes_of(n: int) -> Shapes:
    """Square matrices of n elements in total, for a model of which only the size is known."""
    whole, left = divmod(n, MATRIX * MATRIX)
    return [[MATRIX, MATRIX]] * whole + ([[-(-left // MATRIX), min(left, MATRIX)]] if left else [])


class _RandomGradients:
    """A random vector, rotated by a random offset in every step: cheaper than drawing a new one."""

    def __init__(self, n: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._base = torch.randn(n, generator=self._generator)

    def __call__(self) -> Tensor:
        shift = int(torch.randint(len(self._base), (1,), generator=self._generator))
        return self._base.roll(shift)


class _Training:
    """What a model of n parameters does between two exchanges: other memory fills the caches."""

    def __init__(self, n: int) -> None:
        self._activations = torch.empty(min(3 * n, _CACHES))

    def compute(self) -> None:
        self._activations.fill_(1.0)


def _timed(work: Callable[..., object], n: int, *arguments: object) -> float:
    """Seconds of work on n elements after other memory was used in between, as in training."""
    training = _Training(n)

    def step() -> float:
        training.compute()
        return _spent(lambda: work(*arguments))

    return _median(step, 1)


def _median(step: Callable[[], float], warm_up: int) -> float:
    return statistics.median([step() for _ in range(warm_up + REPEATS)][warm_up:])


def _spent(work: Callable[[], object]) -> float:
    """CPU seconds on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.thread_time()
        work()
        return time.thread_time() - started
    finally:
        torch.set_num_threads(threads)
