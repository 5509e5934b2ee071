"""Rounds of `share` on a device: one wait each, as some of what a round finds is read by the next one."""

import math
from typing import Any

import pytest
import torch
from on_sim import host, put_replicas_on_device

from gradsieve import NonFiniteWeights, VirtualWorld
from helpers import assert_same
from laws import test_share_laws
from sim_device import watch
from virtual_replicas import Workers


def uneven(workers: Workers, step: int) -> None:
    """Compute a step in which the last parameters drift more and more, so that borders between partitions move."""
    workers.compute(step)
    with torch.no_grad():
        for rank, model in enumerate(workers.models):
            list(model.parameters())[-4].mul_(1 + 0.05 * step * (rank + 1))


def rounds(workers: Workers, count: int) -> list[dict[str, Any]]:
    seen = []
    for step in range(count):
        uneven(workers, step)
        workers.driver.after_step()
        states = [replica.state.to_dict() for replica in workers.replicas]
        seen.append(named([*workers.shared(), *workers.weights(), *states]))
    return seen


def named(values: list[Any]) -> dict[str, Any]:
    """On the host, to be compared."""
    return {str(number): host(value) for number, value in enumerate(values)}


@pytest.mark.parametrize(
    ("name", "delay"),
    [
        ("exdyna", 0),
        ("micro", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("exdyna", 1), ("micro", 0))),
    ],
)
def test_device_and_cpu_agree_to_the_last_bit(name: str, delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"blocks": 40} if name == "exdyna" else {}
    here = Workers(2, 0.1, name, delay=delay, options=options)
    for replica in here.replicas:
        assert not replica.late
        replica.late = True
    expected = rounds(here, 7)
    put_replicas_on_device(monkeypatch)
    there = Workers(2, 0.1, name, delay=delay, options=options)
    for found, wanted in zip(rounds(there, 7), expected, strict=True):
        assert_same(found, wanted)
    if name == "exdyna":
        bounds = [found["4"]["bounds"] for found in expected]
        assert bounds[0] != bounds[-1]
        assert all(replica.state.bounds == there.replicas[0].state.bounds for replica in there.replicas)


def test_one_wait_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the first ones, while borders move; `micro` is counted in test_waits.py."""
    put_replicas_on_device(monkeypatch)
    for settings in ({}, {"values": "fp8"}):
        workers = Workers(2, 0.05, settings=settings)
        for step in range(4):
            uneven(workers, step)
            with watch() as seen:
                workers.driver.after_step()
            assert set(seen.places) == {"sparsifiers/histograms.py:gather"}
            assert len(seen) == 2


def broken(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Workers:
    """Three workers after a round in which the weights of worker 1 were not finite."""
    put_replicas_on_device(monkeypatch)
    workers = Workers(3, 0.1, settings=settings)
    for step in range(3):
        workers.step(step)
    workers.compute(3)
    with torch.no_grad():
        next(workers.models[1].parameters()).fill_(math.nan)
    before, others = workers.shared(), workers.weights()
    workers.driver.after_step()
    assert_same(named(workers.shared()), named(before))
    assert_same(named(workers.weights()[::2]), named(others[::2]))
    return workers


WORDS = "weights are not finite after step 4: 0.weight of rank 1; nothing was averaged"


def test_the_next_round_says_so_before_anything_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = broken(monkeypatch)
    before = named(workers.shared())
    report = workers.replicas[0].full_report()
    assert report is not None
    assert not report.finite
    workers.compute(4)
    others = named(workers.weights()[::2])
    with pytest.raises(NonFiniteWeights, match=WORDS):
        workers.driver.after_step()
    assert_same(named(workers.shared()), before)
    assert_same(named(workers.weights()[::2]), others)


def test_or_whoever_settles_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = broken(monkeypatch)
    assert [replica.failed_after for replica in workers.replicas] == [4] * 3
    for replica in workers.replicas:  # and a checkpoint keeps it
        replica.load_state_dict(host(replica.state_dict()))
    with pytest.raises(NonFiniteWeights, match=WORDS):
        VirtualWorld(3).run([replica.settle() for replica in workers.replicas])


def test_restored_a_round_later(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = broken(monkeypatch, on_nonfinite="restore")
    state = workers.replicas[0]._prior.to_dict()
    workers.step(4)
    assert all(replica.report and replica.report.restored == [1] for replica in workers.replicas)
    assert_same(host(workers.weights()[1]), host(workers.shared()[0]))
    assert_same(host(workers.replicas[2].state.to_dict()), host(state))  # no trace of the bad round
    for step in range(5, 8):
        workers.compute(step)
        test_share_laws.check_round(workers)


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_saved_and_loaded_equals_never_stopped(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put_replicas_on_device(monkeypatch)
    test_share_laws.test_saved_and_loaded_equals_never_stopped("exdyna", delay)


def test_all_workers_read_alike() -> None:
    workers = Workers(2)
    workers.replicas[1].late = True
    with pytest.raises(ValueError, match="disagree on rounds are read: rank 0 has at once, rank 1 has by the"):
        workers.step(0)
