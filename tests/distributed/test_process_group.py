"""Virtual workers and gloo processes do the same, to the last bit where sums are exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor

from gradsieve import SPARSIFIERS, Meter, ProcessGroupWorld, SparseReducer, make_sparsifier
from gradsieve.collectives import AllGather, AllReduce, Broadcast
from helpers import Group, gradients, load_example

N, STEPS, DENSITY = 4_000, 25, 0.02


def dyadic(step: int, world_size: int) -> list[Tensor]:
    """Multiples of 1/64: sums of a few are exact in any order, so that gloo's rings cannot round differently."""
    return [(grad * 16).round() / 64 for grad in gradients("normal", N, world_size, step)]


def _train(rank: int, world_size: int, names: list[str], exact: bool) -> dict[str, Any]:
    load_example("new_sparsifier")
    world, found = Meter(ProcessGroupWorld()), {}
    for name in names:
        reducer = SparseReducer(make_sparsifier(name), DENSITY, rank=rank, world_size=world_size)
        updates, reports = [], []
        for step in range(STEPS):
            grads = dyadic(step, world_size) if exact else gradients("normal", N, world_size, step)
            updates.append(world.run([reducer.reduce(grads[rank])])[0])
            reports.append(reducer.end_step())
        found[name] = (updates, reports, reducer.state_dict())
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("exact", [True, False])
def test_virtual_equals_gloo(world_size: int, exact: bool, tmp_path: Path) -> None:
    rounds = world_size > 2 and not exact
    # Where gloo's rings round differently, only those whose picks cannot depend on the last bit of a sum.
    names = ["dense", "randomk", "hard_threshold"] if rounds else list(SPARSIFIERS)
    results = run_processes(_train, world_size, tmp_path, names, exact)
    for name in names:
        group = Group(name, DENSITY, world_size)
        for step in range(STEPS):
            grads = dyadic(step, world_size) if exact else gradients("normal", N, world_size, step)
            updates = group.step(grads)
            for rank in range(world_size):
                found, report = results[rank][name][0][step], results[rank][name][1][step]
                same = group.reports[rank]
                if not rounds:
                    assert torch.equal(found, updates[rank]), f"{name}, step {step}, rank {rank}"
                else:
                    torch.testing.assert_close(found, updates[rank], rtol=1e-6, atol=1e-6)
                assert report.counts == same.counts
                assert (report.bytes_sent, report.ring_bytes, report.collectives) == (
                    same.bytes_sent,
                    same.ring_bytes,
                    same.collectives,
                )
        for rank, reducer in enumerate(group.reducers):
            state = results[rank][name][2]
            assert state["state"].keys() == reducer.state_dict()["state"].keys()
            if not rounds:
                assert torch.equal(state["residual"], reducer.residual)


def _collectives(rank: int, world_size: int) -> list[Any]:
    def program():  # type: ignore[no-untyped-def]
        total = yield AllReduce("sum", torch.tensor([rank, 1]))
        ragged = yield AllGather("ragged", torch.arange(rank * 2, dtype=torch.int32))
        known = yield AllGather("known", torch.full((rank + 1, 2), rank), [1, 2, 3])
        nothing = yield AllGather("nothing", torch.empty(0))
        sent = yield Broadcast("sent", torch.tensor([rank * 10]), 2)
        return [total, ragged, known, nothing, sent]

    return ProcessGroupWorld().run([program()])[0]


def test_collectives(tmp_path: Path) -> None:
    for total, ragged, known, nothing, sent in run_processes(_collectives, 3, tmp_path):
        assert total.tolist() == [3, 3]
        assert [part.tolist() for part in ragged] == [[], [0, 1], [0, 1, 2, 3]]
        assert [part.tolist() for part in known] == [[[0, 0]], [[1, 1]] * 2, [[2, 2]] * 3]
        assert [part.tolist() for part in nothing] == [[], [], []]
        assert sent.tolist() == [20]


def _count_handed_bytes(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Bytes that torch.distributed was really given, beside what the meter and the report say."""
    import gradsieve.worlds.process_group as module

    handed = 0
    real_reduce, real_broadcast, real_gather = dist.all_reduce, dist.broadcast, module._all_gather_single

    def count(tensor: Tensor) -> None:
        nonlocal handed
        handed += tensor.nbytes

    def all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
        count(tensor)
        return real_reduce(tensor, **kwargs)

    def broadcast(tensor: Tensor, **kwargs: Any) -> Any:
        count(tensor)
        return real_broadcast(tensor, **kwargs)

    def gather(out: Tensor, tensor: Tensor, **kwargs: Any) -> Any:
        count(tensor)
        return real_gather(out, tensor, **kwargs)

    dist.all_reduce, dist.broadcast, module._all_gather_single = all_reduce, broadcast, gather
    found = {}
    for name in names:
        world = Meter(ProcessGroupWorld())
        reducer = SparseReducer(make_sparsifier(name), DENSITY, rank=rank, world_size=world_size)
        handed, reported = 0, 0
        for step in range(12):
            world.run([reducer.reduce(gradients("normal", N, world_size, step)[rank])])
            reported += reducer.end_step().bytes_sent
        found[name] = (handed, world.ledgers[0].total.handed_bytes, reported)
    return found


def test_meter_counts_what_is_handed_over(tmp_path: Path) -> None:
    names = [name for name in SPARSIFIERS if name != "cyclick"]
    for result in run_processes(_count_handed_bytes, 3, tmp_path, names):
        for name, (handed, metered, reported) in result.items():
            assert handed == metered == reported > 0, name


def _disagree(rank: int, world_size: int) -> list[str]:
    """What each worker is told when settings differ."""
    world = ProcessGroupWorld()
    cases = [
        (make_sparsifier("cltk", beta=1.0 if rank < 2 else 0.5), 0.01, N),
        (make_sparsifier("topk" if rank else "exdyna"), 0.01, N),
        (make_sparsifier("exdyna"), 0.01 if rank else 0.02, N),
        (make_sparsifier("exdyna"), 0.01, N + (rank == 1)),
    ]
    words = []
    for sparsifier, density, n in cases:
        reducer = SparseReducer(sparsifier, density, rank=rank, world_size=world_size)
        try:
            world.run([reducer.reduce(torch.randn(n))])
            words.append("nothing")
        except ValueError as error:
            words.append(str(error))
    return words


def test_different_settings_are_named_on_every_rank(tmp_path: Path) -> None:
    for words in run_processes(_disagree, 3, tmp_path):
        assert words == [
            "workers disagree on cltk.beta: rank 0 has 1.0, rank 2 has 0.5",
            "workers disagree on sparsifier: rank 0 has exdyna, rank 1 has topk",
            "workers disagree on density: rank 0 has 0.02, rank 1 has 0.01",
            "workers disagree on n: rank 0 has 4000, rank 1 has 4001",
        ]


def test_process_group_must_exist() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        ProcessGroupWorld()
