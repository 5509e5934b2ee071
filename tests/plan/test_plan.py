"""The planner: its bytes are those of the meter, its model obeys the laws of a network, its words are right."""

import json
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import gradsieve
from gradsieve.plan import Link, local
from gradsieve.plan.local import compressed, matrix_of, shapes_of
from gradsieve.plan.traffic import SMALL, sparse_step, total
from gradsieve.plan.ways_of import Job, ways_of
from gradsieve.worlds import process_group
from helpers import gradients
from virtual_replicas import Workers

N, DENSITY = 200_000, 0.01


class Free(Job):
    """A job whose methods cost no computing, so that nothing is timed."""

    def cost(self, timed: object) -> float:
        return 0.0


class Fixed(Job):
    """A job whose methods all cost as much."""

    def cost(self, timed: object) -> float:
        return 0.03


def free_plan(n: int, workers: int, link: Link, compute: float = 0.05, **options: object) -> gradsieve.Plan:
    job = Free(n, shapes_of(n), workers, compute)
    return gradsieve.Plan(n, workers, link, compute, ways_of(job, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "values"), [(2, "fp32"), (4, "bf16"), (8, "fp8")])
def test_bytes_of_gradients_are_those_of_the_meter(workers: int, values: str) -> None:
    for sparsifier in ("exdyna", "shared_threshold"):
        reducers = gradsieve.virtual_reducers(sparsifier, DENSITY, world_size=workers, values=values, measure=False)
        world = gradsieve.VirtualWorld(workers)
        for step in range(10):
            grads = gradients("normal", N, workers, step)
            world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads, strict=True)])
        report = reducers[0].report
        assert report is not None
        overlap = None if sparsifier == "exdyna" else report.selected / report.union
        planned = total(sparse_step(N, DENSITY, workers, overlap=overlap, values=values), workers)
        assert planned.calls == report.collectives
        metered = sum(reducer.ledger.total.ring_bytes for reducer in reducers) / workers
        assert planned.ring_bytes == pytest.approx(metered, rel=0.01)


def test_bytes_of_weights_are_those_of_the_meter() -> None:
    workers = Workers(4, DENSITY)
    n = workers.replicas[0].weights.n
    for step in range(12):
        workers.step(step)
    report = workers.replicas[0].report
    assert report is not None
    planned = total(sparse_step(n, DENSITY, 4), 4)
    assert planned.calls == report.collectives
    assert planned.ring_bytes == pytest.approx(report.ring_bytes, rel=0.05)


def test_worlds_sum_large_vectors_with_the_backend_as_planned() -> None:
    assert SMALL == process_group._SMALL


@settings(max_examples=40, deadline=None)
@example(n=312321309, workers=4096, bits=1164139.0, latency=0.0, compute=10.0, backend="gloo")
@given(
    n=st.integers(1_000, 10**9),
    workers=st.integers(2, 4096),
    bits=st.floats(1e6, 1e11),
    latency=st.floats(0, 1e-3),
    compute=st.floats(1e-4, 10),
    backend=st.sampled_from(["gloo", "nccl"]),
)
def test_laws_of_a_network(n: int, workers: int, bits: float, latency: float, compute: float, backend: str) -> None:
    found = free_plan(n, workers, Link(bits / 8, latency, 0.0, 0.0, backend), compute)
    slower, later = found.link.at(bits / 2), Link(bits / 8, latency + 1e-3, 0.0, 0.0, backend)
    for way in found.ways:
        here = way.step(found.link)
        assert here >= compute * (1 - 1e-9)  # nothing is faster than computing alone
        assert way.step(slower) >= here
        assert way.step(later) >= here
        assert way.traffic.ring_bytes >= 0
    names = [way.name for way in found.ways]
    assert len(set(names)) == len(names)
    assert found.best in found.ways
    json.dumps(found.to_dict(), allow_nan=False)
    assert max(map(len, str(found).splitlines())) <= 80


def test_delay_hides_and_every_saves() -> None:
    found = {way.name: way.step(Link(20e6 / 8)) for way in free_plan(10**6, 4, Link(20e6 / 8), 0.2).ways}
    assert found["weights 0.01 delay=1"] < found["weights 0.01"]
    assert found["weights 0.01 every=8"] < found["weights 0.01"]
    assert found["weights 0.001 delay=1"] == pytest.approx(0.2)  # all of it fits beside computing
    assert found["plain DDP"] > found["fp16 hook"] > found["gradients 0.1"] > found["gradients 0.001"]


def test_what_runs_beside_computing_costs_no_more_than_its_processor_time() -> None:
    """With delay=1: hidden where a thread has a processor of its own, added where it shares one."""
    link, compute, spent = Link(1e9), 0.1, 0.03

    def late(crowding: float) -> float:
        job = Fixed(10**6, shapes_of(10**6), 4, compute, crowding=crowding)
        found = {way.name: way.step(link) for way in ways_of(job)}
        assert found["weights 0.01"] > compute + spent
        return found["weights 0.01 delay=1"]

    assert late(1.0) == pytest.approx(compute)
    assert late(1.5) == pytest.approx(compute + spent / 2)
    assert late(2.0) == pytest.approx(compute + spent)


def test_plain_ddp_is_slower_where_sending_takes_the_processors_that_compute() -> None:
    link = Link(1e8, work=2e-9)
    free, taken = (Fixed(10**7, shapes_of(10**7), 4, 0.9, crowding=crowding) for crowding in (1.0, 2.0))
    assert ways_of(taken)[0].step(link) > ways_of(free)[0].step(link) == ways_of(free)[0].step(Link(1e8))


