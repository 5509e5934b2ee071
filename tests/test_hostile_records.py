"""Records, labels and tables from strangers: refused in one sentence, or shown without harm."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from lines import HEADER, metric, step

from gradsieve._check import BadInput
from gradsieve_lab import launch
from gradsieve_lab._files import try_lock
from gradsieve_lab.report import render, write_csv
from gradsieve_lab.runs.records import NAME, Run, read_run
from gradsieve_lab.runs.running import _locked
from gradsieve_lab.runs.summary import summarise_all

ODD: list[Any] = [None, True, -1, 0, 1e308, 10**30, "", "x", "<script>", [], [1], {}, {"a": 1}]


def _record(folder: Path, lines: list[Any]) -> Run:
    (folder / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def _lines() -> list[dict[str, Any]]:
    return [json.loads(json.dumps(line)) for line in (HEADER, metric(0, 0.1), step(0), step(1), metric(2, 0.5))]


def test_mutated_records_are_refused_or_summarised(tmp_path: Path) -> None:
    chance, refused = random.Random(0), 0
    words: list[str] = []
    for _ in range(150):
        lines = _lines()
        target = chance.choice(lines)
        if chance.random() < 0.4:
            inner = [value for value in target.values() if isinstance(value, dict) and value]
            target = chance.choice(inner) if inner else target
        key = chance.choice(sorted(target))
        if chance.random() < 0.2:
            del target[key]
        else:
            target[key] = chance.choice(ODD)
        try:
            run = _record(tmp_path, lines)
            summarise_all([run])
            write_csv([run], tmp_path / "csv")
        except BadInput as error:
            refused += 1
            words.append(str(error))
    assert 20 < refused < 150
    assert not any("\n" in each for each in words)


def test_names_cannot_harm_terminals_pages_or_spreadsheets(tmp_path: Path) -> None:
    lines = _lines()
    lines[0]["name"] = '=HYPERLINK("x")\x1b[31m<script>alert(1)</script>'
    run = _record(tmp_path, lines)
    assert "\x1b" not in run.name
    assert "<script>alert(1)" not in render([run])
    write_csv([run], tmp_path / "csv")
    cells = (tmp_path / "csv" / "summary.csv").read_text().splitlines()[1]
    assert cells.startswith("\"'=HYPERLINK")


def test_a_run_folder_belongs_to_one_process(tmp_path: Path) -> None:
    held = try_lock(tmp_path / ".lock")
    assert held is not None
    with pytest.raises(BadInput, match="is in use by another process"), _locked(tmp_path):
        pass
    os.close(held)
    for _ in range(2):  # it ends with the run
        with _locked(tmp_path):
            assert try_lock(tmp_path / ".lock") is None


def test_scratch_folders_of_living_owners_stay(tmp_path: Path) -> None:
    """Whatever their process number: it may be of another PID namespace."""
    mine = tmp_path / "gradsieve-999999-1-abcdef"
    mine.mkdir()
    assert not launch._abandoned(mine)  # just being made
    held = try_lock(mine / "lock")
    assert held is not None
    assert not launch._abandoned(mine)
    os.close(held)
    assert launch._abandoned(mine)
