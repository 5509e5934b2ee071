"""A warning, once per run, if plain DDP would be faster on this network."""

import statistics
import time
import warnings

import torch

from gradsieve.comm.collectives import all_reduce
from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve.reports import StepReport
from gradsieve.worlds.base import World

AFTER = 50  # exchanges, of which the later half counts
SIZES = (1 << 16, 1 << 20)  # bytes of the two sums whose times show latency and bandwidth
REPEATS = 3  # of which the slowest counts, so that in doubt the network is taken for slower than it is
MARGIN = 1.5  # times longer than a full all-reduce that an exchange must take


class NoAdvice:
    """Gives no advice."""

    def note(self, report: StepReport) -> None:
        """An exchange is complete."""


class Advice(NoAdvice):
    """Compares the time of exchanges with that of a full all-reduce, as measured sums predict it, and warns once.

    The full all-reduce is counted in full, although DDP hides a part of it behind the backward pass: if an exchange
    takes longer even so, it does not pay. Sums are measured once, on all workers, and larger ones only if smaller
    ones were faster than an exchange, so that a slow network is not blocked.
    """

    def __init__(self, world: World, rank: int, n: int, device: torch.device) -> None:
        self.world, self.rank, self.size, self.device = world, rank, 4 * n, device
        self._spent: list[float] = []

    def note(self, report: StepReport) -> None:
        if len(self._spent) >= AFTER or self.world.size == 1:
            return
        self._spent.append(sum(seconds for phase, seconds in report.seconds.items() if phase != "measure"))
        if len(self._spent) == AFTER:
            exchange = self._mean(statistics.median(self._spent[AFTER // 2 :]))
            full = self._full(exchange)
            if exchange > MARGIN * full and self.rank == 0:
                warnings.warn(
                    f"sparsifying does not pay on this network: an exchange takes {exchange * 1e3:.3g} ms, "
                    f"plain DDP would need about {full * 1e3:.3g} ms for the full gradient (see gradsieve plan)",
                    stacklevel=2,
                )

    def _full(self, exchange: float) -> float:
        """Seconds of an all-reduce of the whole gradient; of a part of it, if that takes longer than `exchange`."""
        first = self._sum(min(SIZES[0], self.size))
        if first >= exchange or self.size <= SIZES[0]:
            return first
        second, size = self._sum(min(SIZES[1], self.size)), min(SIZES[1], self.size)
        each = max(0.0, second - first) / (self._wire(size) - self._wire(SIZES[0]))
        return second + each * (self._wire(self.size) - self._wire(size))

    def _wire(self, size: int) -> float:
        return ring_all_reduce_bytes(size, self.world.size)

    def _sum(self, size: int) -> float:
        """Seconds of a sum over all workers, the same on all of them."""
        found = []
        for _ in range(REPEATS):
            x = torch.zeros(max(1, size // 4), dtype=torch.float32, device=self.device)
            started = time.perf_counter()
            self.world.run([all_reduce("advice", x)])
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            found.append(time.perf_counter() - started)
        return self._mean(max(found))

    def _mean(self, seconds: float) -> float:
        """Over all workers, so that all of them decide the same."""
        own = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        return float(self.world.run([all_reduce("advice", own)])[0]) / self.world.size
