"""A run in one row."""

from pathlib import Path

import pytest
from lines import HEADER, metric, record

from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.summary import summarise


def test_every_figure() -> None:
    steps = [
        record(
            0, density=0.010, selected=10, collectives=5, error=4.0, residual_norm=2.0, imbalance=1, buildup=1.0
        ),
        record(
            1, density=0.020, selected=20, collectives=3, error=9.0, residual_norm=3.0, imbalance=2, buildup=2.0
        ),
    ]
    row = summarise(Run(HEADER, steps, [metric(0, 0.9), metric(2, 0.5)], None, Path()))
    assert (row.metric_best, row.metric_last, row.metric_name) == (0.9, 0.5, "accuracy")
    assert row.density_mean == pytest.approx(0.015)
    assert (row.density_max, row.density_last, row.density_within_5pct) == (0.02, 0.02, 0.5)
    assert (row.selected_total, row.collectives_per_step, row.imbalance_mean, row.buildup_mean) == (30, 4, 1.5, 1.5)
    assert (row.bytes_total, row.bytes_per_step) == (200, 100)
    assert row.compression == 2 * 3 / 4 * 4000 / 100
    assert (row.total_error, row.residual_norm_last) == (13, 3)
    assert (row.forward_ms, row.step_ms) == (1, 11)
    assert row.seconds == pytest.approx(0.022)
    assert row.end == "unfinished"


def test_rounds_of_some_steps_only_are_part_of_the_times() -> None:
    rare = [
        record(i, collectives=3 if i == 2 else 0, seconds={"communicate": 0.4 if i == 2 else 0.0}) for i in range(4)
    ]
    always = [record(i, collectives=3, seconds={"communicate": 0.4 if i == 2 else 0.0}) for i in range(4)]
    assert summarise(Run(HEADER, rare, [], None, Path())).communicate_ms == pytest.approx(100)
    assert summarise(Run(HEADER, always, [], None, Path())).communicate_ms == 0


def test_lower_can_be_better() -> None:
    header = HEADER | {"metric": {"name": "perplexity", "higher_is_better": False, "percent": False}}
    row = summarise(Run(header, [record(0)], [metric(0, 9.0), metric(1, 7.0), metric(2, 8.0)], None, Path()))
    assert row.metric_best == 7.0


def test_a_run_that_never_began() -> None:
    row = summarise(Run(HEADER, [], [], {"kind": "end", "reason": "stopped", "step": 0}, Path()))
    assert (row.steps, row.metric_last, row.compression, row.total_error, row.end) == (
        0,
        None,
        None,
        None,
        "stopped",
    )
