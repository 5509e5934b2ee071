"""Workers leave and join while the others go on: survivors keep what they have, newcomers get what is agreed on."""

import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes, run_survivors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsieve import PeerLost, Regrouped, share, sparsify
from gradsieve.method import Method

LIMIT = 5.0


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3))


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (model(torch.randn(8, 10, generator=generator)) - 1).square().mean()


def _meet(folder: Path, name: str, rank: int, size: int) -> None:
    """A process group of other members: the old one goes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", f"file://{folder}/{name}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def _missing(work: Callable[[], Any]) -> list[int]:
    try:
        work()
    except PeerLost as lost:
        return lost.ranks
    return []


def _sparsified(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Three workers; rank 1 is killed; two go on; a newcomer (rank 3, waiting so far) joins them."""
    net = _network()
    if rank == 3:
        _meet(folder, "third", 2, 3)
        model = DDP(net)
        sieve = sparsify(model, "exdyna", 0.1, timeout=LIMIT, join=True)
        found: dict[str, Any] = {"newcomer": sieve.reducer.residual.clone(), "step": sieve.reducer.step}
        return found | _trained(model, sieve, 12, 2)
    _meet(folder, "first", rank, 3)
    model = DDP(net)
    sieve = sparsify(model, "exdyna", 0.1, timeout=LIMIT)
    _trained(model, sieve, 5, rank)
    before = sieve.reducer.residual.clone()
    if rank == 1:
        os._exit(9)
    model.zero_grad()
    assert _missing(lambda: _loss(model, 5, rank).backward()) == [1]
    assert torch.equal(sieve.reducer.residual, before)
    now = {0: 0, 2: 1}[rank]
    _meet(folder, "second", now, 2)
    old, model = model, DDP(net)
    first = sieve.regroup(ddp_model=model)
    with pytest.raises(RuntimeError, match="this DistributedDataParallel was replaced by regroup"):
        _loss(old, 5, rank)
    assert torch.equal(sieve.reducer.residual, before)
    _trained(model, sieve, 10, now)
    before = sieve.reducer.residual.clone()
    _meet(folder, "third", now, 3)
    del model
    model = DDP(net)
    second = sieve.regroup(ddp_model=model)
    assert torch.equal(sieve.reducer.residual, before)
    assert sieve.reducer.step == 10
    return {"first": first, "second": second} | _trained(model, sieve, 12, now)


def _trained(model: DDP, sieve: Any, until: int, rank: int) -> dict[str, Any]:
    for step in range(sieve.reducer.step, until):
        model.zero_grad()
        _loss(model, step, rank).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    sieve.check_replicas()
    return {"weights": nn.utils.parameters_to_vector(model.parameters()).detach()}


def test_sparsify_goes_on_without_a_dead_worker_and_with_a_new_one(tmp_path: Path) -> None:
    found = run_survivors(_sparsified, 4, tmp_path, tmp_path)
    assert set(found) == {0, 2, 3}
    for rank in (0, 2):
        first, second = found[rank]["first"], found[rank]["second"]
        assert isinstance(first, Regrouped)
        assert (first.world_size, first.step, first.lost, first.newcomers, first.behind) == (2, 5, [1], [], [])
        assert 0 < first.lost_norm < first.kept_norm
        assert (second.world_size, second.step, second.lost, second.newcomers) == (3, 10, [], [2])
        assert second.lost_norm == 0
    assert not found[3]["newcomer"].any()
    assert found[3]["step"] == 10
    assert torch.equal(found[0]["weights"], found[3]["weights"])
    assert torch.equal(found[0]["weights"], found[2]["weights"])


def _behind(rank: int, world_size: int, folder: Path) -> list[tuple[Regrouped, Tensor]]:
    return [_behind_once(rank, folder, copies) for copies in (True, False)]


