"""Shared state is shared, and a run that was saved and loaded goes on as if it had never stopped."""

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from gradsieve.states import Mark, State
from helpers import Group, assert_same, check_loss_scale, gradients

N, WORLD, DENSITY = 2_000, 4, 0.02


def drifting(step: int) -> list[Tensor]:
    """Gradients whose scale and shape change, so that thresholds and partitions have to move."""
    slope = torch.linspace(0, 3, N) if step % 40 < 20 else torch.linspace(3, 0, N)
    return [grad * slope.exp() * (1 + step % 7) for grad in gradients("normal", N, WORLD, step)]


def test_shared_state_is_identical_after_200_steps(sparsifier: str) -> None:
    group = Group(sparsifier, DENSITY, WORLD)
    for step in range(200):
        group.step(drifting(step))
        if step % 20 == 0:
            assert len({reducer.states.sparsifier.fingerprint() for reducer in group.reducers}) == 1
    for reducer in group.reducers[1:]:
        assert_same(reducer.states.sparsifier.shared_values(), group.reducers[0].states.sparsifier.shared_values())
        assert reducer.step == 200


def test_saved_and_loaded_equals_never_stopped(sparsifier: str) -> None:
    through, first = Group(sparsifier, DENSITY, WORLD), Group(sparsifier, DENSITY, WORLD)
    for step in range(17):
        through.step(drifting(step))
        first.step(drifting(step))
    second = Group(sparsifier, DENSITY, WORLD)
    for reducer, state in zip(second.reducers, first.states(), strict=True):
        reducer.load_state_dict(state_dict=state)
    for step in range(17, 60):
        expected, found = through.step(drifting(step)), second.step(drifting(step))
        assert torch.equal(expected[0], found[0]), f"differs at step {step}"
        assert second.reports[0].counts == through.reports[0].counts
    for expected_state, found_state in zip(through.states(), second.states(), strict=True):
        assert_same(found_state, expected_state)


def test_state_follows_the_loss_scale(sparsifier: str) -> None:
    check_loss_scale(Group(sparsifier, DENSITY, 2), Group(sparsifier, DENSITY, 2))


def test_state_is_plain(sparsifier: str) -> None:
    """Numbers, strings, lists, dicts and tensors: what safetensors and JSON can hold."""
    group = Group(sparsifier, DENSITY, WORLD)
    group.step(drifting(0))

    def leave(tensor: object) -> str:
        assert isinstance(tensor, Tensor)
        return "tensor"

    json.dumps(group.reducers[0].state_dict(), default=leave)


def test_state_is_a_copy(sparsifier: str) -> None:
    group = Group(sparsifier, DENSITY, WORLD)
    group.step(drifting(0))
    saved, again = group.states(), group.states()
    group.step(drifting(1))
    assert_same(dict(enumerate(saved)), dict(enumerate(again)))


def test_state_before_the_first_step(sparsifier: str) -> None:
    fresh, loaded = Group(sparsifier, DENSITY, WORLD), Group(sparsifier, DENSITY, WORLD)
    for reducer, state in zip(loaded.reducers, fresh.states(), strict=True):
        reducer.load_state_dict(state)
    assert torch.equal(fresh.step(drifting(0))[0], loaded.step(drifting(0))[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 1_999, "residual": torch.zeros(1_999)}, "this reducer's n, 2000, got 1999"),
        ({"world_size": 3}, "this reducer's world_size, 4, got 3"),
        ({"rank": 1}, "this reducer's rank, 0, got 1"),
        ({"sparsifier": "other"}, "this reducer's sparsifier"),
        ({"version": 99}, "this reducer's version, 4, got 99"),
        ({"residual": torch.zeros(2_000, dtype=torch.float64)}, "residual must be a float32 vector of 2000"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"state": {"nonsense": 1}}, "state must have the parts"),
    ],
)
def test_foreign_state_changes_nothing(sparsifier: str, change: dict[str, object], words: str) -> None:
    group = Group(sparsifier, DENSITY, WORLD)
    group.step(drifting(0))
    reducer, before = group.reducers[0], group.states()[0]
    other = Group(sparsifier, DENSITY, WORLD)
    other.step(drifting(5))
    with pytest.raises(ValueError, match=words):
        reducer.load_state_dict({**other.states()[0], **change})
    assert_same(reducer.state_dict(), before)


def test_an_older_state_is_called_that() -> None:
    """Its keys differ, too."""
    group = Group("exdyna", DENSITY, WORLD)
    older = {**group.states()[0], "version": 3, "density": 0.1}
    words = "state must have this reducer's version, 4, got 3, of an older Gradsieve: load it with the one"
    with pytest.raises(ValueError, match=words):
        group.reducers[0].load_state_dict(older)


def test_missing_key() -> None:
    group = Group("exdyna", DENSITY, WORLD)
    state = group.states()[0]
    del state["step"]
    with pytest.raises(ValueError, match="state must have the keys"):
        group.reducers[0].load_state_dict(state)


def test_sparsifiers_have_no_state_of_their_own(sparsifier: str) -> None:
    """They are frozen, and one object serves all workers; what they learn is in states, whose fields are marked."""
    group = Group(sparsifier, DENSITY, WORLD)
    assert len({id(reducer.method.sparsifier) for reducer in group.reducers}) == 1
    before = dict(vars(group.reducers[0].method.sparsifier))
    group.step(drifting(0))
    assert vars(group.reducers[0].method.sparsifier) == before == group.reducers[0].method.sparsifier.options()
    check_marked(group.reducers[0].states.sparsifier)


def check_marked(state: State) -> None:
    for each in dataclasses.fields(state):
        value = getattr(state, each.name)
        if isinstance(value, State):
            check_marked(value)
        else:
            assert isinstance(each.metadata.get("mark"), Mark), f"{type(state).__name__}.{each.name}"


def test_a_state_of_another_world_size_keeps_what_does_not_depend_on_it(sparsifier: str) -> None:
    group, other = Group(sparsifier, DENSITY, WORLD), Group(sparsifier, DENSITY, WORLD - 1)
    for step in range(12):
        group.step(drifting(step))
        other.step(drifting(step)[1:])
    state = {**group.states()[0], "world_size": WORLD - 1}
    other.reducers[0].load_state_dict(state, resized=True)
    for reducer, theirs in zip(other.reducers[1:], group.states()[1:], strict=False):
        reducer.load_state_dict({**theirs, "world_size": WORLD - 1}, resized=True)
    for step in range(12, 18):
        other.step_lawfully(drifting(step)[1:])
