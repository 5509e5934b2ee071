"""The tables of measurements in README and docs, made from what benchmarks/ holds: `python benchmarks/tables.py`.

A table stands between `<!-- NAME -->` and `<!-- end -->`; what is between them is replaced.
"""

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsieve.experiments.reproduce import EXPERIMENTS

ROOT = Path(__file__).parent.parent
REPRODUCTION = ROOT / "benchmarks" / "reproduction"
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
    """A column a rate; in brackets times compute alone."""
    rows = [row for row in read("lab") if row["against"] == "compute alone"]
    table = grid(rows, "links", f"a step of {rows[0]['workers']} hosts, ms", "{}")
    return f"{table}\n\n{goals()}\n\n({under(rows)})"


def grid(rows: Rows, column: str, corner: str, head: str) -> str:
    """A line a case; medians, and in brackets their ratios."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    found = {(row["case"], row[column]): f"{milliseconds(row)} ({float(row['ratio']):.2f}x)" for row in rows}
    cases = dict.fromkeys(row["case"] for row in rows)
    lines = ([case, *(found[case, each] for each in columns)] for case in cases)
    return markdown([corner, *(head.format(each) for each in columns)], lines)


def goals() -> str:
    """What was asked for, and whether it is so: of every row that has a goal, in the order of the files."""
    rows = [row for name in ("lab", "step") for row in read(name) if row["goal"]]
    heads = ["goal of", "links", "measured", "asked for", "met"]
    return markdown(
        heads, ([row["case"], row["links"] or "loopback", measured(row), row["goal"], row["met"]] for row in rows)
    )


def measured(row: dict[str, str]) -> str:
    less = "less than " if row["goal"].startswith(">=") else ""
    return f"{float(row['ratio']):.2f}x {less}{row['against']}"


def step() -> str:
    """A column a number of processes; in brackets times plain DDP."""
    rows = [row for row in read("step") if row["benchmark"] == "step" and row["against"] == "plain DDP"]
    return f"{grid(rows, 'workers', 'a step, ms', '{} processes')}\n\n({under(rows)})"


def wire() -> str:
    """Bytes for each selected element."""
    rows = read("wire")
    found = {tuple(row["case"].rsplit(": ", 1)): row for row in rows}
    kinds = ("metered", "counted", "with headers")
    cases = list(dict.fromkeys(case for case, _ in found))
    lines = [[case, *(f"{float(found[case, kind]['median']):.2f}" for kind in kinds)] for case in cases]
    heads = ["bytes for each selected element", "our meter", "interfaces, without headers", "with headers"]
    return f"{markdown(heads, lines)}\n\n({under(rows)})"


def sharing() -> str:
    """Steps of those that exchange weights, on every link; in brackets times compute alone."""
    rows = [row for row in read("share-lab") + read("share-step") if row["benchmark"] in ("lab", "step")]
    base = {_where(row): float(row["median"]) for row in rows if row["case"] == "compute alone"}
    found = {
        (row["case"], _where(row)): f"{milliseconds(row)} ({float(row['median']) / base[_where(row)]:.2f}x)"
        for row in rows
    }
    cases = dict.fromkeys(row["case"] for row in rows)
    lines = [[case, *(found.get((case, where), "") for where in base)] for case in cases]
    return f"{markdown(['a step, ms', *base], lines)}\n\n({under(rows)})"


def _where(row: dict[str, str]) -> str:
    return f"{row['links'] or 'loopback'}, {row['workers']} workers"


def gpt() -> str:
    """A line a method: the learning rate with the lowest perplexity of those that were tried."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((ROOT / "benchmarks" / "data").glob("gpt-*.json")):
        lr = path.stem.removeprefix("gpt-")
        for run in json.loads(path.read_text()):
            runs.setdefault(run["method"].split(" every=")[0], []).append({**run, "lr": lr})
    best = {method: min(found, key=lambda run: run["metric_last"]) for method, found in runs.items()}
    loss = {method: math.log(run["metric_last"]) for method, run in best.items()}
    lines = [
        [
            f"`{best[method]['method'].replace(' ', ':')}`",
            f"{loss[method]:.3f}",
            f"{(loss['alone'] - loss[method]) / (loss['alone'] - loss['dense']):.0%}",
            f"{best[method]['bytes_per_step'] / 1e3:,.1f} kB",
            f"{best[method]['lr']} of {', '.join(run['lr'] for run in runs[method])}",
        ]
        for method in sorted(best, key=lambda method: loss[method])
    ]
    heads = ["method", "test loss, nats", "gain kept", "bytes per step and worker", "learning rate"]
    return markdown(heads, lines)


