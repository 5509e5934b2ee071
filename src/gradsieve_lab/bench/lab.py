"""A training step between hosts with limited links: where sending less pays, and by how much."""

from collections.abc import Callable, Sequence

from gradsieve_lab.bench.cases import ALONE, CASES, OURS, PLAIN, POWERSGD
from gradsieve_lab.bench.step import MOST_COMPUTE as SHARING_GOALS
from gradsieve_lab.bench.step import step_rows
from gradsieve_lab.bench.timing import Row
from gradsieve_lab.netlab.network import network
from gradsieve_lab.netlab.rates import parse_links

RATES = ("1gbit", "100mbit", "20mbit")
MOST_COMPUTE = {"1gbit": 1.7, "100mbit": 1.8}  # times compute alone
LEAST_FASTER = {  # than these cases
    "1gbit": {PLAIN: 12.0, POWERSGD[0]: 2.0},
    "100mbit": {PLAIN: 35.0},
}


def bench_lab(
    hosts: int,
    rate: str,
    density: float,
    repeats: int,
    told: Callable[[str], None] | None = None,
    cases: Sequence[str] = CASES,
) -> list[Row]:
    """One row a case, its ratio to compute alone; then ours against those it must beat."""
    with network(parse_links(rate, hosts)) as made:
        rows = step_rows("lab", hosts, density, repeats, cases, places=made.places(hosts), links=rate, told=told)
    goals = {OURS: MOST_COMPUTE.get(rate), **SHARING_GOALS}
    found = [row.with_ratio(rows[ALONE], at_most=goals.get(case)) for case, row in rows.items()]
    return found + [
        rows[OURS].with_ratio(rows[other], at_least=factor)
        for other, factor in LEAST_FASTER.get(rate, {}).items()
        if OURS in rows and other in rows
    ]
