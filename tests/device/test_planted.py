"""The rig finds what it is made for: a mistake of each kind, planted in the library, is seen."""

import math
from typing import Any

import pytest
import torch
from on_sim import SimGroup, put_replicas_on_device
from torch import Tensor

from gradsieve import ops
from gradsieve.comm import exchange
from gradsieve.share.background import Background
from gradsieve.share.driver import Driver, Outcome
from gradsieve.sparsifiers.exdyna import sparsifier as exdyna
from gradsieve.sparsifiers.exdyna import threshold
from gradsieve.worlds.streams import SideStream
from helpers import gradients
from sim_device import DEVICE, UnsynchronisedRead, to_host, to_sim, watch
from virtual_replicas import Workers


def run_steps(count: int = 3) -> int:
    """A few steps of exdyna; returns how often a worker waited in the last one."""
    group = SimGroup("exdyna", 0.02, 2)
    for reducer in group.reducers:
        reducer.measure = False
    for step in range(count):
        with watch() as seen:
            group.step(gradients("normal", 1_000, 2, step))
    return len(seen) // 2


def test_nothing_is_planted() -> None:
    assert run_steps() == 2


def test_a_cross_device_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "health_flag", lambda like, step: torch.zeros(1))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        run_steps()


def test_a_tensor_on_the_host_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threshold.row
    monkeypatch.setattr(threshold, "row", lambda *given: to_host(real(*given)))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        run_steps()


def test_a_round_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    put_replicas_on_device(monkeypatch)
    workers, background = Workers(2), Background[list[Outcome]]("planted", SideStream(DEVICE))
    workers.driver = Driver(workers.replicas, workers.driver.world, 1, background)

    def step(index: int) -> None:
        workers.driver.wait()  # as before an optimizer's step
        workers.step(index)

    step(0)
    step(1)
    monkeypatch.setattr(SideStream, "join", lambda self: None)
    with pytest.raises(UnsynchronisedRead, match="on another stream, without waiting"):
        step(2)
    background.close()


def test_a_hidden_item(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchange.health_flag

    def hidden(like: Tensor, step: Any) -> Tensor:
        flag = real(like, step)
        return like.new_full((1,), 0.0 if flag.item() == 0 else math.nan)

    monkeypatch.setattr(exchange, "health_flag", hidden)
    assert run_steps() == 3


@pytest.mark.parametrize(
    "hidden",
    [
        lambda x: float(x[0]),
        lambda x: int(x[0]),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: torch.where(x > 0),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.bincount(x.abs().long()),
        lambda x: torch.tensor([1.0], device=x.device),
    ],
)
def test_whatever_waits_is_counted(hidden: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exdyna.Exclusive.select

    def select(self: Any, state: Any, acc: Tensor, hits: Tensor, step: Any) -> Any:
        hidden(acc)
        return real(self, state, acc, hits, step)

    monkeypatch.setattr(exdyna.Exclusive, "select", select)
    assert run_steps() > 2


def test_sending_numbers_does_not_wait() -> None:
    x = to_sim(torch.zeros(3))
    with watch() as seen:
        assert to_host(ops.send([1, 2], x)).tolist() == [1, 2]
    assert not len(seen)


def test_one_copy_for_several_tensors() -> None:
    tensors = [torch.tensor([1.5, 2.5]), torch.tensor(True), torch.tensor([[1], [2]], dtype=torch.int16)]
    with watch() as seen:
        found = ops.read(*map(to_sim, tensors))
    assert len(seen) == 1
    for one, other in zip(found, tensors, strict=True):
        assert torch.equal(one, other)


def test_an_unsynchronised_read() -> None:
    side, x = SideStream(DEVICE), to_sim(torch.zeros(3))
    with side.behind(side.mark()):
        x.add_(1)
    with pytest.raises(UnsynchronisedRead, match="add uses what add_ has written on another stream"):
        x + 1
    side.join()
    assert to_host(x + 1).tolist() == [2.0, 2.0, 2.0]


def test_work_that_does_not_wait_for_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    side, x = SideStream(DEVICE), to_sim(torch.zeros(3))
    early = side.mark()
    x.add_(1)
    with side.behind(early), pytest.raises(UnsynchronisedRead):
        x.add_(1)


def test_on_a_cpu_streams_do_nothing() -> None:
    side, x = SideStream(torch.device("cpu")), torch.zeros(3)
    with side.behind(side.mark()):
        x.add_(1)
    side.join()
    assert x.tolist() == [1.0, 1.0, 1.0]
