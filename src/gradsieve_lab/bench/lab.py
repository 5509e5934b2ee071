"""The time of a training step between hosts with slow links."""

from collections.abc import Callable, Sequence

from gradsieve_lab.bench.cases import ALONE, CASES
from gradsieve_lab.bench.step import step_rows
from gradsieve_lab.bench.timing import Row
from gradsieve_lab.netlab.network import network
from gradsieve_lab.netlab.rates import parse_links

RATES = ("1gbit", "100mbit", "20mbit")


def bench_lab(
    hosts: int,
    rate: str,
    density: float,
    repeats: int,
    told: Callable[[str], None] | None = None,
    cases: Sequence[str] = CASES,
) -> list[Row]:
    """One row per case, with its ratio to compute alone."""
    with network(parse_links(rate, hosts)) as made:
        rows = step_rows("lab", hosts, density, repeats, cases, places=made.places(hosts), links=rate, told=told)
    return [row.with_ratio(rows[ALONE]) for row in rows.values()]
