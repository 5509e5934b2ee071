"""The warning that sparsifying does not pay: where it is true, once, and never on a slow network."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gradsieve.comm.collectives import Program
from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve.ddp.advice import AFTER, SIZES, Advice, NoAdvice
from gradsieve.reports import StepReport
from gradsieve.worlds.virtual import VirtualWorld


class Network:
    """Two equal workers, of which one is here; time passes as it would on such a link."""

    size = 2

    def __init__(self, clock: list[float], latency: float, bandwidth: float) -> None:
        self.clock, self.latency, self.bandwidth = clock, latency, bandwidth
        self.sums: list[int] = []

    def run(self, programs: Sequence[Program[Any]]) -> list[Any]:
        def twice(program: Program[Any]) -> Program[Any]:
            try:
                call = next(program)
                while True:
                    self.sums.append(call.tensor.nbytes)
                    wire = ring_all_reduce_bytes(call.tensor.nbytes, 2)
                    self.clock[0] += self.latency + wire / self.bandwidth
                    call = program.send(call.tensor * 2)
            except StopIteration as stop:
                return stop.value
            yield

        return VirtualWorld(1).run([twice(programs[0])])


def report(seconds: float) -> StepReport:
    spent = {"select": seconds / 2, "communicate": seconds / 2, "measure": 9.0}
    return StepReport(0, 10, 1, True, [1], 1, None, None, 0, 0.0, 3, spent)


def words(
    monkeypatch: pytest.MonkeyPatch, *, n: int, exchange: float, bandwidth: float, rank: int = 0
) -> list[str]:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    network = Network(clock, 1e-4, bandwidth)
    advice = Advice(network, rank, n, torch.device("cpu"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3 * AFTER):
            advice.note(report(exchange))
    monkeypatch.undo()
    assert len(network.sums) <= 10, "measured once"
    return [str(each.message) for each in found]


def test_it_warns_once_where_the_network_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    found = words(monkeypatch, n=10**7, exchange=0.1, bandwidth=1e9)
    assert found == [
        "sparsifying does not pay on this network: an exchange takes 100 ms, plain DDP would need about 40.1 ms "
        "for the full gradient (see gradsieve plan)"
    ]
    assert words(monkeypatch, n=10**7, exchange=0.1, bandwidth=1e9, rank=1) == []
    assert len(words(monkeypatch, n=1000, exchange=0.1, bandwidth=1e9)) == 1  # a model below the measured sizes


@pytest.mark.parametrize("bandwidth", [20e6 / 8, 100e6 / 8, 1e9 / 8])
@pytest.mark.parametrize("n", [300_000, 2_600_000, 10_500_000])
def test_it_is_silent_on_slow_links(monkeypatch: pytest.MonkeyPatch, bandwidth: float, n: int) -> None:
    """Where an exchange takes as long as computing and a hundredth of the bytes do."""
    exchange = 3e-9 * n + 5e-4 + 0.01 * ring_all_reduce_bytes(4 * n, 2) / bandwidth
    assert words(monkeypatch, n=n, exchange=exchange, bandwidth=bandwidth) == []


def test_a_slow_network_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    network = Network(clock, 1e-3, 1e6)
    advice = Advice(network, 0, 10**7, torch.device("cpu"))
    for _ in range(AFTER):
        advice.note(report(0.01))
    assert max(network.sums) == SIZES[0]


def test_no_advice_says_nothing() -> None:
    NoAdvice().note(report(1.0))
