"""The campaign's quick form, in part, within a minute: everything that is tried must survive."""

import json
import subprocess
import sys

import pytest
from studies.faults.corruption import EVERY, share_trial, trial

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


@pytest.mark.parametrize("where", ["shared", "weights"])
def test_flipped_bits_of_what_is_agreed_on_are_found_in_time(where: str) -> None:
    for seed in range(5):
        outcome, steps = share_trial("shared", seed) if where == "shared" else trial(where, seed)
        assert outcome == "found"
        assert steps is not None
        assert steps <= EVERY
