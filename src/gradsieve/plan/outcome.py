"""A plan: the ways to train, a recommendation in one sentence, and both as text, JSON and HTML."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradsieve.plan.links import FASTEST, SLOWEST, Link
from gradsieve.plan.ways import Way

CHECKED_WORKERS = 8  # most hosts for which predictions were compared with measured steps: docs/plan.md
WORTH_IT = 1.1  # speedup over plain DDP that another way needs to be recommended
WIDTH = 79  # characters per line of text
CLOSE = 1.25  # a way that sends more may be this many times slower than the fastest


@dataclass(frozen=True)
class Plan:
    """The result of `plan`: print it, or use `recommendation`, `to_dict()`, `page()`. `ways[0]` is plain DDP."""

    n: int
    workers: int
    link: Link
    compute: float  # seconds per step without communication
    ways: Sequence[Way]

    @property
    def plain(self) -> Way:
        return self.ways[0]

    def ms(self, way: Way) -> float:
        """Milliseconds per step."""
        return way.step(self.link) * 1e3

    @property
    def best(self) -> Way:
        """The recommended way: of those about as fast as the fastest, the one that sends most."""
        fastest = min(map(self.ms, self.ways))
        if self.ms(self.plain) <= WORTH_IT * fastest:
            return self.plain
        close = [way for way in self.ways if self.ms(way) <= CLOSE * fastest]
        return max(close, key=lambda way: (way.sends, -self.ms(way)))

    @property
    def recommendation(self) -> str:
        """The recommendation in one sentence."""
        best, plain = self.best, self.ms(self.plain)
        if best is not self.plain:
            taken = self.ms(best)
            words = f"{number(taken)} ms per step, {plain / taken:.1f} times faster than plain DDP's"
            return f"{best.name}: {words} {number(plain)} ms"
        other = min((way for way in self.ways if way is not best), key=self.ms)
        if plain <= self.ms(other):
            words = "it is faster here"
        else:
            words = f"nothing here is more than {WORTH_IT - 1:.0%} faster"
        beside = f"{number(plain)} ms per step; {other.name} would take {number(self.ms(other))} ms"
        return f"plain DDP: {words} ({beside})"

    @property
    def notes(self) -> list[str]:
        """Caveats about these numbers."""
        found = ["Time only: a lower density trains less per step. Prefer the highest that is fast enough."]
        if self.workers > CHECKED_WORKERS:
            found.append(
                f"The model was checked with up to {CHECKED_WORKERS} hosts: {self.workers:,} workers are an "
                "extrapolation on paper."
            )
        return found

    def break_even(self, way: Way) -> float:
        """Bits per second below which this way is faster than plain DDP; 0 means never, infinity always."""

        def gain(bits: float) -> float:
            link = self.link.at(bits)
            return self.plain.step(link) - way.step(link)

        low, high = float(SLOWEST), float(FASTEST)
        if gain(low) <= 0:
            return 0.0
        if gain(high) > 0:
            return math.inf
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if gain(middle) > 0 else (low, middle)
        return low

    def to_dict(self) -> dict[str, Any]:
        """The plan as numbers and strings, for JSON."""
        return {
            "parameters": self.n,
            "workers": self.workers,
            "link": {**vars(self.link), "bits": self.link.bits},
            "compute_ms": self.compute * 1e3,
            "recommendation": self.recommendation,
            "best": self.best.name,
            "call": self.best.call,
            "notes": self.notes,
            "ways": [self._row(way) for way in self.ways],
        }

    def _row(self, way: Way) -> dict[str, Any]:
        even = self.break_even(way)
        return {
            "name": way.name,
            "ms": self.ms(way),
            "times_faster": self.ms(self.plain) / self.ms(way),
            "local_ms": way.local * 1e3,
            "bytes_per_step": way.traffic.ring_bytes,
            "collectives": way.traffic.calls,
            "extra_memory_bytes": way.memory,
            "break_even_bits": None if way is self.plain or math.isinf(even) else even,
            "break_even": "" if way is self.plain else rate(even),
            "call": way.call,
        }

    def __str__(self) -> str:
        head = textwrap.wrap(self.head, WIDTH)
        sentences = [f"Use {self.recommendation}.", *self.notes]
        below = [line for sentence in sentences for line in textwrap.wrap(sentence, WIDTH)]
        return "\n".join([*head, "", *_aligned(self.table()), "", *below])

    @property
    def head(self) -> str:
        """The inputs of the plan, in one line."""
        link = self.link
        return (
            f"{self.n:,} parameters, {self.workers:,} workers, {rate(link.bits)}/s, "
            f"{(link.latency + link.message) * 1e3:.2g} ms latency, {self.compute * 1e3:.4g} ms computing"
        )

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text, headings first."""
        heads = ("", "ms/step", "speedup", "sent", "memory", "wins below")
        rows: list[tuple[str, ...]] = [heads]
        for way in self.ways:
            row = self._row(way)
            times = row["times_faster"]
            faster = f"{times:.2f}x" if times < 100 else f"{number(times)}x"
            sizes = (size(row["bytes_per_step"]), f"+{size(way.memory)}" if way.memory else "")
            rows.append((way.name, number(row["ms"]), faster, *sizes, row["break_even"]))
        return rows

    def page(self) -> str:
        """The plan as an HTML page, with a plot of bandwidth against milliseconds per step."""
        from gradsieve.plan.page import page

        return page(self)


def rate(bits: float) -> str:
    """
    >>> rate(1.25e9), rate(0), rate(math.inf)
    ('1.25 Gbit', 'never', 'always')
    """
    if bits == 0 or math.isinf(bits):
        return "always" if bits else "never"
    return _scaled(bits, 1000, ("bit", "kbit", "Mbit", "Gbit", "Tbit"))


def size(count: float) -> str:
    """
    >>> size(0), size(1_500_000)
    ('0 B', '1.5 MB')
    """
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    power = min(int(math.log(value, step) + 1e-9), len(units) - 1) if value >= 1 else 0
    return f"{value / step**power:.3g} {units[power]}"


def number(value: float) -> str:
    """
    >>> number(17_169_402.0), number(12345.6), number(5.6789)
    ('17.2M', '12,346', '5.68')
    """
    if value >= 1e6:
        return f"{value / 1e6:,.1f}M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())
    return lines
