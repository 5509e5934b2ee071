"""When things go wrong: wrong arguments, workers that differ, die or stall, replicas that drift apart."""

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from test_ddp import DENSITY, WIDTH, network, square
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsieve import Budget, ReplicasDiffer, Sent, Sieve, make_sparsifier, sparsify
from gradsieve.comm.collectives import Program
from helpers import assert_same


def composed() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(network())


def _refusals(rank: int, world_size: int) -> None:
    def refuses(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=words):
            call()

    model = DDP(network())
    refuses(TypeError, "ddp_model must be a DistributedDataParallel, got Sequential", lambda: sparsify(network()))
    refuses(
        ValueError, "must be wrapped with DistributedDataParallel, got composable", lambda: sparsify(composed())
    )
    refuses(ValueError, r"density must be in \(0, 1\], got 2", lambda: sparsify(model, density=2))
    refuses(ValueError, "sparsifier must be one of dense", lambda: sparsify(model, "nonsense"))
    refuses(ValueError, "dense_steps must be at least 0, got -1", lambda: sparsify(model, dense_steps=-1))
    refuses(ValueError, "check_every must be at least 0, got -5", lambda: sparsify(model, check_every=-5))
    refuses(
        TypeError,
        "options must come with a sparsifier's name",
        lambda: sparsify(model, make_sparsifier("topk"), x=1),
    )
    refuses(
        ValueError,
        "a Budget needs a sparsifier with one threshold for all",
        lambda: sparsify(model, "topk", density=Budget(0.1, total_steps=10)),
    )
    sieve = sparsify(model, "cltk", beta=0.5)
    assert sieve.reducer.method.sparsifier.options() == {"beta": 0.5}
    refuses(ValueError, "sparsify it only once", lambda: sparsify(model))
    refuses(ValueError, r"density must be in \(0, 1\], got 0", lambda: sieve.set_density(0))
    from torch.nn.parallel.distributed import _MixedPrecision

    narrow = DDP(network(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    refuses(ValueError, "must not use DDP's mixed_precision", lambda: sparsify(narrow))
    embedding = DDP(nn.Embedding(5, 5, sparse=True))
    refuses(ValueError, "must have a parameter with a dense gradient", lambda: sparsify(embedding))


def test_refusals(tmp_path: Path) -> None:
    run_processes(_refusals, 2, tmp_path)


def _disagree(rank: int, world_size: int) -> list[str]:
    """What each rank is told at its first step."""

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return next(self.children())(x)

    cases = [
        (DDP(network()), {"density": 0.1 + 0.1 * rank}),
        (DDP(Named("a" if rank == 0 else "b")), {"density": 0.1}),
        (DDP(network()), {"sparsifier": "cltk", "beta": 1.0 - 0.5 * rank}),
    ]
    found = []
    for model, options in cases:
        sieve = sparsify(model, **options)  # type: ignore[arg-type]
        try:
            square(0, rank)(model).backward()
        except ValueError as error:
            found.append(str(error))
        assert not sieve.reducer.residual.any()
    return found


def test_different_settings_are_named_on_every_rank(tmp_path: Path) -> None:
    for words in run_processes(_disagree, 2, tmp_path):
        assert words == [
            "workers disagree on density: rank 0 has 0.1, rank 1 has 0.2",
            "workers disagree on parameter 0: "
            "rank 0 has a.weight [24, 24] float32, rank 1 has b.weight [24, 24] float32",
            "workers disagree on cltk.beta: rank 0 has 1.0, rank 1 has 0.5",
        ]


def _dies(rank: int, world_size: int) -> str:
    model = DDP(network())
    sieve = sparsify(model, density=DENSITY)
    started = time.monotonic()
    try:
        for step in range(10):
            if rank == 1 and step == 3:
                os._exit(3)
            square(step, rank)(model).backward()
    except RuntimeError as error:
        assert time.monotonic() - started < 60
        assert sieve.reducer.step == 3
        return str(error)
    return "nothing happened"


def test_a_dead_rank_surfaces_as_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"1\.pkl"):
        run_processes(_dies, 2, tmp_path)
    words = pickle.loads((tmp_path / "0.pkl").read_bytes())
    assert words.startswith("rank 1 "), words
    assert "did not take part" in words
    assert "in step 3, phase" in words


def _stalls(rank: int, world_size: int) -> str:
    model = DDP(network())
    sparsify(model, density=DENSITY, timeout=timedelta(seconds=4))
    started = time.monotonic()
    try:
        for step in range(4):
            if rank == 1 and step == 2:
                time.sleep(9)
            square(step, rank)(model).backward()
    except RuntimeError as error:
        assert time.monotonic() - started < 30
        return str(error)
    return "nothing happened"


@pytest.mark.slow  # test_waiting.py stops workers as well
def test_a_rank_that_stalls_surfaces_as_a_timeout(tmp_path: Path) -> None:
    first, second = run_processes(_stalls, 2, tmp_path)
    assert first.startswith("rank 1 did not take part: no answer after 4."), first
    assert second != "nothing happened"


def _check_replicas(rank: int, world_size: int) -> list[str]:
    found = []
    model = DDP(network())
    sieve = sparsify(model, density=DENSITY, check_every=3)
    try:
        for step in range(10):
            if step == 4 and rank == 1:
                with torch.no_grad():
                    model.module[2].bias[3] += 1e-3
            square(step, rank)(model).backward()
    except ReplicasDiffer as error:
        found.append(f"{step}: {error}")
    try:
        sieve.check_replicas()
    except ReplicasDiffer as error:
        found.append(str(error))
    return found


def test_replicas_that_differ_are_named_on_every_rank(tmp_path: Path) -> None:
    for found in run_processes(_check_replicas, 2, tmp_path):
        assert found == [
            "6: replicas differ at step 6: 2.bias of rank 1 is not that of rank 0",
            "replicas differ at step 6: 2.bias of rank 1 is not that of rank 0",
        ]


class Fragile(torch.autograd.Function):
    """The identity, whose backward pass fails when it is told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if Fragile.fails:
            raise ValueError("a backward pass that fails")
        return grads[0]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Fragile.apply(self.first(x)))


def wrapped(module: nn.Module, view: bool, **settings: Any) -> tuple[DDP, Sieve]:
    model = DDP(module, bucket_cap_mb=1e-3, gradient_as_bucket_view=view)
    return model, sparsify(model, "exdyna", **{"density": DENSITY, **settings})


def steps(model: DDP, rank: int, numbers: range) -> None:
    for step in numbers:
        model.zero_grad()
        square(step, rank)(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def same_parameters(one: DDP, other: DDP) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def _fails_in_backward(rank: int, world_size: int, view: bool) -> None:
    """The state after a failed backward pass is that before it, and training goes on as if it had not been."""
    (model, sieve), (other, never_failed) = wrapped(Layers(), view), wrapped(Layers(), view)
    for each in (model, other):
        steps(each, rank, range(4))
    Fragile.fails = True
    with pytest.raises(ValueError, match="a backward pass that fails"):
        steps(model, rank, range(4, 5))
    Fragile.fails = False
    assert_same(sieve.state_dict(), never_failed.state_dict())
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        steps(model, rank, range(4, 5))  # torch's own DDP cannot go on: it takes a new one
    state, module = sieve.state_dict(), model.module
    model, sieve = wrapped(module, view)
    sieve.load_state_dict(state)
    for each in (model, other):
        steps(each, rank, range(4, 8))
    assert_same(sieve.state_dict(), never_failed.state_dict())
    assert same_parameters(model, other)


@pytest.mark.parametrize("view", [False, True])
def test_a_backward_pass_that_fails(tmp_path: Path, view: bool) -> None:
    run_processes(_fails_in_backward, 2, tmp_path, view)


class Lossy(nn.Module):
    """Layers whose output fails: no gradient is ready then, and DDP itself can go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Fragile.apply(self.layers(x))
        return found


def _goes_on(rank: int, world_size: int, view: bool) -> None:
    """The next clean step is the one that would have come; nobody has to tell the sieve."""
    for fails_late in (False, True):
        made = Layers if fails_late else Lossy
        (model, sieve), (other, never_failed) = wrapped(made(), view), wrapped(made(), view)
        for first in (0, 3, 6):  # before anything is known, and later
            Fragile.fails = True
            with pytest.raises(ValueError, match="a backward pass that fails"):
                steps(model, rank, range(first, first + 1))
            Fragile.fails = False
            if fails_late:
                added = not torch.equal(sieve.reducer.residual, never_failed.reducer.residual)
                assert added == (first > 0)  # before its first step is over, DDP has only one bucket
                model.reducer._reset_state()  # torch's reducer must be told
            for each in (model, other):
                steps(each, rank, range(first, first + 3))
            assert_same(sieve.state_dict(), never_failed.state_dict())
            assert same_parameters(model, other)


@pytest.mark.parametrize("view", [False, True])
def test_the_step_after_a_backward_pass_that_failed_works(tmp_path: Path, view: bool) -> None:
    run_processes(_goes_on, 2, tmp_path, view)


def _fails_in_the_hook(rank: int, world_size: int, density: float) -> None:
    """Before an exchange is complete a step leaves no trace; once it is, only the update is lost."""
    for where, complete in (("finish", False), ("write_", True)):
        model, sieve = wrapped(Layers(), True, density=density)
        other, never_failed = wrapped(Layers(), True, density=density)
        for each in (model, other):
            steps(each, rank, range(3))
        owner: Any = sieve.reducer if where == "finish" else sieve.hook.layout
        real = getattr(owner, where)

        def fails(*arguments: Any) -> Any:
            raise OSError("no room")

        def fails_under_way(real: Callable[[], Program[Sent]] = real) -> Program[Sent]:
            program = real()
            yield program.send(None)
            program.throw(OSError("no room"))
            raise AssertionError("it went on")

        setattr(owner, where, fails if complete else fails_under_way)
        with pytest.raises(OSError, match="no room"):
            steps(model, rank, range(3, 4))
        setattr(owner, where, real)
        model.reducer._reset_state()
        if complete:  # the update is used for nothing
            other.zero_grad()
            square(3, rank)(other).backward()
        assert_same(sieve.state_dict(), never_failed.state_dict())
        assert bool(sieve.reducer.residual.any()) == (density < 1)
        for each in (model, other):
            steps(each, rank, range(4, 7))
        assert_same(sieve.state_dict(), never_failed.state_dict())
        assert same_parameters(model, other)


@pytest.mark.parametrize("density", [DENSITY, 1.0])
def test_an_error_in_the_hook_loses_nothing(tmp_path: Path, density: float) -> None:
    run_processes(_fails_in_the_hook, 2, tmp_path, density)
