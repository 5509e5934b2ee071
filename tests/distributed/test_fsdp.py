"""Gradients of fully_shard'ed models: four processes, two nodes of two, each node holds a replica in two shards."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor, nn

import gradsieve
from gradsieve.fsdp import ShardHook

N_IN, N_OUT = 16, 12


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N_IN, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, N_OUT))


def mesh_of_nodes() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(8, N_IN, generator=torch.Generator().manual_seed(100 * step + rank))
    model(x).square().mean().backward()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]  # type: ignore[operator]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def _work(rank: int, world_size: int, folder: str) -> None:
    mesh = mesh_of_nodes()
    for part in (
        _as_native,
        _accumulates,
        _fewer_bytes,
        _skips_together,
        _resumes,
        _saves_together,
        _unused,
        _refusals,
        _missing,
    ):
        part(rank, mesh, Path(folder))


def _as_native(rank: int, mesh: Any, folder: Path) -> None:
    """At density 1, bit for bit."""
    native, ours = sharded(make_model(), mesh), sharded(make_model(), mesh["shard"])
    gradsieve.sparsify(ours, density=1.0, process_group=mesh["replicate"], check_every=1)
    train(native, sgd(native), rank, range(4))
    train(ours, sgd(ours), rank, range(4))
    assert same(native, ours)


def _accumulates(rank: int, mesh: Any, folder: Path) -> None:
    """Passes that are reduced one by one, and passes that are reduced together: as native."""
    native, ours = sharded(make_model(), mesh), sharded(make_model(), mesh["shard"])
    sieve = gradsieve.sparsify(ours, density=1.0, process_group=mesh["replicate"].get_group())
    for model in (native, ours):
        backward(model, rank, 0)
        backward(model, rank, 1)
    assert sieve.reducer.step == 2
    for a, b in zip(native.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local(), rtol=1e-6, atol=1e-9)  # type: ignore[union-attr]
    for model in (native, ours):
        model.zero_grad()
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        backward(model, rank, 2)
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        backward(model, rank, 3)
    assert sieve.reducer.step == 3
    for a, b in zip(native.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())  # type: ignore[union-attr]


def _fewer_bytes(rank: int, mesh: Any, folder: Path) -> None:
    found = {}
    for density in (1.0, 0.01):
        model = sharded(make_model(), mesh["shard"])
        sieve = gradsieve.sparsify(model, "exdyna", density=density, process_group=mesh["replicate"])
        train(model, sgd(model), rank, range(14))
        assert sieve.report is not None
        sieve.check_replicas()
        found[density] = sieve.report.ring_bytes
        n = sum(len(piece.view(-1)) for piece in weights(model))
        assert sieve.report.n == n
        assert sieve.report.union == max(1, round(density * n))
    assert found[0.01] < 0.25 * found[1.0], found  # a model this small: half of it is the histogram


def _skips_together(rank: int, mesh: Any, folder: Path) -> None:
    """A NaN in one shard of one replica skips the step on all four ranks."""
    torch.manual_seed(0)
    model = sharded(nn.Sequential(nn.Linear(N_IN, 8)), mesh["shard"])
    sieve = gradsieve.sparsify(model, density=0.1, process_group=mesh["replicate"])
    optimizer = sgd(model)
    train(model, optimizer, rank, range(3))
    before, step = sieve.reducer.residual.clone(), sieve.reducer.step
    optimizer.zero_grad()
    factors = torch.ones(8)
    factors[0] = torch.nan if rank == 2 else 1.0  # row 0 of the weight is in the first shard
    (model(torch.ones(4, N_IN)) * factors).sum().backward()
    assert sieve.report is not None
    assert not sieve.report.finite
    assert all(bool(parameter.grad.to_local().isnan().all()) for parameter in model.parameters())  # type: ignore[union-attr]
    assert torch.equal(sieve.reducer.residual, before)
    assert sieve.reducer.step == step
    train(model, optimizer, rank, range(3, 5))
    assert sieve.report.finite
    sieve.check_replicas()


def _resumes(rank: int, mesh: Any, folder: Path) -> None:
    """Bit for bit; shards have files of their own."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(make_model(), mesh["shard"])
    optimizer = sgd(model)
    sieve = gradsieve.sparsify(model, density=0.05, process_group=mesh["replicate"])
    train(model, optimizer, rank, range(3))
    states = copy.deepcopy(get_state_dict(model, optimizer))
    sieve.save(folder / "saved")
    train(model, optimizer, rank, range(3, 6))
    again = sharded(make_model(), mesh["shard"])
    second = sgd(again)
    other = gradsieve.sparsify(again, density=0.05, process_group=mesh["replicate"])
    set_state_dict(again, second, model_state_dict=states[0], optim_state_dict=states[1])
    other.load(folder / "saved")
    train(again, second, rank, range(3, 6))
    assert same(model, again)
    assert torch.equal(sieve.reducer.residual, other.reducer.residual)


