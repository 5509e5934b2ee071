"""Bounded waiting: a worker that is killed, stopped or elsewhere ends the exchange in time, and is named by all."""

import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_survivors
from test_ddp import network, square
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsieve import PeerLost, ShareSieve, Sieve, WorkersDiverged, share, sparsify
from gradsieve.comm.traffic import Ledger
from gradsieve.ddp.hook import BucketHook

LIMIT = 2.0  # seconds


def _fresh(**options: Any) -> tuple[DDP, Sieve]:
    """A model with a group of its own: those of failed exchanges are of no more use."""
    model = DDP(network(), process_group=dist.new_group())
    return model, sparsify(model, "exdyna", density=0.05, timeout=LIMIT, **options)


def _steps(model: DDP, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        model.zero_grad()
        square(step, rank)(model).backward()


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        work()
    except (PeerLost, WorkersDiverged) as error:
        ranks = getattr(error, "ranks", None)
        return {"words": str(error), "ranks": ranks, "seconds": time.monotonic() - started}
    return {"words": "", "ranks": None, "seconds": time.monotonic() - started}


def _scenarios(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))

    model, sieve = _fresh()
    _steps(model, rank, 0, 2)
    if rank == 0:
        found["alone"] = _outcome(lambda: sieve.save(folder / "alone"))
    else:
        found["alone"] = _outcome(lambda: _steps(model, rank, 2, 3))
    dist.barrier()

    model, sieve = _fresh()
    _steps(model, rank, 0, 2)
    found["absent"] = _outcome(lambda: time.sleep(LIMIT + 1) if rank == 2 else sieve.save(folder / "absent"))
    dist.barrier()
    sieve.save(folder / "absent")
    _steps(model, rank, 2, 3)

    model, sieve = _fresh()
    _steps(model, rank, 0, 2)
    before = sieve.reducer.residual.clone()
    if rank == 2:
        time.sleep(LIMIT + 4)
    found["late"] = _outcome(lambda: _steps(model, rank, 2, 3))
    found["restored"] = torch.equal(before, sieve.reducer.residual)
    dist.barrier()

    model, sieve = _fresh()
    _steps(model, rank, 0, 3)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    found["stopped"] = _outcome(lambda: _steps(model, rank, 3, 4))
    if rank == 0:
        time.sleep(2)  # until rank 1 has seen it, too
        os.kill(int(pids[2]), signal.SIGCONT)
    dist.barrier()

    plain = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    beside = share(plain, optimizer, density=0.5, delay=1, timeout=LIMIT)
    _rounds(plain, optimizer, rank, 3)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = _outcome(lambda: _rounds(plain, optimizer, rank, 3))
    assert isinstance(beside, ShareSieve)
    return found


def _rounds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("waiting")
    found = run_survivors(_scenarios, 3, folder, folder)
    assert set(found) == {0, 1}
    return [found[0], found[1]]


def test_a_stopped_worker_is_named_in_time(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        stopped = found["stopped"]
        assert stopped["ranks"] == [2]
        assert "rank 2 (its process is stopped) did not take part: no answer after" in stopped["words"]
        assert " in step 3, phase " in stopped["words"]
        assert stopped["seconds"] < LIMIT + 10


def test_a_killed_worker_is_named_at_once(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        killed = found["killed"]
        assert killed["ranks"] == [2]
        assert "rank 2 (its process has ended) did not take part" in killed["words"]
        assert "in the round after step " in killed["words"]
        assert killed["seconds"] < 10


def test_a_late_worker_is_named_and_the_step_taken_back(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert found["late"]["ranks"] == [2]
        assert "rank 2 did not take part: no answer after" in found["late"]["words"]
        assert found["restored"]


def test_every_rank_must_save(outcomes: list[dict[str, Any]]) -> None:
    assert outcomes[0]["alone"]["words"].startswith("every rank must call save: rank 1 did not, it is in phase")
    assert "every rank must call save" in outcomes[1]["alone"]["words"]
    assert outcomes[0]["alone"]["seconds"] < LIMIT + 10


def test_a_rank_that_does_not_save_is_named_and_the_next_save_of_all_works(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        words = r"every rank must call save: rank 2 did not within 2\.\d s in step 2, phase save"
        assert re.fullmatch(words, found["absent"]["words"])
        assert found["absent"]["ranks"] == [2]


def test_a_loss_in_the_exchange_of_a_sparse_embedding_names_the_step() -> None:
    class World:
        size = 2

        def run(self, programs: list[Any]) -> list[Any]:
            raise PeerLost("rank 1 did not take part", [1], "rows")

    hook: Any = SimpleNamespace(reducer=SimpleNamespace(step=7), world=World(), _beside=Ledger())
    with pytest.raises(PeerLost, match=r"in step 7, phase rows"):
        BucketHook._mean_of_sparse(hook, torch.zeros(3, 2).to_sparse())


def test_the_error_can_be_sent_to_another_process() -> None:
    lost = PeerLost("rank 2 did not take part", [2], "values", "step 3")
    again = pickle.loads(pickle.dumps(lost))
    assert str(again) == str(lost) == "rank 2 did not take part in step 3, phase values"
    assert again.ranks == [2]
