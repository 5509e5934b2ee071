"""The tools behind the measurements."""

from pathlib import Path

import pytest

from gradsieve_lab.bench.timing import Row, side_by_side, spread, write_csv


def row(case: str, median: float) -> Row:
    return Row("b", case, 10, 0.1, 1, median, median, median, "ms")


def test_cases_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    times = side_by_side(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, prepare=lambda: order.append("-")
    )
    assert order == ["-", "a", "-", "b"] * 4
    assert {case: len(values) for case, values in times.items()} == {"a": 3, "b": 3}


def test_spread() -> None:
    assert spread([5.0]) == (5.0, 5.0, 5.0)
    median, low, high = spread([float(i) for i in range(1, 102)])
    assert (median, low, high) == (51.0, 21.0, 81.0)


def test_ratio() -> None:
    found = row("x", 3.0).with_ratio(row("base", 2.0))
    assert (found.ratio, found.against) == (1.5, "base")


def test_csv_replaces_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("old")
    write_csv([row("a", 1.0), row("b", 2.0)], path)
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("benchmark,case,n,")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]


def test_csv_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("old")
    monkeypatch.setattr("gradsieve_lab.bench.timing.conditions", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_csv([row("a", 1.0)], path)
    assert path.read_text() == "old"
