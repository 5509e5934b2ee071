"""The record of a run: `records.jsonl` in its folder, one JSON object per line.

    {"kind": "run", ...}        first: settings, model size, metric, command, conditions
    {"kind": "step", ...}       one per training step: `StepRecord`
    {"kind": "metric", ...}     one per evaluation; its "step" is how many steps were done by then
    {"kind": "end", ...}        last: why it ended; missing if the run was killed

Lines are only added whole, so that a record is valid at any time.
"""

import gzip
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve._check import BadInput
from gradsieve_lab._files import write_whole
from gradsieve_lab.runs.schema import is_timed, problem_of
from gradsieve_lab.runs.step_record import StepRecord
from gradsieve_lab.tasks.base import Metric

VERSION = 1
LARGEST = 1 << 30  # most bytes of a record to read, unpacked
NAME = "records.jsonl"
Line = dict[str, Any]


class RecordError(BadInput):
    """A record is missing, invalid, or cannot be written."""


@dataclass(frozen=True)
class Run:
    """A record that was read."""

    header: Line
    steps: list[StepRecord]
    metrics: list[Line]
    end: Line | None
    folder: Path

    @property
    def name(self) -> str:
        """The run's name, without control characters."""
        return printable(self.header["name"])

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.header["settings"])

    @property
    def metric(self) -> Metric:
        """The run's metric; its name has no control characters."""
        metric = self.header["metric"]
        return Metric(**{**metric, "name": printable(metric["name"])})


def printable(text: str) -> str:
    """A text without control characters, which could change what a terminal shows."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


class Recorder:
    """Adds lines to a record; a failed write leaves the file as it was."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(to_line(line) for line in lines).encode()
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(text)
        except OSError as problem:
            if self.path.exists():
                os.truncate(self.path, size)
            raise RecordError(f"{self.path} could not be written: {problem.strerror}") from problem


def to_line(line: Mapping[str, Any]) -> str:
    """One line of strict JSON: settings are exact, measurements have float32's digits or are null."""
    return json.dumps(_plain(line, exact=line["kind"] == "run"), allow_nan=False) + "\n"


def _plain(value: Any, exact: bool) -> Any:
    if isinstance(value, float):
        number = value if exact else float(f"{value:.8g}")
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {key: _plain(part, exact) for key, part in value.items()}
    return value


def read_run(path: Path) -> Run:
    """Read the record in a folder, or a record file, compressed by gzip or not."""
    file = path
    if path.is_dir():
        found = [path / name for name in (NAME, f"{NAME}.gz") if (path / name).exists()]
        if not found:
            raise RecordError(f"{path} must hold a record, got no {NAME} in it")
        file = found[0]
    lines = _read_lines(file)
    kinds: dict[str, list[Line]] = {"run": [], "step": [], "metric": [], "end": []}
    for number, line in enumerate(lines, 1):
        kind = line.get("kind")
        if not isinstance(kind, str) or kind not in kinds or (kind == "run") != (number == 1):
            raise RecordError(f"{file} must be a gradsieve record, got kind {kind!r} in line {number}")
        kinds[kind].append(line)
    if not lines or lines[0].get("version") != VERSION:
        raise RecordError(f"{file} must be a gradsieve record of version {VERSION}, got something else")
    header, timed = kinds["run"][0], False
    for number, line in enumerate(lines, 1):
        if words := problem_of(line, timed=timed):
            raise RecordError(f"{file} is not a valid record: {words} in line {number}")
        timed = is_timed(header)  # from the second line on, when the header has been checked
    try:
        steps = [StepRecord.from_line(line) for line in kinds["step"]]
    except ValueError as problem:
        raise RecordError(f"{file} is not a valid record: {problem}") from None
    return Run(header, steps, kinds["metric"], kinds["end"][-1] if kinds["end"] else None, file.parent)


def _read_lines(file: Path) -> list[Line]:
    try:
        if file.exists() and not file.is_file():  # a pipe or a device may never end
            raise RecordError(f"{file} must be a regular file, got something else")
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rb") as opened:
            raw = opened.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise RecordError(f"{file} is too large for a record: more than {LARGEST:,} bytes")
        text = raw.decode()
    except OSError as problem:
        raise RecordError(f"{file} must be readable, got {problem.strerror or problem}") from problem
    except (EOFError, UnicodeDecodeError, zlib.error) as problem:
        raise RecordError(f"{file} must be a gradsieve record, got {problem}") from problem
    whole = text.split("\n")[:-1]  # text after the last line's end was cut off by a crash
    lines = []
    for number, line in enumerate(whole, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise RecordError(
                f"{file} must hold one JSON object a line, got {line[:40]!r} in line {number}"
            ) from None
        if not isinstance(value, dict):
            raise RecordError(f"{file} must hold one JSON object a line, got {line[:40]!r} in line {number}")
        lines.append(value)
    return lines


def cut_back(folder: Path, step: int, settings: Mapping[str, Any], launch: Sequence[str] = ()) -> Run:
    """Remove what was recorded after `step` steps: the run resumes from there, with these settings, by `launch`."""
    run = read_run(folder)
    header = {**run.header, "settings": dict(settings)}
    if launch:
        header["launch"] = sorted({*run.header.get("launch", []), *launch})
    steps = [each for each in run.steps if each.step < step]
    metrics = [line for line in run.metrics if line["step"] <= step]
    lines = [header, *sorted([*(each.to_line() for each in steps), *metrics], key=_order)]
    write_whole(folder / NAME, "".join(to_line(line) for line in lines))
    return Run(header, steps, metrics, None, folder)


def _order(line: Line) -> tuple[int, bool]:
    """Sort key of a line: a metric after n steps comes before step n."""
    return (line["step"], line["kind"] == "step")
