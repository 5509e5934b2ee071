"""The README's tables of measurements, made from the rows in benchmarks/data: `python benchmarks/tables.py`.

A table stands between `<!-- NAME -->` and `<!-- end -->`; what is between them is replaced.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    with (ROOT / "benchmarks" / "data" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def under(rows: Rows) -> str:
    first = rows[0]
    return f"{first['machine']}, torch {first['torch']}, {first['date']}"


def milliseconds(row: dict[str, str]) -> str:
    return f"{float(row['median']):,.0f}"


def lab() -> str:
    """A line a case, a column a rate; in brackets times compute alone."""
    rows = [row for row in read("lab") if row["against"] == "compute alone"]
    rates = list(dict.fromkeys(row["links"] for row in rows))
    found = {(row["case"], row["links"]): row for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        [case, *(f"{milliseconds(found[case, r])} ({float(found[case, r]['ratio']):.2f}x)" for r in rates)]
        for case in cases
    ]
    hosts = rows[0]["workers"]
    return f"{markdown([f'a step of {hosts} hosts, ms', *rates], lines)}\n\n{goals()}\n\n({under(rows)})"


def goals() -> str:
    """What was asked for, and whether it is so: of every row that has a goal, in the order of the files."""
    lines = [
        [
            row["case"],
            row["links"] or "loopback",
            f"{float(row['ratio']):.2f}x {row['against']}",
            row["goal"],
            row["met"],
        ]
        for name in ("lab", "step", "wire")
        for row in read(name)
        if row["goal"]
    ]
    return markdown(["goal of", "links", "measured", "asked for", "met"], lines)


def step() -> str:
    """A line a case, a column a number of processes; in brackets times plain DDP."""
    rows = [row for row in read("step") if row["benchmark"] == "step"]
    numbers = sorted({row["workers"] for row in rows}, key=int)
    found = {(row["case"], row["workers"]): row for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        [case, *(f"{milliseconds(found[case, p])} ({float(found[case, p]['ratio']):.2f}x)" for p in numbers)]
        for case in cases
    ]
    return f"{markdown(['a step, ms', *(f'{p} processes' for p in numbers)], lines)}\n\n({under(rows)})"


def wire() -> str:
    """Bytes for each selected element."""
    rows = read("wire")
    found = {tuple(row["case"].rsplit(": ", 1)): row for row in rows}
    kinds = ("metered", "counted", "with headers")
    cases = list(dict.fromkeys(case for case, _ in found))
    lines = [[case, *(f"{float(found[case, kind]['median']):.2f}" for kind in kinds)] for case in cases]
    heads = ["bytes for each selected element", "our meter", "interfaces, without headers", "with headers"]
    return f"{markdown(heads, lines)}\n\n({under(rows)})"


TABLES: dict[str, Callable[[], str]] = {"lab": lab, "step": step, "wire": wire}


def filled(text: str) -> str:
    """The text with every table as the rows have it now."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)
        if count != 1:
            raise SystemExit(f"README.md must have one place for the table {name}, got {count}")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
    sys.stdout.write(f"tables of {readme.name}: {', '.join(TABLES)}\n")
