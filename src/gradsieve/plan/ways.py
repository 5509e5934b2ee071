"""The ways to train that a plan compares: the step time on a link, the traffic and the memory of each."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gradsieve.comm.collectives import Collective
from gradsieve.comm.traffic import Traffic, ring_all_reduce_bytes
from gradsieve.plan import traffic
from gradsieve.plan.links import Link
from gradsieve.plan.local import Shapes, compressed

FORWARD = 1 / 3  # of the computing time: a backward pass has about twice the operations
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of DDP's float32 buckets


@dataclass(frozen=True)
class Way(ABC):
    """One way to train.

    family: the method; density, every and delay are the arguments of `sparsify` and `share`.
    compute: seconds per step without communication.
    local: computing seconds of an exchange.
    memory: bytes beyond the model, its gradient and the optimizer's state.
    crowding: slowdown of computing while a second thread of each worker computes: 1 if it has its own core, 2 if
        both share one.
    overhead: seconds per step that were measured with a tiny model beyond its predicted ones, or below them.
    """

    family: str
    workers: int
    compute: float
    local: float
    memory: float
    crowding: float
    overhead: float = field(default=0.0, kw_only=True)

    @property
    def name(self) -> str:
        return self.family

    @property
    def kind(self) -> str:
        """The ways whose overhead is the same."""
        return self.family

    @property
    def call(self) -> str:
        """The line of code to use it; empty for torch's own ways."""
        return ""

    @property
    def sends(self) -> float:
        """The fraction of the model that is exchanged per step: quality grows with it."""
        return 1.0

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """Average traffic per step."""

    @abstractmethod
    def step(self, link: Link) -> float:
        """Average seconds per step."""

    def held_up(self, beside: float, computing: float) -> float:
        """Extra seconds of computing, if an exchange keeps a core busy for `beside` seconds meanwhile."""
        return (self.crowding - 1) * min(beside, computing)


@dataclass(frozen=True)
class Buckets(Way):
    """DDP's own all-reduces, bucket by bucket, during the backward pass; `width` bytes are sent per element."""

    n: int
    width: int

    @functools.cached_property
    def buckets(self) -> list[int]:
        """Elements of each bucket."""
        first, whole = FIRST_BUCKET // 4, BUCKET // 4
        left = max(0, self.n - first)
        return [size for size in (min(first, self.n), *[whole] * (left // whole), left % whole) if size]

    @property
    def traffic(self) -> Traffic:
        sent = sum(ring_all_reduce_bytes(size * self.width, self.workers) for size in self.buckets)
        return Traffic(len(self.buckets), self.n * self.width, sent)

    def step(self, link: Link) -> float:
        backward = (1 - FORWARD) * self.compute
        backward += self.held_up(link.work * self.traffic.ring_bytes, backward)
        ready = [FORWARD * self.compute + backward * done / self.n for done in accumulate(self.buckets)]
        summed = link.half * self.n if self.width == 2 and self.workers > 1 else 0.0
        sizes = [size * self.width for size in self.buckets]
        return max(self.compute, link.all_reduce(sizes, self.workers, ready) + summed + self.local + self.overhead)


@dataclass(frozen=True)
class Factors(Way):
    """PowerSGD: two thin factors per matrix, all else uncompressed, in three all-reduces one after another."""

    shapes: Shapes
    rank: int

    @property
    def kind(self) -> str:
        return "PowerSGD"

    @functools.cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of uncompressed parameters, of the left factors and of the right factors."""
        plain = left = right = 0
        for shape in self.shapes:
            matrix = compressed(shape, self.rank)
            if matrix is None:
                plain += math.prod(shape)
            else:
                left, right = left + matrix[0] * self.rank, right + matrix[1] * self.rank
        return 4 * plain, 4 * left, 4 * right

    @property
    def sends(self) -> float:
        return sum(self._sizes) / (4 * sum(map(math.prod, self.shapes)))

    @property
    def traffic(self) -> Traffic:
        sent = sum(ring_all_reduce_bytes(size, self.workers) for size in self._sizes)
        return Traffic(sum(map(bool, self._sizes)), sum(self._sizes), sent)

    def step(self, link: Link) -> float:
        summed = sum(link.all_reduce([size], self.workers) for size in self._sizes if size)
        return self.compute + max(0.0, self.local + summed + self.overhead)


@dataclass(frozen=True)
class Sieved(Way):
    """`sparsify` or `share`: an exchange of few elements, once every `every` steps."""

    calls: Sequence[Collective]
    density: float
    every: int = 1
    delay: int = 0
    values: str = "fp32"

    @property
    def name(self) -> str:
        further = f" every={self.every}" * (self.every > 1) + f" delay={self.delay}" * bool(self.delay)
        return f"{self.family} {self.density:g}{further}"

    @property
    def kind(self) -> str:
        return self.family + f" delay={self.delay}" * bool(self.delay)

    @property
    def call(self) -> str:
        options = [f"density={self.density:g}"]
        options += [f"every={self.every}"] * (self.every > 1) + [f"delay={self.delay}"] * bool(self.delay)
        options += [f'values="{self.values}"'] * (self.values != "fp32")
        head = "gradsieve.sparsify(ddp_model" if self.family == "gradients" else "gradsieve.share(model, optimizer"
        return f"{head}, {', '.join(options)})"

    @property
    def sends(self) -> float:
        return self.density / self.every

    @property
    def traffic(self) -> Traffic:
        found = traffic.total(self.calls, self.workers)
        return Traffic(found.calls, found.handed_bytes, found.ring_bytes / self.every)

    def step(self, link: Link) -> float:
        communicate = sum(traffic.seconds(call, self.workers, link) for call in self.calls)
        exchange = max(0.0, self.local + communicate + self.overhead)
        if self.delay:  # the exchange runs in a background thread
            sending = link.work * traffic.total(self.calls, self.workers).ring_bytes
            exchange = max(0.0, exchange - self.compute) + self.held_up(self.local + sending, self.compute)
        return self.compute + exchange / self.every