def judges() -> str:
    """A line a task and method: the learning rate that is best on the first seed, with all seeds that were run."""
    rows, runs = read("judges"), dict[tuple[str, str], Rows]()
    for row in rows:
        runs.setdefault((row["task"], row["method"]), []).append(row)
    chosen = {case: max(found, key=_on_the_first_seed)["lr"] for case, found in runs.items()}
    best = {case: [row for row in found if row["lr"] == chosen[case]] for case, found in runs.items()}
    mean = {case: fmean(numbers(found, "accuracy")) for case, found in best.items()}
    lines = []
    for case in sorted(best, key=lambda case: (case[0], -mean[case])):
        alone, dense = mean[case[0], "alone"], mean[case[0], "dense"]
        tried = sorted(set(numbers(runs[case], "lr")))
        sent = numbers(best[case], "lowest") + numbers(best[case], "highest")
        lines.append(
            [
                *case,
                f"{mean[case]:.2%}",
                ", ".join(f"{accuracy:.2%}" for accuracy in numbers(best[case], "accuracy")),
                f"{(mean[case] - alone) / (dense - alone):.0%}",
                f"{chosen[case]} of {', '.join(map(str, tried))}",
                f"{fmean(numbers(best[case], 'ring_bytes')):,.0f}",
                f"{fmean(numbers(best[case], 'collectives')):.3f}",
                f"{min(sent):.3g} to {max(sent):.3g}",
            ]
        )
    heads = ["task", "method", "accuracy", "of each seed", "gain kept", "learning rate", "bytes", "collectives"]
    return f"{markdown([*heads, 'sent / k'], lines)}\n\n({under(rows)})"


def numbers(rows: Rows, column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def _on_the_first_seed(row: dict[str, str]) -> float:
    return float(row["accuracy"]) if row["seed"] == "0" else -1.0


def density() -> str:
    """A line a case, cell and method."""
    (table,) = outcome("density-control")["finding"]["tables"]
    return markdown(table["heads"], table["rows"])


def claims() -> str:
    checks = outcome("density-control")["finding"]["checks"]
    return markdown(
        ["asked for", "found", "holds"],
        ([c["criterion"], c["found"], "yes" if c["holds"] else "no"] for c in checks),
    )


def verdicts() -> str:
    """A line an experiment of the papers, and the conditions."""
    found = [outcome(name) for name in EXPERIMENTS if (REPRODUCTION / f"{name}.json").exists()]
    lines = ([o["id"], o["source"], o["claim"], f"**{o['finding']['verdict']}**"] for o in found)
    first = found[0]["conditions"]
    table = markdown(["id", "from", "claim", "verdict"], lines)
    return f"{table}\n\n({first['machine']}, torch {first['torch']}, {first['date']})"


def criteria() -> str:
    """A line a criterion."""
    lines = (
        [name, check["criterion"], check["found"], "yes" if check["holds"] else "**no**"]
        for name in EXPERIMENTS
        if (REPRODUCTION / f"{name}.json").exists()
        for check in outcome(name)["finding"]["checks"]
    )
    return markdown(["id", "criterion", "found", "holds"], lines)


def notes() -> str:
    """What each experiment says of its conditions, and of what did not hold."""
    known = [name for name in EXPERIMENTS if (REPRODUCTION / f"{name}.json").exists()]
    return "\n\n".join(f"**{name}.** {outcome(name)['finding']['note']}" for name in known)


def outcome(name: str) -> dict[str, Any]:
    """What `gradsieve reproduce NAME --out benchmarks/reproduction` left."""
    found: dict[str, Any] = json.loads((REPRODUCTION / f"{name}.json").read_text())
    return found


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"lab": lab, "step": step, "wire": wire},
    "docs/density.md": {"density": density, "claims": claims},
    "docs/judges.md": {"judges": judges},
    "docs/share.md": {"gpt": gpt, "sharing": sharing},
    "docs/reproduction.md": {"verdicts": verdicts, "criteria": criteria, "notes": notes},
}


def filled(file: str) -> str:
    """The file's text with every table as the rows have it now."""
    text = (ROOT / file).read_text()
    for name, make in TABLES[file].items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)
        if count != 1:
            raise SystemExit(f"{file} must have one place for the table {name}, got {count}")
    return text


if __name__ == "__main__":
    for file, tables in TABLES.items():
        (ROOT / file).write_text(filled(file))
        sys.stdout.write(f"tables of {file}: {', '.join(tables)}\n")
