"""The sentence on runs of equal time: true whoever won."""

from pathlib import Path
from typing import Any

import pytest

from gradsieve_lab.report.race import at_step, reached, verdict
from gradsieve_lab.runs.records import Run

ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}


def run(name: str, *points: tuple[float, float, float]) -> Run:
    """A run with (seconds, bytes, value) of its evaluations."""
    metrics = [
        {"kind": "metric", "step": step, "value": value, "seconds": seconds, "bytes": sent}
        for step, (seconds, sent, value) in enumerate(points)
    ]
    header: dict[str, Any] = {"name": name, "settings": {"sparsifier": name, "seconds": 10.0}, "metric": ACCURACY}
    return Run(header, [], metrics, {"reason": "finished"}, Path())


DENSE = run("dense", (0, 0, 0.1), (5, 500, 0.8), (10, 1000, 0.9))
QUICK = run("share", (0, 0, 0.1), (2, 10, 0.9), (10, 50, 0.95))
SLOW = run("exdyna", (0, 0, 0.1), (5, 10, 0.5), (10, 20, 0.8))
NEVER = run("exdyna", (0, 0, 0.0), (10, 20, 0.0))
SLOW_BUT_GOOD = run("share", (0, 0, 0.1), (10, 20, 0.9))
PEER = run("powersgd", (0, 0, 0.1), (1, 20, 0.91), (10, 200, 0.92))


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (
            [DENSE, QUICK, SLOW],
            "share is as good as plain DDP 5.0 times sooner and with 100 times fewer bytes (90.0 % accuracy after "
            "2 s instead of 10 s), and ends at 95.0 % accuracy when the time is up.",
        ),
        (
            [DENSE, SLOW],
            "nothing sparse is as good as plain DDP (90.0 % accuracy) in equal time: exdyna comes closest with "
            "80.0 % accuracy, which plain DDP had after 5 s.",
        ),
        ([DENSE], ""),
        ([QUICK, SLOW], ""),
    ],
)
def test_verdict(runs: list[Run], said: str) -> None:
    assert verdict(runs, [each.name for each in runs]) == said


def test_zeros_are_values() -> None:
    """A perplexity or a loss of 0 is the best, and plain DDP may be as good as its end before it sends anything."""
    start = run("dense", (0, 0, 0.9), (10, 1000, 0.9))
    assert "is as good as plain DDP later and with more bytes" in verdict(
        [start, SLOW_BUT_GOOD], ["dense", "share"]
    )
    none = run("topk", (0, 0, 0.0))
    none.metrics[-1]["value"] = None
    assert "exdyna comes closest with 0.0 % accuracy" in verdict([DENSE, none, NEVER], ["dense", "topk", "exdyna"])


def test_a_peer_that_was_sooner_is_named() -> None:
    said = verdict([DENSE, QUICK, PEER], ["dense", "share", "powersgd"])
    assert said.endswith("; powersgd is there sooner still, after 1 s.")


def test_dense_is_measured_by_when_it_was_there_not_by_its_end() -> None:
    early = run("dense", (0, 0, 0.1), (2, 500, 0.9), (10, 1000, 0.9))
    said = verdict([early, QUICK], ["dense", "share"])
    assert said.startswith("share is as good as plain DDP at the same time and with 50 times fewer bytes")


def test_equal_steps() -> None:
    assert at_step(QUICK, 1) == 0.9
    assert reached(SLOW, 0.99) is None
