"""Records, labels and tables from strangers: refused in one sentence, or shown without harm."""

import fcntl
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from lines import HEADER, metric, step

from gradsieve._check import BadInput
from gradsieve_lab import launch
from gradsieve_lab._files import try_lock, write_whole
from gradsieve_lab.cli.runs import _print_results
from gradsieve_lab.report import page, render, write_csv
from gradsieve_lab.runs.records import NAME, Run, read_run
from gradsieve_lab.runs.running import _locked
from gradsieve_lab.runs.summary import summarise_all

ODD: list[Any] = [None, True, -1, 0, 1e308, 10**30, "", "x", "<script>", [], [1], {}, {"a": 1}]


def _record(folder: Path, lines: list[Any]) -> Run:
    (folder / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def _lines(**settings: Any) -> list[dict[str, Any]]:
    header = {**HEADER, "settings": {**HEADER["settings"], **settings}}
    return [json.loads(json.dumps(line)) for line in (header, metric(0, 0.1), step(0), step(1), metric(2, 0.5))]


def _timed(sparsifier: str) -> list[dict[str, Any]]:
    """A finished run of limited time: such runs are also compared at equal times."""
    end = {"kind": "end", "reason": "finished", "step": 2}
    return [*_lines(sparsifier=sparsifier, seconds=10.0), end]


def test_mutated_records_are_refused_or_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_plotly", lambda: "")
    beside = _record(tmp_path, _timed("share"))
    chance, refused = random.Random(0), 0
    words: list[str] = []
    for _ in range(300):
        lines = _timed("dense")
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
            render([run, beside])
        except BadInput as error:
            refused += 1
            words.append(str(error))
    assert 40 < refused < 300
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


@pytest.mark.parametrize(
    ("number", "key", "words"),
    [
        (0, "sparsifier", "sparsifier is missing in line 1"),
        (1, "seconds", "seconds is missing in line 2"),
        (4, "bytes", "bytes is missing in line 5"),
    ],
)
def test_runs_of_limited_time_have_what_their_comparison_needs(
    tmp_path: Path, number: int, key: str, words: str
) -> None:
    lines = _timed("dense")
    del (lines[number]["settings"] if number == 0 else lines[number])[key]
    with pytest.raises(BadInput, match=words):
        _record(tmp_path, lines)
    lines = _lines()  # without a limit in time they are not needed
    lines[1].pop("seconds")
    assert _record(tmp_path, lines).steps


def test_the_name_of_a_metric_cannot_harm_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines()
    lines[0]["metric"]["name"] = "best\x1b[2J[/x]"
    _print_results([_record(tmp_path, lines)], False)
    printed = capsys.readouterr().out
    assert "\x1b[2J" not in printed
    assert "[/x]" in printed


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe without a writer, or a device without an end, would be waited for."""
    with pytest.raises(BadInput, match="must be a regular file"):
        read_run(Path(os.devnull))
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(BadInput, match="must be a regular file"):
        read_run(tmp_path)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / f".{NAME}.{os.getpid()}").symlink_to(tmp_path / "other")
    write_whole(tmp_path / NAME, "new")
    assert (tmp_path / "other").read_text() == "kept"
    assert (tmp_path / NAME).read_text() == "new"


def test_a_run_folder_belongs_to_one_process(tmp_path: Path) -> None:
    held = try_lock(tmp_path / ".lock")
    assert held is not None
    with pytest.raises(BadInput, match="is in use by another process"), _locked(tmp_path):
        pass
    os.close(held)
    for _ in range(2):  # it ends with the run
        with _locked(tmp_path):
            assert try_lock(tmp_path / ".lock") is None


def test_a_lock_that_is_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner ends between the opening and the locking of the file: two processes must not both have a lock."""
    path, plain, removed = tmp_path / ".lock", fcntl.flock, list[int]()

    def flock(descriptor: int, kind: int) -> None:
        plain(descriptor, kind)
        if not removed:
            path.unlink()
            removed.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", flock)
    held = try_lock(path)
    assert removed
    assert held is not None
    assert os.path.samestat(os.fstat(held), path.stat())
    assert try_lock(path) is None
    os.close(held)


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
