"""A density that follows the network: pure functions of what was measured."""

import pytest

from gradsieve import Auto, VirtualWorld
from gradsieve.share.auto import HIDDEN, WINDOW, AutoDensity, Line, line_through


class Network:
    """Exchanges take a latency and a time for each entry, times whatever else happens."""

    def __init__(self, latency: float, slope: float) -> None:
        self.latency, self.slope = latency, slope

    def seconds(self, density: float) -> float:
        return self.latency + self.slope * density


def settled(network: Network, computing: float, limits: Auto | None = None, rounds: int = 20) -> list[float]:
    """The densities that were chosen, one after the other."""
    auto = AutoDensity(limits or Auto(), HIDDEN)
    chosen = []
    for _ in range(rounds):
        auto.learn(computing, network.seconds(auto.density))
        chosen.append(auto.density)
    return chosen


@pytest.mark.parametrize(("latency", "slope"), [(0.001, 1.0), (0.01, 5.0), (0.0, 40.0), (0.02, 0.5)])
def test_the_exchange_fills_what_is_free(latency: float, slope: float) -> None:
    network, computing = Network(latency, slope), 0.075
    last = settled(network, computing)[-1]
    assert last == pytest.approx(min(1.0, (HIDDEN * computing - latency) / slope), rel=0.1)
    assert network.seconds(last) <= computing


def test_it_stays_once_it_is_there() -> None:
    chosen = settled(Network(0.002, 3.0), 0.1)
    assert chosen[8:] == [chosen[8]] * 12


def test_limits() -> None:
    assert settled(Network(0.0, 1e-6), 0.1, Auto(0.01, 0.2))[-1] == 0.2
    assert settled(Network(1.0, 10.0), 0.1, Auto(0.01, 0.2))[-1] == 0.01  # nothing is free: the least is sent


def test_it_follows_a_link_that_becomes_slower() -> None:
    auto, fast, slow = AutoDensity(Auto(), HIDDEN), Network(0.001, 1.0), Network(0.001, 10.0)
    for network in [fast] * 10 + [slow] * 10:
        auto.learn(0.1, network.seconds(auto.density))
    assert auto.density == pytest.approx((HIDDEN * 0.1 - 0.001) / 10.0, rel=0.15)


def test_all_workers_choose_alike_from_what_all_measured() -> None:
    autos = [AutoDensity(Auto(), HIDDEN) for _ in range(3)]
    for round_ in range(4 * WINDOW):
        for rank, auto in enumerate(autos):
            auto.note(0.05 + 0.01 * rank, 0.002 + 0.5 * auto.density + 0.001 * rank + 1e-5 * round_)
        VirtualWorld(3).run([auto.agree(3) for auto in autos])
        assert len({auto.density for auto in autos}) == 1
    assert autos[0].density > 4 * Auto().at_least
    assert "ms are free in 60 ms of computing" in autos[2].why


def test_state() -> None:
    auto, other = AutoDensity(Auto(), HIDDEN), AutoDensity(Auto(), HIDDEN)
    for density_seconds in (0.01, 0.02):
        auto.learn(0.1, density_seconds)
    other.load_state_dict(auto.state_dict())
    auto.learn(0.1, 0.03)
    other.learn(0.1, 0.03)
    assert (auto.density, auto.points) == (other.density, other.points)


def test_line() -> None:
    assert line_through([(0.1, 0.5)]) == Line(0.25, 2.5)  # half of it may be latency
    assert line_through([(0.1, 0.5), (0.2, 0.4)]) == Line(0.4, 0.0)  # chance: more cannot take less
    assert line_through([(0.1, 0.1), (0.2, 0.4)]).latency == 0


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (0.0, 1.0, r"at_least must be in \(0, 1\], got 0.0"),
        (0.1, 2.0, r"at_most must be in \(0, 1\], got 2.0"),
        (0.5, 0.1, "at_least must not be above at_most, 0.1, got 0.5"),
    ],
)
def test_bad_limits(least: float, most: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Auto(least, most)
