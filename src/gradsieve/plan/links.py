"""Alpha-beta model of the network: time per message and per byte, for each kind of collective."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsieve._check import BadInput, number, one_of, positive
from gradsieve.comm.traffic import ring_all_reduce_bytes

BACKENDS = ("gloo", "nccl")
SLOWEST, FASTEST = 10**4, 10**13  # bits per second
LATENCY_MS = 0.1  # default: that of a switched network
MESSAGE_MS = 0.02  # default for the time to hand one message to a socket
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Link:
    """The link of each worker to the others: every worker has its own, and all send at the same time.

    bandwidth: bytes per second in each direction.
    latency: seconds until an empty message arrives.
    message: additional seconds that a worker spends on each message.
    wake: extra seconds of a collective after computing, since workers do not finish at the same time.
    backend: "gloo" sums in a ring; "nccl" in a ring or a tree, whichever is faster.
    work: CPU seconds per byte sent.
    half: extra seconds per element of the backend's sum of float16, compared with as many bytes of float32.
    """

    bandwidth: float
    latency: float = LATENCY_MS / 1e3
    message: float = MESSAGE_MS / 1e3
    wake: float = 0.0
    backend: str = "gloo"
    work: float = 0.0
    half: float = 0.0

    def __post_init__(self) -> None:
        positive("bandwidth", self.bandwidth)
        for name in ("latency", "message", "wake", "work", "half"):
            value = getattr(self, name)
            if not 0 <= number(name, value) < math.inf:
                raise BadInput(f"{name} must be at least 0 and finite, got {value}")
        one_of("backend", self.backend, BACKENDS)

    @property
    def bits(self) -> int:
        """Bits per second."""
        return round(self.bandwidth * 8)

    def at(self, bits: float) -> "Link":
        """The same network with another bandwidth, in bits per second."""
        return replace(self, bandwidth=bits / 8)

    def exchange(self, sent_bytes: float, workers: int, rounds: int = 1) -> float:
        """Seconds of a collective in which every worker sends to every other one in each round."""
        if workers == 1:
            return 0.0
        return self.wake + rounds * (self.latency + (workers - 1) * self.message) + sent_bytes / self.bandwidth

    def all_reduce(self, sizes: Sequence[float], workers: int, ready: Sequence[float] = ()) -> float:
        """Seconds until the backend has summed vectors of these sizes in bytes, ready at these times.

        They follow each other on the wire; only the last one's latency counts, if it is longer than sending it:
        the backend sends a part of a vector while others are under way.
        """
        if workers == 1:
            return max(ready, default=0.0)
        hop = self.latency + self.message
        shapes = [(2 * (workers - 1) * hop, [ring_all_reduce_bytes(round(size), workers) for size in sizes])]
        if self.backend != "gloo":
            shapes.append((2 * math.ceil(math.log2(workers)) * hop, [2 * size for size in sizes]))
        found = []
        for latency, sent in shapes:
            start = done = 0.0
            for bytes_, begun in zip(sent, ready or [0.0] * len(sent), strict=True):
                start = max(done, begun)
                done = start + bytes_ / self.bandwidth
            found.append(max(start + latency, done + hop))
        return self.wake + min(found)


def parse_rate(text: str, slowest: int = SLOWEST, fastest: int = FASTEST) -> int:
    """Bits per second.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower()) if isinstance(text, str) else None
    if found is None:
        raise BadInput(f"rate must be a number with kbit, mbit or gbit, such as 100mbit, got {text!r}")
    rate = round(float(found[1]) * _UNITS[found[2]])
    if not slowest <= rate <= fastest:
        raise BadInput(f"rate must be between {show_rate(slowest)} and {show_rate(fastest)}, got {text!r}")
    return rate


def show_rate(rate: int) -> str:
    """
    >>> show_rate(100_000_000), show_rate(1_500_000_000)
    ('100mbit', '1500mbit')
    """
    unit = next(unit for unit in ("gbit", "mbit", "kbit", "bit") if rate % _UNITS[unit] == 0)
    return f"{rate // _UNITS[unit]}{unit}"