def test_the_backend_may_need_longer_for_float16() -> None:
    plain, half, *_ = free_plan(10**7, 4, Link(1e8)).ways
    slow = Link(1e8, half=3e-9)
    assert half.step(slow) == pytest.approx(half.step(Link(1e8)) + 3e-9 * 10**7)
    assert plain.step(slow) == plain.step(Link(1e8))


def test_one_worker_sends_nothing() -> None:
    found = free_plan(10**6, 1, Link(1e6), 0.05)
    assert {round(way.step(found.link), 9) for way in found.ways} == {0.05}
    assert found.best is found.plain


def test_break_even_is_where_both_take_as_long() -> None:
    found = free_plan(10**7, 8, Link(100e6 / 8))
    for way in found.ways[1:]:
        bits = found.break_even(way)
        if 0 < bits < math.inf:
            link = found.link.at(bits)
            assert way.step(link) == pytest.approx(found.plain.step(link), rel=0.01)


def test_recommendations() -> None:
    thin = free_plan(10**7, 8, Link(100e6 / 8))
    assert thin.best.family == "weights"
    assert thin.recommendation.startswith(f"{thin.best.name}: ")
    assert "times faster than plain DDP's" in thin.recommendation
    assert thin.best.call.startswith("gradsieve.share(model, optimizer, density=")
    assert any(
        "8 hosts: 64 workers are an extrapolation on paper" in note for note in free_plan(9, 64, Link(1)).notes
    )
    assert not any("extrapolation" in note for note in thin.notes)


def test_fast_networks_get_plain_ddp() -> None:
    """With what kernels cost here, and a network that carries a model in a few milliseconds."""
    found = gradsieve.plan(300_000, 2, "10gbit", 500.0, densities=[0.01], every=[1])
    assert found.best is found.plain
    assert found.recommendation.startswith("plain DDP: ")
    slow = [way for way in found.ways if found.ms(way) > found.ms(found.plain)]
    assert slow
    faster = gradsieve.Plan(found.n, 2, found.link, found.compute, [found.plain, *slow])
    assert faster.recommendation.startswith("plain DDP: it is faster here (")


def test_a_model_is_measured() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4))
    x = torch.randn(4, 64)
    found = gradsieve.plan(model, 4, "100mbit", loss=lambda: model(x).square().mean(), densities=[0.01], every=[1])
    assert found.n == 64 * 32 + 32 + 32 * 4 + 4
    assert 0 < found.compute < 5
    assert all(way.local >= 0 for way in found.ways)
    assert not any(bool(parameter.grad is None) for parameter in model.parameters())
    page = found.page()
    assert page.count("<polyline") == 2 * len(found.ways)
    assert "<script" not in page
    assert "http" not in page


def test_longer_vectors_are_extrapolated_along_a_line() -> None:
    assert local.at_size(3 * local.LARGEST, lambda n: 1.0 + 1e-6 * n) == pytest.approx(1.0 + 3e-6 * local.LARGEST)
    assert local.at_size(1000, lambda n: float(n)) == 1000


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
def test_powersgd_compresses_what_torch_compresses(rows: int, columns: int, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, rank)
    expected = powerSGD_hook._should_compress(rows, columns, min(rows, columns, rank), state.min_compression_rate)[
        0
    ]
    assert (compressed((rows, columns), min(rows, columns, rank)) is not None) == expected


def test_matrices_of_a_model() -> None:
    assert matrix_of([8, 3, 3, 3]) == (8, 27)
    assert matrix_of([8]) is None
    assert sum(math.prod(shape) for shape in shapes_of(5_000_000)) == pytest.approx(5_000_000, rel=0.001)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 4, "1gbit", 10.0), {}, "parameters must be at least 1, got 0"),
        ((10, 0, "1gbit", 10.0), {}, "workers must be at least 1, got 0"),
        ((10, 4, "fast", 10.0), {}, "rate must be a number with kbit, mbit or gbit"),
        ((10, 4, "1gbit", 0.0), {}, "step_ms must be positive and finite, got 0"),
        ((10, 4, "1gbit"), {}, "step_ms must be given, or a model and its loss to measure it"),
        ((10,), {}, "workers and link must be given"),
        ((10, 4, "1gbit", 1.0), {"densities": [2.0]}, r"density must be in \(0, 1\], got 2.0"),
        ((10, 4, "1gbit", 1.0), {"every": [0]}, "every must be at least 1, got 0"),
        ((10, 4, "1gbit", 1.0), {"sparsifier": "topk"}, "sparsifier must be one of shared_threshold, exdyna"),
        ((10, 4, "1gbit", 1.0), {"backend": "mpi"}, "backend must be one of"),
        ((10, 4, "1gbit", 1.0), {"latency_ms": -1.0}, "latency_ms must be at least 0 and finite, got -1"),
        ((10, 4, "1gbit", 1.0), {"overlap": 0.5}, "overlap must be at least 1, got 0.5"),
        (("big", 4, "1gbit", 1.0), {}, "model must be a torch.nn.Module or a number of parameters"),
        ((10, 1 << 21, "1gbit", 1.0), {}, "workers must be at most 1,048,576"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gradsieve.plan(*arguments, **options)  # type: ignore[arg-type]


def test_a_ring_hides_its_latency_behind_a_long_vector() -> None:
    link = Link(1e6, latency=0.01, message=0.0)
    assert link.all_reduce([8.0], 4) == pytest.approx(6 * 0.01)
    assert link.all_reduce([1e6], 4) == pytest.approx(0.01 + 1.5)
    assert link.all_reduce([1e6, 8.0], 4) == pytest.approx(1.5 + 6 * 0.01)
