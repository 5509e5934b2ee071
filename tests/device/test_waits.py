"""How often the host waits for a device in a step: counted for every sparsifier, and written down in the docs."""

import re

import pytest
import torch
from on_sim import SimGroup, put_replicas_on_device

from gradsieve import SPARSIFIERS, Budget, make_sparsifier
from helpers import LIBRARY, ROOT, gradients
from sim_device import Watch, watch
from virtual_replicas import Workers

TEXT = (ROOT / "docs" / "host-syncs.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+|-) \|", TEXT, re.MULTILINE)
GRADIENTS = {name: int(steps) for name, steps, _ in ROWS}
SHARE = {name: int(rounds) for name, _, rounds in ROWS if rounds != "-"}
WORLD, FIRST, LAST = 2, 10, 16  # steps that are counted: thresholds have settled

# The only functions that read a tensor on a device in a step, through `ops.read` or an operation that waits itself.
PLACES = {
    "comm/exchange.py:gather_picks",
    "comm/exchange.py:is_finite",
    "comm/exchange.py:merged",
    "comm/exchange.py:reduce_at",
    "comm/exchange.py:summed",
    "ops/reference.py:_true",
    "reducer.py:SparseReducer._finish",
    "share/rounds.py:_checked",
    "share/rounds.py:_whole",
    "sparsifiers/deft.py:DEFT.select",
    "sparsifiers/dgc.py:DGC.select",
    "sparsifiers/dgc.py:sampled_threshold",
    "sparsifiers/histograms.py:gather",
    "sparsifiers/gaussiank.py:moments",
    "sparsifiers/oktopk.py:OkTopk.exchange",
    "sparsifiers/oktopk.py:OkTopk.select",
    "sparsifiers/oktopk.py:agree_on_bounds",
    "sparsifiers/oktopk.py:kth_largest",
    "sparsifiers/oktopk.py:own_bounds",
    "sparsifiers/oktopk.py:split_and_reduce",
    "sparsifiers/sage.py:SAGE._sampled",
    "sparsifiers/shared_threshold.py:SharedThreshold.select",
    "sparsifiers/shared_threshold.py:largest_beside",
    "sparsifiers/sidco.py:_gamma",
    "sparsifiers/sidco.py:_number",
    "sparsifiers/sidco.py:fit_threshold",
}


def check_places(seen: Watch) -> None:
    assert set(seen.places) <= PLACES


def most_waits(group: SimGroup, n: int = 2_000) -> int:
    """Per worker, in the step that has most."""
    for reducer in group.reducers:
        reducer.measure = False
    most = 0
    for step in range(LAST):
        with watch() as seen:
            group.step(gradients("normal", n, WORLD, step))
        if step:
            check_places(seen)
        if step >= FIRST:
            most = max(most, len(seen))
    return -(-most // WORLD)


def test_steps(sparsifier: str) -> None:
    if sparsifier not in SPARSIFIERS or sparsifier not in GRADIENTS:
        pytest.skip("the example's sparsifier has no row in the docs")
    assert most_waits(SimGroup(sparsifier, 0.02, WORLD)) == GRADIENTS[sparsifier]


@pytest.mark.parametrize("name", ["exdyna", "micro"])
def test_two_in_a_step_of_exdyna_whatever_happens(name: str) -> None:
    """Not only where thresholds have settled: with a budget, narrow values, uneven work, in the first steps."""
    groups = [
        SimGroup(name, 0.02, WORLD, values="fp8"),
        SimGroup(name, Budget(0.02, total_steps=100), WORLD),
    ]
    for group in groups:
        for reducer in group.reducers:
            reducer.measure = False
        for step in range(12):
            grads = [grad * torch.linspace(0, 5, 2_000).exp() for grad in gradients("normal", 2_000, WORLD, step)]
            with watch() as seen:
                group.step(grads)
            assert len(seen) == 2 * WORLD or not step  # in the first, settings are compared
            assert not step or set(seen.places) == {
                "sparsifiers/histograms.py:gather",
                "comm/exchange.py:reduce_at",
            }


def test_rounds_of_share(sparsifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if make_sparsifier(sparsifier).for_gradients_only() or sparsifier not in SHARE:
        assert sparsifier not in SHARE
        return
    put_replicas_on_device(monkeypatch)
    workers, most = Workers(WORLD, 0.05, sparsifier), 0
    for step in range(LAST):
        workers.compute(step)
        with watch() as seen:
            workers.driver.after_step()
        if step:
            check_places(seen)
        if step >= FIRST:
            most = max(most, len(seen))
    assert -(-most // WORLD) == SHARE[sparsifier]


def test_every_sparsifier_has_a_row() -> None:
    own = {"cyclick"}  # the example's
    assert set(GRADIENTS) == set(LIBRARY) - own
    assert GRADIENTS["exdyna"] <= 2
