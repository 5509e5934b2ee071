"""Every law holds on a device: the same functions as on a CPU, with tensors that live there."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from on_sim import SimGroup, put_replicas_on_device

from helpers import KINDS, Group, gradients
from laws import (
    test_density_one,
    test_exclusive,
    test_non_finite,
    test_nothing_lost,
    test_reported_threshold,
    test_share_laws,
    test_state,
)

MODULES: list[ModuleType] = [
    test_density_one,
    test_exclusive,
    test_non_finite,
    test_nothing_lost,
    test_reported_threshold,
    test_state,
]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "Group", SimGroup, raising=False)
    put_replicas_on_device(monkeypatch)


def test_nothing_is_lost(sparsifier: str) -> None:
    group = SimGroup(sparsifier, 0.05, 2)
    for step, kind in enumerate(KINDS):
        group.step_lawfully(gradients(kind, 100, 2, step))


def test_device_and_cpu_agree_to_the_last_bit(sparsifier: str) -> None:
    """Kernels in plain torch on the one, Numba on the other; and on a device candidates are not looked for."""
    check_same(sparsifier, "fp32")


NARROW = [(name, values) for name in ("exdyna", "topk", "oktopk") for values in ("bf16", "fp8")]


@pytest.mark.parametrize(
    ("name", "values"),
    [*NARROW[1:3], *(pytest.param(*each, marks=pytest.mark.slow) for each in (NARROW[:1] + NARROW[3:]))],
)
def test_so_they_do_with_narrow_values(name: str, values: str) -> None:
    check_same(name, values)


def check_same(name: str, values: str) -> None:
    there, here = SimGroup(name, 0.02, 2, values=values), Group(name, 0.02, 2, values=values)
    for step in range(12):
        grads = gradients("heavy tails" if step % 5 == 3 else "normal", 1_500, 2, step)
        assert torch.equal(there.step(grads)[0], here.step(grads)[0]), f"step {step}"
        assert there.reports[0].counts == here.reports[0].counts


def test_a_bad_gradient_is_skipped(sparsifier: str) -> None:
    test_non_finite.test_no_additional_collective(sparsifier)


def test_density_one_is_the_mean(sparsifier: str) -> None:
    test_density_one.test_equals_the_mean(sparsifier, 33, 2)


def test_thresholds(sparsifier: str) -> None:
    test_reported_threshold.test_the_threshold_of_this_step(sparsifier)


def test_exclusive_picks(exclusive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_exclusive.test_picks_are_disjoint(exclusive, 3, monkeypatch)


def test_states(sparsifier: str) -> None:
    test_state.test_state_before_the_first_step(sparsifier)
    test_state.test_state_is_a_copy(sparsifier)


def test_share(sparsifier: str) -> None:
    test_share_laws.test_every_sparsifier_that_can(sparsifier, "fp32")


def test_share_with_weights_that_are_not_finite() -> None:
    """Those of exdyna are in test_late_rounds.py."""
    for name in ("topk", "dense"):
        test_share_laws.test_weights_that_are_not_finite(name, math.inf)


SLOW_DTYPES = [pytest.param(each, marks=pytest.mark.slow) for each in (torch.float32, torch.float16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, *SLOW_DTYPES])
def test_share_of_other_types(dtype: torch.dtype) -> None:
    workers = test_share_laws.Workers(3, 0.05, "exdyna", dtype=dtype, delay=1)
    for step in range(5):
        workers.compute(step)
        test_share_laws.check_round(workers)


SLOW: list[tuple[Any, ...]] = [
    (test_nothing_lost.test_every_kind_of_gradient, 33, (3,)),
    (test_nothing_lost.test_update_is_zero_where_nothing_was_sent,),
    (test_non_finite.test_step_is_called_off_everywhere, 2, math.nan),
    (test_state.test_state_follows_the_loss_scale,),
    (test_share_laws.test_every_sparsifier_that_can, "fp8"),
    (test_nothing_lost.test_everything_is_sent_in_the_end,),
    (test_nothing_lost.test_large_vectors, 32_769),
    (test_state.test_shared_state_is_identical_after_200_steps,),
    (test_state.test_saved_and_loaded_equals_never_stopped,),
    (test_state.test_a_state_of_another_world_size_keeps_what_does_not_depend_on_it,),
    (test_non_finite.test_step_is_called_off_everywhere, 5, math.inf),
    (test_non_finite.test_other_dtypes, torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize("law", SLOW, ids=lambda law: law[0].__name__)
def test_the_longer_laws(sparsifier: str, law: tuple[Any, ...]) -> None:
    law[0](sparsifier, *law[1:])
