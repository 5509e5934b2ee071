"""The tables of measurements in the docs, made from what benchmarks/ holds: `python benchmarks/tables.py`.

A table stands between `<!-- NAME -->` and `<!-- end -->`; what is between them is replaced.
"""

import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from studies.reproduce import EXPERIMENTS

from gradsieve_lab.netlab.rates import parse_rate

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
    return f"{table}\n\n({under(rows)})"


def grid(rows: Rows, column: str, corner: str, head: str) -> str:
    """A line a case; medians, and in brackets their ratios."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    found = {(row["case"], row[column]): f"{milliseconds(row)} ({float(row['ratio']):.2f}x)" for row in rows}
    cases = dict.fromkeys(row["case"] for row in rows)
    lines = ([case, *(found[case, each] for each in columns)] for case in cases)
    return markdown([corner, *(head.format(each) for each in columns)], lines)


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


def plan() -> str:
    """A line a cell; measured and predicted milliseconds of each method, and the error."""
    if not (ROOT / "benchmarks" / "data" / "plan.csv").exists():
        return "Not measured yet: `python benchmarks/plan.py` measures the rows of this table (root, half an hour)."
    rows = read("plan")
    ways = list(dict.fromkeys(row["way"] for row in rows))
    cells = dict[tuple[int, int, int], dict[str, str]]()
    inside: dict[str, list[bool]] = {way: [] for way in ways}
    for row in rows:
        measured, predicted = float(row["measured_ms"]), float(row["predicted_ms"])
        error = predicted / measured - 1
        inside[row["way"]].append(abs(error) <= TOLERANCE)
        place = int(row["n"]), -parse_rate(row["links"]), int(row["hosts"])
        cell = cells.setdefault(place, {"": f"{row['links']}, {row['hosts']} hosts"})
        bold = "" if inside[row["way"]][-1] else "**"
        cell[row["way"]] = f"{_short(measured)} / {_short(predicted)}, {bold}{error:+.0%}{bold}"
    lines = [
        [f"{n / 1e6:.1f}M, {cell['']}", *(cell.get(way, "") for way in ways)]
        for (n, _, _), cell in sorted(cells.items(), key=lambda pair: pair[0])
    ]
    lines.append([f"within {TOLERANCE:.0%}", *(f"{sum(inside[way])} of {len(inside[way])}" for way in ways)])
    table = markdown(["measured / predicted ms per step", *ways], lines)
    return f"{table}\n\n({under(rows)}, commit {rows[0]['commit']})"


TOLERANCE = 0.2


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def gpt() -> str:
    """A line a method of the small GPT that exchanges in every step, or a yardstick."""
    return _gpt(lambda method: "every=" not in method or method in ("average:every=77", "average:every=8"))


def local() -> str:
    """A line a method of the small GPT that exchanges now and then: a fifth of those bytes, or ten times that."""
    few = ("alone", "average:every=480", "average:every=48")
    return _gpt(lambda method: method == "dense" or method in few or ("share" in method and "every=" in method))


def _gpt(wanted: Callable[[str], bool]) -> str:
    trials = Trials(read("gpt"), worse=1)
    lines = [
        [
            f"`{case[1]}`",
            f"{math.log(trials.mean[case]):.3f}",
            ", ".join(f"{math.log(metric):.3f}" for metric in numbers(rows, "metric")),
            f"{trials.gain(case, math.log):.0%}",
            f"{fmean(numbers(rows, 'ring_bytes')) / 1e3:,.1f} kB",
            trials.rate(case),
        ]
        for case, rows in trials.best.items()
        if wanted(case[1])
    ]
    heads = ["method", "test loss, nats", "of each seed", "gain kept", "bytes per step and worker", "learning rate"]
    return f"{markdown(heads, lines)}\n\n({under(read('gpt'))})"


def five() -> str:
    """A line a task and method: at the end of 4,000 steps."""
    found = outcome("weights")
    (table,) = found["finding"]["tables"]
    lines = ([*row[:5]] for row in table["rows"])  # without the modelled seconds
    where = found["conditions"]
    return f"{markdown(table['heads'][:5], lines)}\n\n({where['machine']}, torch {where['torch']}, {where['date']})"


def judges() -> str:
    """A line a task and method."""
    trials = Trials(read("judges"), worse=-1)
    lines = []
    for case, rows in trials.best.items():
        sent = numbers(rows, "lowest") + numbers(rows, "highest")
        lines.append(
            [
                *case,
                f"{trials.mean[case]:.2%}",
                ", ".join(f"{metric:.2%}" for metric in numbers(rows, "metric")),
                f"{trials.gain(case):.0%}",
                trials.rate(case),
                f"{fmean(numbers(rows, 'ring_bytes')):,.0f}",
                f"{fmean(numbers(rows, 'collectives')):.3f}",
                f"{min(sent):.3g} to {max(sent):.3g}",
            ]
        )
    heads = ["task", "method", "accuracy", "of each seed", "gain kept", "learning rate", "bytes", "collectives"]
    return f"{markdown([*heads, 'sent / k'], lines)}\n\n({under(read('judges'))})"


class Trials:
    """Rows of `trials.py` by task and method, the best first: those of the learning rate that is best on the first
    seed, with all seeds that were run."""

    def __init__(self, rows: Rows, worse: int) -> None:
        self.runs = dict[tuple[str, str], Rows]()
        for row in rows:
            self.runs.setdefault((row["task"], row["method"]), []).append(row)
        self.chosen = {case: self._rate(found, worse) for case, found in self.runs.items()}
        best = {case: [row for row in found if row["lr"] == self.chosen[case]] for case, found in self.runs.items()}
        self.mean = {case: fmean(numbers(found, "metric")) for case, found in best.items()}
        self.best = {case: best[case] for case in sorted(best, key=lambda case: (case[0], worse * self.mean[case]))}

    def _rate(self, runs: Rows, worse: int) -> str:
        return min((row for row in runs if row["seed"] == "0"), key=lambda row: worse * float(row["metric"]))["lr"]

    def rate(self, case: tuple[str, str]) -> str:
        tried = sorted({float(row["lr"]) for row in self.runs[case]})
        return f"{self.chosen[case]} of {', '.join(map(str, tried))}"

    def gain(self, case: tuple[str, str], scale: Callable[[float], float] = float) -> float:
        value, alone, dense = (scale(self.mean[case[0], method]) for method in (case[1], "alone", "dense"))
        return (value - alone) / (dense - alone) + 0.0  # no minus before a zero


def numbers(rows: Rows, column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def density() -> str:
    """A line per case, cell and method; budgets have a table of their own."""
    (table,) = outcome("density-control")["finding"]["tables"]
    return markdown(table["heads"], (row for row in table["rows"] if "budget" not in row))


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
    """What `python -m studies NAME --out benchmarks/reproduction` left."""
    found: dict[str, Any] = json.loads((REPRODUCTION / f"{name}.json").read_text())
    return found


def measured(name: str) -> Any:
    """What a command of studies/faults printed."""
    return json.loads((ROOT / "benchmarks" / "data" / f"faults-{name}.json").read_text())


def campaign() -> str:
    """A line a kind of fault."""
    found = measured("campaign")
    kinds = sorted(found["kinds"], key=lambda row: row["kind"])

    def line(row: dict[str, Any]) -> list[str]:
        times = ["-" if row[key] is None else f"{row[key]:.1f}" for key in ("known_s", "most_s")]
        return [row["kind"], str(row["trials"]), str(row["survived"]), *times]

    trials, survived = (str(sum(row[key] for row in kinds)) for key in ("trials", "survived"))
    heads = ["kind", "trials", "survived", "median s until all survivors knew", "most"]
    table = markdown(heads, [*map(line, kinds), ["all", trials, survived, "", ""]])
    facts = found["conditions"]
    where = f"{facts['machine']}, torch {facts['torch']}, {facts['date']}"
    return f"{table}\n\n({where}; {found['seconds'] / 60:.0f} minutes)"


def corruption() -> str:
    found = measured("corruption")
    total = found["trials each"]
    lines = []
    for where, row in found.items():
        if isinstance(row, dict):
            unseen = row["outcomes"].get("not seen", 0)
            most = "-" if row["most steps"] is None else str(row["most steps"])
            bits = row["bits not seen"]
            which = f"{bits[0]} to {bits[-1]}" if bits else "-"
            lines.append([where, str(total), str(total - unseen), most, str(unseen), which])
    heads = ["flipped in", "trials", f"found by `check_every={found['check_every']}`", "most steps until then"]
    return markdown([*heads, "not seen", "bits of these"], lines)


def calls() -> str:
    found = measured("calls")
    kinds = ("a result", "a sentence", "neither")
    return markdown(["random calls", *kinds], [[f"{found[key]:,}" for key in ("calls", *kinds)]])


def elastic() -> str:
    """A line a way to train: undisturbed runs, and the run whose membership changed."""
    lines = []
    for way in ("sparsify", "share"):
        found = measured(f"elastic-{way}")
        calm = {
            workers: ", ".join(f"{run['accuracy']:.1%}" for run in found["calm"] if run["workers"] == workers)
            for workers in (4, 2)
        }
        kinds = Counter(event["kind"] for event in found["disturbed"]["events"])
        lines.append(
            [
                f"`{way}`",
                calm[4],
                calm[2],
                f"**{found['disturbed']['accuracy']:.1%}**",
                ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
                f"{found['median seconds until training went on']:.0f} (at most {found['most seconds']:.0f})",
            ]
        )
    heads = ["", "4 workers, undisturbed", "2 workers", "disturbed", "changes", "s until training continued"]
    facts = measured("elastic-share")["conditions"]
    return f"{markdown(heads, lines)}\n\n({facts['machine']}, torch {facts['torch']}, {facts['date']})"


def ranks() -> str:
    lines = [
        [
            f"{row['workers']:,}",
            row["sparsifier"],
            f"{row['s per step']:.2f}",
            str(row["collectives"]),
            f"{row['bytes']:,}",
        ]
        for row in measured("virtual")["virtual"]
    ]
    heads = ["virtual workers", "sparsifier", "s per step of all", "collectives", "bytes per worker"]
    return markdown(heads, lines)


def soak() -> str:
    workers = measured("soak")["soak"]["workers"]
    lines = [
        [
            str(rank),
            f"{row['steps']:,}",
            f"{row['comparisons']:,}",
            f"{row['ms per step']:.0f}",
            *(f"{row['kB'][key]:,}" for key in ("after a third", "last")),
            f"{row['kB per hour']:,.0f}",
            " to ".join(map(str, row["open files"][1:])),
            f"{row['open files per hour']:.1f}",
        ]
        for rank, row in enumerate(workers)
    ]
    heads = ["worker", "steps", "comparisons", "ms per step", "kB after a third", "kB at the end", "kB per hour"]
    return markdown([*heads, "open files", "per hour"], lines)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/measurements.md": {"lab": lab, "step": step, "wire": wire},
    "docs/faults.md": {
        "campaign": campaign,
        "corruption": corruption,
        "calls": calls,
        "elastic": elastic,
        "ranks": ranks,
        "soak": soak,
    },
    "docs/density.md": {"density": density},
    "docs/judges.md": {"judges": judges},
    "docs/plan.md": {"plan": plan},
    "docs/share.md": {"five": five, "gpt": gpt, "local": local, "sharing": sharing},
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
