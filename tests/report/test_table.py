"""The summary table and the sentence above it."""

from dataclasses import replace

import pytest
from report_runs import four_runs, make_run

from gradsieve_lab.report.style import NEUTRAL, Shown
from gradsieve_lab.report.table import Table, make_table, size, times
from gradsieve_lab.report.words import sentence
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.summary import Summary, summarise, summarise_all
from gradsieve_lab.tasks.base import Metric

ACCURACY = Metric("accuracy", True, percent=True)
PERPLEXITY = Metric("perplexity", False)


def table(runs: list[Run], metric: Metric = ACCURACY) -> Table:
    shown = [Shown(run, run.name, NEUTRAL, i) for i, run in enumerate(runs)]
    return make_table(shown, [summarise(run) for run in runs], metric)


def column(found: Table, group: str, head: str) -> list[tuple[str, bool]]:
    groups = [name for name, width in found.groups for _ in range(width)]
    place = list(zip(groups, found.heads, strict=True)).index((group, head))
    return [(cells[place].text, cells[place].best) for _, cells, _ in found.rows]


def made(compression: float | None = 1.0, last: float | None = 0.9) -> Summary:
    return replace(summarise(make_run("exdyna", steps=2)), metric_last=last, compression=compression)


def test_columns_and_the_best_of_each() -> None:
    found = table(four_runs())
    assert [name for name, _ in found.groups] == [
        "accuracy",
        "density",
        "sent by a worker",
        "median time of a step (ms)",
        "error",
    ]
    assert sum(width for _, width in found.groups) == len(found.heads) == 13
    assert column(found, "accuracy", "best")[0][1]
    assert [text for text, _ in column(found, "density", "mean")][::2] == ["100 %", "100 %"]
    assert [best for _, best in column(found, "density", "mean")] == [False, False, False, True]
    assert [text for text, _ in column(found, "sent by a worker", "vs dense")] == ["1.0x", "18x", "45x", "47x"]
    assert column(found, "error", "total")[0] == ("—", False)


def test_a_lower_metric_may_be_better() -> None:
    metric = {"name": "perplexity", "higher_is_better": False, "percent": False}
    runs = [make_run("dense", final=31.0, metric=metric), make_run("topk", final=35.0, metric=metric)]
    assert [best for _, best in column(table(runs, PERPLEXITY), "perplexity", "last")] == [True, False]


def test_the_gain_kept_stands_beside_the_metric() -> None:
    runs = [make_run("dense", final=0.95), make_run("alone", final=0.85), make_run("topk", final=0.90)]
    shown = [Shown(run, run.name, NEUTRAL, i) for i, run in enumerate(runs)]
    found = make_table(shown, summarise_all(runs), ACCURACY)
    dense, alone, topk = (text for text, _ in column(found, "accuracy", "gain kept"))
    assert (dense, alone) == ("100 %", "0 %")
    assert 40 < int(topk.removesuffix(" %")) < 60
    assert "gain kept" not in table(runs).heads  # each was summarised on its own


def test_nothing_is_best_alone_or_among_equals() -> None:
    for runs in ([make_run("exdyna")], [make_run("exdyna"), make_run("exdyna")]):
        assert not any(cell.best for _, cells, _ in table(runs).rows for cell in cells)


def test_a_short_run_does_not_win_by_its_sums() -> None:
    found = table([make_run("topk"), make_run("exdyna", steps=5, end="stopped"), make_run("topk")])
    assert not any(best for _, best in column(found, "sent by a worker", "in total"))
    assert [end for *_, end in found.rows] == ["", "stopped after 5 steps", ""]


def test_a_run_without_steps_has_dashes() -> None:
    found = table([make_run("exdyna"), replace(make_run("topk"), steps=[], metrics=[], end=None)])
    assert {cell.text for cell in found.rows[1][1]} == {"—"}
    assert found.rows[1][2] == "unfinished after 0 steps"


def test_units() -> None:
    assert [size(value) for value in (0, 999.4, 999.6, 1e6, 2.5e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1 MB",
        "2500 TB",
    ]
    assert [times(value) for value in (0.5, 9.96, 41.4)] == ["0.5x", "10x", "41x"]


@pytest.mark.parametrize(
    ("labels", "rows", "metric", "said"),
    [
        (
            ["dense", "topk", "exdyna"],
            [made(1.0, 0.977), made(18.0, 0.975), made(41.2, 0.973)],
            ACCURACY,
            "exdyna ends at 97.3 % accuracy, 0.4 points below dense, with 41 times fewer bytes.",
        ),
        (
            ["dense", "topk", "exdyna"],
            [made(1.0, 0.977), made(18.0, 0.90), made(41.2, 0.85)],
            ACCURACY,
            "topk ends at 90.0 % accuracy, 7.7 points below dense, with 18 times fewer bytes.",
        ),
        (
            ["dense", "topk"],
            [made(1.0, 30.0), made(0.5, 30.15)],
            PERPLEXITY,
            "topk ends at perplexity 30.15, 0.5 % above dense, with 2.0 times as many bytes.",
        ),
        (
            ["dense", "topk"],
            [made(1.0, 0.97), made(18.0, 0.97)],
            ACCURACY,
            "topk ends at 97.0 % accuracy, the same as dense, with 18 times fewer bytes.",
        ),
        (["topk", "exdyna"], [made(None, None), made(None, float("nan"))], ACCURACY, "2 runs, not evaluated yet."),
    ],
)
def test_the_sentence(labels: list[str], rows: list[Summary], metric: Metric, said: str) -> None:
    assert sentence(labels, [replace(row, virtual=True) for row in rows], metric) == said
    longer = [
        replace(row, virtual=False, seconds=150.0 if label == "dense" else 92.0)
        for label, row in zip(labels, rows, strict=True)
    ]
    timed = said[:-1] + " and in 1 min 32 s instead of 2 min 30 s." if "dense" in labels else said
    assert sentence(labels, longer, metric) == timed


def test_a_run_that_was_stopped_is_not_compared() -> None:
    """After 124 of 3,000 steps nobody is 84.8 points below anybody."""
    rows = [made(1.0, 0.98), made(41.2, 0.97), replace(made(80.0, 0.13), end="stopped", steps=124)]
    said = sentence(["dense", "topk", "exdyna"], rows, ACCURACY)
    assert said.startswith("topk ends at 97.0 % accuracy, 1.0 points below dense")
    assert said.endswith("; exdyna was stopped after 124 steps and is not compared.")
    assert "points" not in sentence(["dense", "exdyna"], [rows[0], rows[2]], ACCURACY)


def test_the_sentence_is_not_about_yardsticks() -> None:
    labels, rows = ["dense", "alone", "average every=9", "topk"], [made(1.0), made(None), made(99.0), made(18.0)]
    assert sentence(labels, rows, ACCURACY).startswith("topk ends at")
    assert "the same as dense, without sending anything" in sentence(labels[:2], rows[:2], ACCURACY)


def test_the_sentence_without_dense() -> None:
    assert sentence(["topk", "exdyna"], [made(last=0.8), made()], ACCURACY).startswith("exdyna is the best of 2")
    assert sentence(["dense"], [made()], ACCURACY).startswith("dense ends at 90.0 % accuracy and sends")
