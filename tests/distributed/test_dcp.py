"""Sieves in checkpoints of torch.distributed.checkpoint, read by the same and by another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import run_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.dcp import SieveState

DENSITY = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))


class Gradients:
    """A model whose gradients are sparsified."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(make_model())
        self.sieve = gradsieve.sparsify(self.model, "exdyna", density=DENSITY)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def vector(self) -> Tensor:
        return self.sieve.reducer.residual.clone()


class Weights:
    """A model whose weights are shared; with delay=1, so that a round is pending."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sieve = gradsieve.share(self.model, self.optimizer, density=DENSITY, delay=1)

    def vector(self) -> Tensor:
        return self.sieve.replica.weights.read(self.sieve.replica.weights.all)


KINDS = {"gradients": Gradients, "weights": Weights}


def train(run: Any, rank: int, steps: range) -> None:
    for step in steps:
        run.optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        run.model(x).square().mean().backward()
        run.optimizer.step()


def extra_of(run: Any) -> dict[str, Any]:
    state = run.optimizer.state_dict()["state"]
    return {str(number): momenta for number, momenta in state.items()}


def save(run: Any, folder: Path) -> None:
    dcp.save(
        {"model": run.model.state_dict(), "sieve": SieveState(run.sieve, extra=extra_of(run))}, checkpoint_id=folder
    )


def load(run: Any, folder: Path) -> SieveState:
    state = SieveState(run.sieve, folder)
    assert isinstance(state, Stateful)
    model = run.model.state_dict()
    dcp.load({"model": model, "sieve": state}, checkpoint_id=folder)
    if isinstance(run, Gradients):
        run.model.load_state_dict(model)
    return state


def _same(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    """Save, go on; load into another run, go on: the same bits. Returns the vectors that were saved."""
    found = {}
    for name, make in KINDS.items():
        run = make()
        train(run, rank, range(12))
        found[name] = run.vector()
        save(run, Path(folder) / name)
        train(run, rank, range(12, 16))
        other = make()
        train(other, rank, range(2))
        state = load(other, Path(folder) / name)
        assert torch.equal(other.vector(), found[name])
        momenta = {int(number): values for number, values in state.extra.items()}
        other.optimizer.load_state_dict({**other.optimizer.state_dict(), "state": momenta})
        train(other, rank, range(12, 16))
        assert torch.equal(run.vector(), other.vector())
        for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)
    return found


def _resized(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    """Load what another number of ranks saved, and go on."""
    found = {}
    for name, make in KINDS.items():
        run = make()
        load(run, Path(folder) / name)
        found[name] = run.vector()
        train(run, rank, range(12, 15))
        run.sieve.check_replicas()
    _other(Path(folder) / "weights", Path(folder) / f"without-{world_size}")
    return found


def _other(saved: Path, fresh: Path) -> None:
    """A checkpoint of something else, one without a sieve, and something that is no sieve."""
    model = nn.Linear(16, 24)
    sieve = gradsieve.share(model, torch.optim.SGD(model.parameters(), lr=0.1), density=DENSITY)
    with pytest.raises(gradsieve.CheckpointError, match="must have this run's n, 408, got 508"):
        dcp.load({"sieve": SieveState(sieve, saved)}, checkpoint_id=saved)
    dcp.save({"model": model.state_dict()}, checkpoint_id=fresh)
    with pytest.raises(gradsieve.CheckpointError, match="must hold workers of a sieve, got none"):
        SieveState(sieve, fresh).state_dict()
    with pytest.raises(ValueError, match="sieve must be what sparsify or share returned, got Linear"):
        SieveState(model)  # type: ignore[arg-type]


def mean(results: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([result[name].double() for result in results]).mean(0)


def test_ranks_go_on_and_others_can_read_it(tmp_path: Path) -> None:
    def run(work: Any, ranks: int, saved: str) -> list[dict[str, Tensor]]:
        """In a folder of its own: ranks meet there."""
        folder = tmp_path / f"{work.__name__}-{ranks}-{saved}"
        folder.mkdir()
        return run_processes(work, ranks, folder, str(tmp_path / saved))

    saved_by_four, read_by_two = run(_same, 4, "four"), run(_resized, 2, "four")
    saved_by_two, read_by_four = run(_same, 2, "two"), run(_resized, 4, "two")
    for saved, read in ((saved_by_four, read_by_two), (saved_by_two, read_by_four)):
        for name in KINDS:
            assert float(mean(saved, name).abs().max()) > 0
            torch.testing.assert_close(mean(read, name), mean(saved, name), rtol=1e-6, atol=1e-9)
