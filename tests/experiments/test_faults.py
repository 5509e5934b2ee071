"""The campaign's quick form, in part, within a minute: everything that is tried must survive."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from studies.faults.commands import births, outlived
from studies.faults.corruption import EVERY, Trial, share_trial, trial
from studies.faults.elastic import FEWEST, MOST, disturbed, prepare
from studies.faults.elastic_worker import WAYS, Job

from helpers import ROOT

_ONLY = ("damaged files", "kill a worker")


def _campaign(*words: str) -> int:
    """How many trials survived: all of them."""
    command = [sys.executable, "-m", "studies.faults", "--quick", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert done.returncode == 0
    return sum(row["survived"] for row in found["kinds"])


def test_a_part_of_the_quick_campaign() -> None:
    words = [word for name in _ONLY for word in ("--only", name)]
    assert _campaign("--trials", "4", "--seconds", "10", *words) >= 1


@pytest.mark.slow
def test_the_quick_campaign() -> None:
    assert _campaign() >= 10


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_workers_leave_and_join_under_torchrun(way: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    found = disturbed(Job(str(tmp_path), "disturbed", way, 400, pause=0.1), 3, random.Random(0))
    assert len(found["events"]) == 3
    assert all(FEWEST <= event["workers"] <= MOST for event in found["events"])
    assert found["accuracy"] > 0.8


def test_a_process_that_outlives_its_torchrun_is_found() -> None:
    process = subprocess.Popen(["sleep", "60"])
    born = births([process.pid])
    assert outlived(born, patience=0.1) == [process.pid]
    process.wait()
    assert outlived(born) == []
    assert outlived({1: "at another time"}) == [], "a number that is used again"


@pytest.mark.parametrize("where", ["shared", "weights"])
def test_flipped_bits_of_what_is_agreed_on_are_found_in_time(where: str) -> None:
    for seed in range(5):
        outcome, steps, _ = share_trial("shared", seed) if where == "shared" else trial(where, seed)
        assert outcome == "found"
        assert steps is not None
        assert steps <= EVERY


@pytest.mark.parametrize("flipped", [trial, share_trial])
def test_a_bit_flipped_before_a_sum_is_alike_on_all_and_not_seen(flipped: Callable[[str, int], Trial]) -> None:
    """Whatever the bit: no comparison of replicas can find it."""
    found = [flipped("part of a sum", seed) for seed in range(5)]
    assert all(bit >= 0 for _, _, bit in found), "a bit was flipped"
    assert not [outcome for outcome, _, _ in found if outcome == "found"]


@pytest.mark.parametrize("flipped", [trial, share_trial])
def test_of_bits_flipped_in_a_sum_only_the_lowest_are_not_seen(flipped: Callable[[str, int], Trial]) -> None:
    """They are below the precision of the weights that they would change."""
    found = [flipped("message", seed) for seed in range(12)]
    assert all(bit < 10 for outcome, _, bit in found if outcome == "not seen")
    assert [outcome for outcome, _, _ in found if outcome == "found"]
