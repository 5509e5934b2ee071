"""`gradsieve.share` between nodes, with FSDP2 or DDP inside them: 4 processes, 2 x 2."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from test_share import OPTIMIZERS, flat, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.share.weights import local
from virtual_replicas import Workers, backward, make_model


def _shards(rank: int, world_size: int) -> None:
    """FSDP2 inside a node of two, share between the nodes: local shards are averaged over the replicate group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh["replicate"].get_local_rank()
    whole = make_model()
    model = copy.deepcopy(whole)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sieve = gradsieve.share(model, optimizer, density=1.0, process_group=mesh["replicate"].get_group())
    reference = Workers(2, 1.0, optimizer=torch.optim.AdamW, lr=0.01)
    for step in range(5):
        train(model, optimizer, replica, [step])
        reference.step(step)
    sieve.check_replicas()
    full = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(full, reference.weights()[replica], rtol=1e-4, atol=1e-5)

    sparse = copy.deepcopy(whole)
    fully_shard(sparse, mesh=mesh["shard"])
    optimizer = OPTIMIZERS["adamw"](sparse.parameters())
    sieve = gradsieve.share(sparse, optimizer, density=0.05, delay=1, process_group=mesh["replicate"].get_group())
    train(sparse, optimizer, replica, range(5))
    sieve.check_replicas()
    assert sieve.report is not None
    assert sieve.report.union == sieve.report.k
    with sieve.shared():
        pass
    sieve.finish()

    # DDP inside a node of two, share between the nodes.
    inner = make_model()
    ddp = DistributedDataParallel(inner, process_group=mesh["shard"].get_group())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    sieve = gradsieve.share(ddp, optimizer, density=0.05, process_group=mesh["replicate"].get_group())
    for step in range(4):
        optimizer.zero_grad()
        backward(ddp, rank, step)
        optimizer.step()
    other = flat(inner)
    dist.broadcast(other, 2 * replica, group=mesh["shard"].get_group())
    assert torch.equal(other, flat(inner)), "replicas inside a node differ"


def _checkpoints(rank: int, world_size: int, folder: str) -> None:
    """Shards, and groups of nodes that all hold whole models, have their own parts of one checkpoint."""
    from torch.distributed.checkpoint import load, save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gradsieve.dcp import SieveState

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh["replicate"].get_local_rank()

    def sharded(delay: int) -> tuple[nn.Module, torch.optim.Optimizer, gradsieve.ShareSieve]:
        model = make_model()
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = mesh["replicate"]
        return model, optimizer, gradsieve.share(model, optimizer, density=0.05, delay=delay, process_group=group)

    def by_node() -> tuple[nn.Module, torch.optim.Optimizer, gradsieve.ShareSieve]:
        ddp = DistributedDataParallel(make_model(), process_group=mesh["shard"].get_group())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        return ddp, optimizer, gradsieve.share(ddp, optimizer, density=0.05, process_group=mesh["replicate"])

    for name, make in (("shards", lambda: sharded(0)), ("late", lambda: sharded(1)), ("nodes", by_node)):
        model, optimizer, sieve = make()
        train(model, optimizer, replica, range(4))
        sieve.save(f"{folder}/{name}")
        save({"sieve": SieveState(sieve)}, checkpoint_id=f"{folder}/{name}-dcp")
        train(model, optimizer, replica, range(4, 7))
        sieve.finish()
        expected = own(model)
        model, optimizer, sieve = make()
        sieve.load(f"{folder}/{name}")
        train(model, optimizer, replica, range(4, 7))
        sieve.finish()
        assert torch.equal(own(model), expected), name
        model, optimizer, sieve = make()
        load({"sieve": SieveState(sieve, f"{folder}/{name}-dcp")}, checkpoint_id=f"{folder}/{name}-dcp")
        train(model, optimizer, replica, range(4, 7))
        sieve.finish()
        assert torch.equal(own(model), expected), f"{name}, torch.distributed.checkpoint"
    assert {path.name for path in Path(folder, "shards").iterdir()} == {"shard-0-of-2", "shard-1-of-2"}

    model = make_model()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match="workers disagree on shard: rank 0 has shard 0 of 2, rank 1 has shard 1 of 2"
    ):
        gradsieve.share(model, optimizer, density=0.05, process_group=mesh["shard"])  # the wrong ranks


def own(model: nn.Module) -> torch.Tensor:
    return torch.cat([local(parameter).flatten() for parameter in model.parameters()])


def test_shards_and_nodes_have_checkpoints(tmp_path: Path) -> None:
    run_processes(_checkpoints, 4, tmp_path, str(tmp_path))


def test_shards_and_nodes(tmp_path: Path) -> None:
    run_processes(_shards, 4, tmp_path)
