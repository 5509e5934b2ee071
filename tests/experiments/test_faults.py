"""The campaign's quick form, in part, within a minute: everything that is tried must survive."""

import json
import subprocess
import sys

from studies.faults.corruption import EVERY, trial

from helpers import ROOT

_ONLY = ("damaged files", "kill a worker")


def test_a_part_of_the_quick_campaign() -> None:
    words = [sys.executable, "-m", "studies.faults", "--quick", "--json", "--trials", "8", "--seconds", "25"]
    for name in _ONLY:
        words += ["--only", name]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert done.returncode == 0
    assert sum(row["survived"] for row in found["kinds"]) >= 1


def test_flipped_bits_in_weights_are_found_in_time() -> None:
    for seed in range(5):
        outcome, steps = trial("weights", seed)
        assert outcome == "found"
        assert steps is not None
        assert steps <= EVERY