def _behind_once(rank: int, folder: Path, copies: bool) -> tuple[Regrouped, Tensor]:
    """Rank 0 fails after the exchange of step 4, which rank 1 completes; its moments are copied or not."""
    update = Method.update
    net = _network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    _meet(folder, f"first-{copies}", rank, 2)
    model = DDP(net)
    sieve = sparsify(model, "topk", 0.2, timeout=LIMIT)

    def train(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            optimizer.step()

    def fails(*arguments: Any) -> None:
        raise PeerLost("rank 1 did not take part", [1], "values")

    train(range(4))
    Method.update = fails if rank == 0 else update  # type: ignore[method-assign, assignment]
    assert _missing(lambda: train(range(4, 5))) == ([1] if rank == 0 else [])
    Method.update = update  # type: ignore[method-assign]
    _meet(folder, f"second-{copies}", rank, 2)
    model = DDP(net, init_sync=False)
    ahead = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    regrouped = sieve.regroup(ddp_model=model)
    now = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert torch.equal(ahead, now) == (rank == 1), "the weights of the worker that is ahead"
    assert sieve.regrouped == regrouped
    if copies:
        source = next(each for each in range(2) if each not in regrouped.newcomers + regrouped.behind)
        state = [optimizer.state_dict()]
        dist.broadcast_object_list(state, src=source)
        optimizer.load_state_dict(state[0])
    train(range(5, 9))
    return regrouped, nn.utils.parameters_to_vector(net.parameters()).detach()


def test_who_is_behind_needs_the_moments_of_another(tmp_path: Path) -> None:
    one, other = run_processes(_behind, 2, tmp_path, tmp_path)
    for regrouped, _ in (*one, *other):
        assert (regrouped.step, regrouped.behind, regrouped.newcomers) == (5, [0], [])
    assert torch.equal(one[0][1], other[0][1])
    assert not torch.equal(one[1][1], other[1][1]), "without, replicas differ"


def _shared(rank: int, world_size: int, folder: Path, delay: int) -> dict[str, Any]:
    net = _network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(steps: range, place: int) -> None:
        for step in steps:
            optimizer.zero_grad()
            _loss(net, step, place).backward()
            optimizer.step()

    if rank == 3:
        _meet(folder, "second", 2, 3)
        sieve = share(net, optimizer, density=0.2, delay=delay, timeout=LIMIT, join=True)
        vector = nn.utils.parameters_to_vector(net.parameters())
        assert torch.equal(vector, sieve.replica.weights.shared)
        place, found = 2, None
    else:
        _meet(folder, "first", rank, 3)
        sieve = share(net, optimizer, density=0.2, delay=delay, timeout=LIMIT)
        train(range(5), rank)
        if rank == 1:
            os._exit(9)
        assert _missing(lambda: train(range(5, 9), rank)) == [1]
        place = {0: 0, 2: 1}[rank]
        before = nn.utils.parameters_to_vector(net.parameters()).clone()
        _meet(folder, "second", place, 3)
        found = sieve.regroup()
        same = torch.equal(before, nn.utils.parameters_to_vector(net.parameters()))
        assert same or place in found.behind
    train(range(20, 26), place)
    sieve.check_replicas()
    sieve.finish()
    return {"found": found, "weights": nn.utils.parameters_to_vector(net.parameters()).detach()}


def test_share_goes_on_without_a_dead_worker_and_with_a_new_one(tmp_path: Path) -> None:
    for delay in (0, 1):
        folder = tmp_path / str(delay)
        folder.mkdir()
        found = run_survivors(_shared, 4, folder, folder, delay)
        assert set(found) == {0, 2, 3}
        report = found[0]["found"]
        assert (report.world_size, report.lost, report.newcomers) == (3, [1], [2])
        assert report.lost_norm > 0
        for rank in (2, 3):
            assert torch.equal(found[0]["weights"], found[rank]["weights"])


EVENTS = 50


def _eventful(rank: int, world_size: int, folder: Path, events: int) -> tuple[float, int]:
    """Workers leave and join between rounds at random, by a plan that all know; rank 0 stays."""
    chance = random.Random(7)
    present, plans = {0, 1, 2}, []
    for _ in range(events):
        absent = sorted(set(range(world_size)) - present)
        leaving = chance.random() < 0.5 and len(present) > 2
        if leaving or not absent:
            present = present - {chance.choice(sorted(present - {0}))}
        else:
            present = present | {chance.choice(absent)}
        plans.append(sorted(present))
    plans = [[0, 1, 2], *plans]
    net, sieve, optimizer = _network(), None, None
    for number, members in enumerate(plans):
        if rank not in members:
            sieve = None
            continue
        _meet(folder, f"store-{number}", members.index(rank), len(members))
        if sieve is None:
            net = _network()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            sieve = share(net, optimizer, density=0.1, timeout=20, join=number > 0)
        else:
            sieve.regroup()
        for step in range(3 * number, 3 * number + 3):
            optimizer.zero_grad()
            _loss(net, step, rank).backward()
            optimizer.step()
    with sieve.shared() if sieve is not None else torch.no_grad():
        loss = sum(float(_loss(net, step, 99)) for step in range(5)) / 5
    return loss, sum(len(members) for members in plans)


def test_fifty_changes_of_the_group(tmp_path: Path) -> None:
    """Training goes on and ends as well as if no worker had ever left."""
    found = run_survivors(_eventful, 4, tmp_path, tmp_path, EVENTS)
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    calm = run_survivors(_undisturbed, 3, quiet, quiet, EVENTS)
    start = sum(_loss(_network(), step, 99).item() for step in range(5)) / 5
    disturbed, undisturbed = found[0][0], calm[0]
    assert undisturbed < 0.5 * start
    assert disturbed < 1.25 * undisturbed


def _undisturbed(rank: int, world_size: int, folder: Path, events: int) -> float:
    net = _network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sieve = share(net, optimizer, density=0.1)
    for step in range(3 * (events + 1)):
        optimizer.zero_grad()
        _loss(net, step, rank).backward()
        optimizer.step()
    with sieve.shared():
        return sum(float(_loss(net, step, 99)) for step in range(5)) / 5
