"""Reports on recorded runs: one self-contained HTML page, and CSV tables for further analysis."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradsieve._check import BadInput
from gradsieve_lab._files import write_whole
from gradsieve_lab.report.page import render
from gradsieve_lab.report.style import labels
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.summary import summarise_all

__all__ = ["render", "write_csv", "write_report"]


def write_report(runs: Sequence[Run], out: Path) -> None:
    """Write the page atomically."""
    write_whole(out, render(runs))


def write_csv(runs: Sequence[Run], folder: Path) -> None:
    """Write `summary.csv`, one line per run, and `steps.csv`, one line per step of each run.

    A metric is in the line with the number of steps that were done when it was measured.
    """
    if not runs:
        raise BadInput("a table must have one run at least, got none")
    names = labels(runs)
    rows = zip(names, summarise_all(runs), strict=True)
    summaries = [{"run": name, **asdict(row)} for name, row in rows]
    steps = [line for name, run in zip(names, runs, strict=True) for line in _lines(name, run)]
    texts = {"summary.csv": _csv(summaries), "steps.csv": _csv(steps)}
    for name, text in texts.items():
        write_whole(folder / name, text)


def _lines(name: str, run: Run) -> list[dict[str, Any]]:
    lines: dict[int, dict[str, Any]] = {}
    for step in run.steps:
        plain = {key: value for key, value in asdict(step).items() if key not in ("step", "seconds")}
        seconds = {f"{phase}_seconds": value for phase, value in step.seconds.items()}
        lines[step.step + 1] = {**plain, **seconds}
    for metric in run.metrics:
        found = {"metric": "value", "total_bytes": "bytes", "total_seconds": "seconds"}
        lines.setdefault(metric["step"], {}).update({new: metric.get(old) for new, old in found.items()})
    return [{"run": name, "steps_done": done, **lines[done]} for done in sorted(lines)]


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    fields = dict.fromkeys(("run", *(key for row in rows for key in row)))
    writer = csv.DictWriter(text, list(fields), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _safe(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would take for a formula, to make it text again."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
