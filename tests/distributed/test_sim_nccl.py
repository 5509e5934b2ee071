"""Real processes on the simulated device, over a group that refuses what NCCL refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import nn

import gradsieve
from gradsieve import ProcessGroupWorld, SparseReducer, make_sparsifier
from gradsieve.comm.collectives import AllGather, AllReduce, AllToAll, Broadcast
from gradsieve.state.replicas import ReplicasDiffer
from helpers import LIBRARY, Group, gradients

N, STEPS, DENSITY = 1_000, 11, 0.02


def _work(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import sim_nccl  # noqa: F401
    from sim_device import DEVICE

    groups = {name: dist.new_group(backend=name) for name in ("sim-nccl", "sim-both")}
    group = groups["sim-nccl"]
    found: dict[str, Any] = {"refused": _refused(group)}
    for name, each in groups.items():
        world = ProcessGroupWorld(each, device=DEVICE)
        found[name] = _collectives(rank, world), list(each._calls)
    found["gloo"] = _collectives(rank, ProcessGroupWorld(device=DEVICE)), []
    world = ProcessGroupWorld(group, device=DEVICE)
    found["updates"] = {name: _reduce(rank, world_size, world, name) for name in LIBRARY}
    found["disagree"] = _disagree(rank, world_size, world)
    found["ddp"] = _ddp(rank, group, Path(folder) / "ddp")
    found["share"] = [_share(rank, group, Path(folder) / f"share{delay}", delay) for delay in (0, 1)]
    return found


def _refused(group: Any) -> list[str]:
    """What this group says to tensors that NCCL does not carry."""
    from sim_device import to_sim

    words = []
    for attempt in (
        lambda: dist.all_reduce(torch.ones(2), group=group),
        lambda: dist.all_reduce(to_sim(torch.ones(2, dtype=torch.int16)), group=group),
        lambda: dist.all_gather_object([None, None], "text", group=group),
    ):
        try:
            attempt()
            words.append("nothing")
        except Exception as error:
            words.append(f"{type(error).__name__}: {error}")
    return words


def _collectives(rank: int, world: Any) -> list[Any]:
    from sim_device import to_host, to_sim

    def program():  # type: ignore[no-untyped-def]
        control = yield AllGather("control", torch.arange(3 + 5 * rank, dtype=torch.uint8))
        even = yield AllGather("even", to_sim(torch.full((8 + rank, 2), rank)), [8, 9])
        uneven = yield AllGather("uneven", to_sim(torch.full((1 + 40_000 * rank,), rank)), [1, 40_001])
        sent = yield Broadcast("sent", to_sim(torch.tensor([rank * 10 > 0, True])), 1)
        total = yield AllReduce("sum", to_sim(torch.full((5,), float(rank + 1))))
        each = yield AllToAll("each", to_sim(torch.full((3,), rank).bfloat16()), [1 + rank, 2 - rank], rank)
        return [control, even, uneven, sent, total, each]

    replies = world.run([program()])[0]
    devices = [(reply[0] if isinstance(reply, list) else reply).device.type for reply in replies]
    return [[[*map(to_host, reply)] if isinstance(reply, list) else to_host(reply) for reply in replies], devices]


def _reduce(rank: int, world_size: int, world: Any, name: str) -> list[torch.Tensor]:
    from sim_device import to_host, to_sim

    reducer = SparseReducer(make_sparsifier(name), DENSITY, rank=rank, world_size=world_size)
    return [
        to_host(world.run([reducer.reduce(to_sim(gradients("normal", N, world_size, step)[rank]))])[0])
        for step in range(STEPS)
    ]


def _disagree(rank: int, world_size: int, world: Any) -> str:
    from sim_device import to_sim

    reducer = SparseReducer(make_sparsifier("topk"), 0.01 + 0.01 * rank, rank=rank, world_size=world_size)
    try:
        world.run([reducer.reduce(to_sim(torch.ones(100)))])
    except ValueError as error:
        return str(error)
    return "nothing"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 23), nn.ReLU(), nn.Linear(23, 7), nn.ReLU(), nn.Linear(7, 1))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(10 * step + rank))


def _ddp(rank: int, group: Any, folder: Path) -> dict[str, Any]:
    """Training with DDP itself on the device, beside the same on the host over gloo."""
    from sim_device import module_to_sim, to_host, to_sim, watch

    there = nn.parallel.DistributedDataParallel(module_to_sim(_model()), process_group=group, bucket_cap_mb=0.001)
    here = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.001)
    sieves = [gradsieve.sparsify(model, "exdyna", density=0.1) for model in (there, here)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (there, here)]
    waits = 0
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with watch() as seen:
            there(to_sim(_batch(rank, step))).square().mean().backward()
        waits = len(seen)
        here(_batch(rank, step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    sieves[0].check_replicas()
    sieves[0].save(folder)
    residual = to_host(sieves[0].reducer.residual)
    sieves[0].reducer.residual.zero_()
    sieves[0].load(folder)
    with torch.no_grad():
        first = next(there.parameters())
        first.add_(float(rank))
    try:
        sieves[0].check_replicas()
        words = "nothing"
    except ReplicasDiffer as error:
        words = str(error)
    pairs = zip(there.parameters(), here.parameters(), strict=True)
    return {
        "waits": waits,
        "loaded": torch.equal(residual, to_host(sieves[0].reducer.residual)),
        "same": [torch.equal(to_host(a.detach()), b.detach()) for a, b in pairs],
        "replicas": words,
    }


def _share(rank: int, group: Any, folder: Path, delay: int) -> dict[str, Any]:
    """Shared weights on the device, beside the same on the host over gloo."""
    from sim_device import module_to_sim, to_host, to_sim

    models = [module_to_sim(_model()), _model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    sieves = [
        gradsieve.share(model, optimizer, "exdyna", density=0.1, delay=delay, process_group=each)
        for model, optimizer, each in zip(models, optimizers, (group, None), strict=True)
    ]
    sieves[1].replica.late = True
    for step in range(5):
        for model, optimizer, move in zip(models, optimizers, (to_sim, lambda x: x), strict=True):
            optimizer.zero_grad()
            model(move(_batch(rank, step))).square().mean().backward()
            optimizer.step()
        if step == 2:
            sieves[0].save(folder)
            sieves[0].load(folder)
    sieves[0].check_replicas()
    shared = [to_host(sieve.replica.weights.shared).clone() for sieve in sieves]
    for sieve in sieves:
        sieve.finish()
        sieve.close()
    finished = [torch.cat([to_host(p.detach()).flatten() for p in model.parameters()]) for model in models]
    return {"shared": torch.equal(*shared), "finished": torch.equal(*finished)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One launch for all tests."""
    folder = tmp_path_factory.mktemp("sim")
    return run_processes(_work, 2, folder, str(folder))