def _saves_together(rank: int, mesh: Any, folder: Path) -> None:
    """What fails in one shard, before or while it is committed, is raised on all ranks, and no shard moves on."""
    import gradsieve.state.checkpoint as module

    model = sharded(make_model(), mesh["shard"])
    optimizer = sgd(model)
    sieve = gradsieve.sparsify(model, density=0.05, process_group=mesh["replicate"])
    train(model, optimizer, rank, range(2))
    sieve.save(folder / "together", {"step": 2})
    before = sieve.reducer.residual.clone()
    train(model, optimizer, rank, range(2, 4))

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def refused(words: str, place: Any, extra: Any = None) -> None:
        with pytest.raises(gradsieve.CheckpointError, match=words):
            sieve.save(place, extra)

    for name in ("write_part", "_commit"):
        real = getattr(module, name)
        setattr(module, name, fails if rank == 1 else real)  # the first rank of shard 1
        refused("the previous one is kept: rank 0 of shard 1: .Errno 28. No space left", folder / "together")
        setattr(module, name, real)
        dist.barrier()
        assert not list((folder / "together").rglob("*.partial"))
    refused("rank 1 of shard 0: folder must be a path, got None", None if rank == 2 else folder / "together")
    refused("rank 1 of shard 1: extra must be a dict, got 5", folder / "together", 5 if rank == 3 else None)
    shutil.copytree(folder / "together", folder / f"older-{rank}")
    sieve.save(folder / "together", {"step": 4})
    dist.barrier()
    older, newer = folder / f"older-{rank}", folder / f"newer-{rank}"
    shutil.copytree(folder / "together", newer)
    killed = folder / f"killed-{rank}"  # shard 0 was committed, and the process that commits shard 1 was killed
    shutil.copytree(older, killed)
    shutil.copytree(newer / "shard-0-of-2", killed / "shard-0-of-2", dirs_exist_ok=True)
    assert sieve.load(killed) == {"step": 2}
    assert torch.equal(sieve.reducer.residual, before)
    shutil.rmtree(older / "shard-0-of-2")
    shutil.copytree(newer / "shard-0-of-2", older / "shard-0-of-2")
    with pytest.raises(gradsieve.CheckpointError, match="that all shards have: shard 0 has step-4-"):
        sieve.load(older)
    assert sieve.load(newer) == {"step": 4}


class Branches(nn.Module):
    """One of two layers is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(N_IN, 4), nn.Linear(N_IN, 4)
        self.use_other = False

    def forward(self, x: Tensor) -> Any:
        return self.other(x) if self.use_other else self.one(x)


def _unused(rank: int, mesh: Any, folder: Path) -> None:
    """Where no rank uses a layer it keeps no gradient; where one replica does, all get its update."""
    model = Branches()
    sharded(model, mesh["shard"])
    sieve = gradsieve.sparsify(model, density=1.0, process_group=mesh["replicate"])
    backward(model, rank, 0)
    assert model.other.weight.grad is None
    assert model.one.weight.grad is not None
    model.zero_grad()
    model.use_other = rank >= 2  # the second replica
    backward(model, rank, 1)
    assert model.other.weight.grad is not None
    optimizer = sgd(model)
    optimizer.step()
    sieve.check_replicas()


def _refusals(rank: int, mesh: Any, folder: Path) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    def refused(words: str, make: Callable[[], nn.Module], group: Any) -> None:
        with pytest.raises(ValueError, match=words):
            gradsieve.sparsify(make(), process_group=group)

    def half() -> nn.Module:
        model = make_model()
        fully_shard(model[0], mesh=mesh["shard"])
        return model

    replicas = mesh["replicate"]
    refused(
        "process_group must be the ranks that hold the same shard",
        lambda: sharded(make_model(), mesh["shard"]),
        None,
    )
    refused(
        "parameter 0.weight must be sharded over one dimension, got 2",
        lambda: sharded(make_model(), mesh),
        replicas,
    )
    refused("must be a mesh of one dimension", lambda: sharded(make_model(), mesh["shard"]), mesh)
    refused("parameter 2.weight must be sharded by fully_shard, got one that is not", half, replicas)
    refused("workers disagree on shard", lambda: sharded(make_model(), mesh["shard"]), mesh["shard"])
    refused("got composable replicate: wrap the model", lambda: replicate(make_model(), mesh=replicas), replicas)


def _missing(rank: int, mesh: Any, folder: Path) -> None:
    """What the shards of a node agree on has a limit, and names who is missing."""
    model = sharded(make_model(), mesh["shard"])
    sieve = gradsieve.sparsify(model, density=0.05, process_group=mesh["replicate"], timeout=2.0)
    assert isinstance(sieve.hook, ShardHook)
    assert sieve.hook._agreed(True)
    assert not sieve.hook._agreed(rank != 1) or rank > 1
    if rank == 2:
        with pytest.raises(gradsieve.PeerLost, match="phase shards of the node") as caught:
            sieve.hook._agreed(True)
        assert caught.value.ranks == [1]  # of this node
    dist.barrier()


def test_gradients_of_shards(tmp_path: Path) -> None:
    run_processes(_work, 4, tmp_path, str(tmp_path))
