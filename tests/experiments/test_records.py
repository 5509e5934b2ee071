"""Records: strict JSON lines, valid at any time."""

import gzip
import json
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lines import HEADER, metric, step

from gradsieve_lab.runs.records import NAME, Recorder, RecordError, cut_back, read_run
from gradsieve_lab.runs.step_record import Exchange, Measured, StepRecord


def test_what_is_added_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.add([HEADER, metric(0, 0.1), step(0)])
    recorder.add([step(1), metric(2, 0.5), {"kind": "end", "reason": "finished", "step": 2}])
    run = read_run(tmp_path)
    assert run.header == HEADER
    assert [line.step for line in run.steps] == [0, 1]
    assert [line["value"] for line in run.metrics] == [0.1, 0.5]
    assert run.end == {"kind": "end", "reason": "finished", "step": 2}
    assert run.metric.show(0.5) == "50.0 %"
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / f"{NAME}.gz").write_bytes(gzip.compress((tmp_path / NAME).read_bytes()))
    assert read_run(packed).steps == run.steps


def test_numbers_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    Recorder(tmp_path).add([HEADER, step(0, loss=math.nan, seconds={"step": math.inf})])
    for line in (tmp_path / NAME).read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert read_run(tmp_path).steps[0].loss is None


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    Recorder(tmp_path).add([HEADER, step(0), step(1)])
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(text[:-20])
    assert [line.step for line in read_run(tmp_path).steps] == [0]


def test_after_a_failed_write_the_record_is_as_before(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.add([HEADER, step(0)])
    before = recorder.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 17, limits[1]))  # room for 17 bytes more
    try:
        with pytest.raises(RecordError, match=r"records\.jsonl could not be written: File too large"):
            recorder.add([step(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert recorder.path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "must hold a record, got no records.jsonl in it"),
        ("", "must be a gradsieve record of version 1"),
        ("hello\n", "must hold one JSON object a line, got 'hello' in line 1"),
        ("[1]\n", "must hold one JSON object a line, got '[1]' in line 1"),
        ('{"kind": "step"}\n', "must be a gradsieve record, got kind 'step' in line 1"),
        ('{"kind": "run", "version": 7}\n', "must be a gradsieve record of version 1"),
        ('{"kind": "run", "version": 1, "name": "x"}\n', "command is missing in line 1"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / NAME).write_text(content)
    with pytest.raises(RecordError) as caught:
        read_run(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", gzip.compress(b"x" * 99)[:20], b"no gzip"], ids=["bytes", "cut", "text"]
)
def test_unreadable_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / f"{NAME}.gz"
    file.write_bytes(content)
    with pytest.raises(RecordError, match="must be"):
        read_run(file)


def test_going_on_takes_back_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    Recorder(tmp_path).add([HEADER, metric(0, 0.1), step(0), step(1), metric(2, 0.2), step(2), metric(3, 0.3)])
    run = cut_back(tmp_path, 2, HEADER["settings"] | {"workers": 8})
    assert read_run(tmp_path) == run
    assert [line.step for line in run.steps] == [0, 1]
    assert [line["step"] for line in run.metrics] == [0, 2]
    assert run.settings["workers"] == 8
    kinds = [json.loads(line)["kind"] for line in (tmp_path / NAME).read_text().splitlines()]
    assert kinds == ["run", "metric", "step", "step", "metric"]


@pytest.mark.parametrize(
    "changes",
    [
        {"density": None},
        {"k": "ten"},
        {"union": 1.5},
        {"finite": 1},
        {"loss": "low"},
        {"seconds": None},
        {"seconds": [1]},
    ],
)
def test_a_step_with_something_else_in_place_of_a_number_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    Recorder(tmp_path).add([HEADER, step(0), step(1, **changes)])
    with pytest.raises(RecordError, match=f"not a valid record: {next(iter(changes))} is"):
        read_run(tmp_path)


def test_a_step_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    exchange = Exchange(True, 0.01, 10, 10, 12, 1.5, None, 0.25, 3)
    own = Measured(loss=1.5, bytes=100.0, forward_s=0.25, step_s=0.5)
    made = StepRecord.of(4, 0.1, exchange, Measured.mean([own, replace(own, loss=2.5)]))
    assert (made.loss, made.error, made.seconds["step"]) == (2.0, None, 0.5)
    Recorder(tmp_path).add([HEADER, made.to_line()])
    assert read_run(tmp_path).steps == [made]