def test_what_nccl_refuses_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        host, narrow, objects = result["refused"]
        assert "No backend type associated with device type cpu" in host
        assert "data type is not supported for NCCL" in narrow
        assert objects != "nothing"


@pytest.mark.parametrize("backend", ["sim-nccl", "sim-both", "gloo"])
def test_collectives(results: list[dict[str, Any]], backend: str) -> None:
    for rank, result in enumerate(results):
        (replies, devices), calls = result[backend]
        control, even, uneven, sent, total, each = replies
        assert [part.tolist() for part in control] == [[*range(3)], [*range(8)]]
        assert [part.tolist() for part in even] == [[[0, 0]] * 8, [[1, 1]] * 9]
        assert [(len(part), part.unique().tolist()) for part in uneven] == [(1, [0]), (40_001, [1])]
        assert sent.tolist() == [True, True]
        assert total.tolist() == [3.0] * 5
        assert [part.tolist() for part in each] == [[0.0] * (1 + rank), [1.0] * (2 - rank)]
        assert devices == ["cpu", *["sim"] * 5]
        if backend == "sim-nccl":
            assert {"all_gather", "all_to_all", "all_to_all_single", "broadcast"} <= set(calls)
        if backend == "sim-both":
            assert any(call.endswith("on the host") for call in calls)


def test_virtual_equals_processes(results: list[dict[str, Any]]) -> None:
    for name in LIBRARY:
        group = Group(name, DENSITY, 2)
        for step in range(STEPS):
            updates = group.step(gradients("normal", N, 2, step))
            for rank, result in enumerate(results):
                assert torch.equal(result["updates"][name][step], updates[rank]), f"{name}, step {step}"


def test_settings_are_compared(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["disagree"] == "workers disagree on density: rank 0 has 0.01, rank 1 has 0.02"


def test_ddp(results: list[dict[str, Any]]) -> None:
    """Several buckets on a side stream: two waits, the same parameters as on the host, checkpoints and checks."""
    for result in results:
        found = result["ddp"]
        assert found["waits"] == 2
        assert found["loaded"]
        assert found["same"][1:] == [True] * 5  # the first was changed afterwards
        assert "0.weight of rank 1 is not that of rank 0" in found["replicas"]


def test_share_of_weights(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["share"] == [{"shared": True, "finished": True}] * 2
