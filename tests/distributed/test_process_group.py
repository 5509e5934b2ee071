"""Virtual workers and gloo processes do the same, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

from gradsieve import Meter, ProcessGroupWorld, SparseReducer, make_sparsifier
from gradsieve.comm.collectives import AllGather, AllReduce, AllToAll, Broadcast
from helpers import LIBRARY, Group, assert_same, gradients

N, STEPS, DENSITY = 4_000, 25, 0.02


def _train(rank: int, world_size: int, names: list[str], values: str) -> dict[str, Any]:
    world, found = Meter(ProcessGroupWorld()), {}
    for name in names:
        reducer = SparseReducer(make_sparsifier(name), DENSITY, rank=rank, world_size=world_size, values=values)
        updates, reports = [], []
        for step in range(STEPS):
            grads = gradients("normal", N, world_size, step)
            updates.append(world.run([reducer.reduce(grads[rank])])[0])
            reports.append(reducer.report)
        found[name] = (updates, reports, reducer.state_dict())
    return found


@pytest.mark.parametrize(
    ("world_size", "values"),
    [
        (4, "fp32"),
        (3, "fp8"),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
        pytest.param(3, "bf16", marks=pytest.mark.slow),
    ],
)
def test_virtual_equals_gloo(world_size: int, values: str, tmp_path: Path) -> None:
    results = run_processes(_train, world_size, tmp_path, LIBRARY, values)
    for name in LIBRARY:
        group = Group(name, DENSITY, world_size, values=values)
        for step in range(STEPS):
            updates = group.step(gradients("normal", N, world_size, step))
            for rank in range(world_size):
                found, report = results[rank][name][0][step], results[rank][name][1][step]
                same = group.reports[rank]
                assert torch.equal(found, updates[rank]), f"{name}, step {step}, rank {rank}"
                assert report.counts == same.counts
                assert (report.bytes_sent, report.ring_bytes, report.collectives) == (
                    same.bytes_sent,
                    same.ring_bytes,
                    same.collectives,
                )
        for rank, reducer in enumerate(group.reducers):
            assert_same(results[rank][name][2], reducer.state_dict(), f"{name}, rank {rank}")


def _collectives(rank: int, world_size: int) -> list[Any]:
    def program():  # type: ignore[no-untyped-def]
        total = yield AllReduce("sum", torch.tensor([rank, 1]))
        ragged = yield AllGather("ragged", torch.arange(rank * 2, dtype=torch.int32))
        known = yield AllGather("known", torch.full((rank + 1, 2), rank), [1, 2, 3])
        nothing = yield AllGather("nothing", torch.empty(0))
        sent = yield Broadcast("sent", torch.tensor([rank * 10]), 2)
        large = yield AllReduce("large", torch.full((2_000_000,), float(rank)))
        each = yield AllToAll("each", torch.full((3 * rank, 2), rank).bfloat16(), [0, rank, 2 * rank], rank)
        left, right = (rank - 1) % 3, (rank + 1) % 3
        splits, lengths = ([5 * (i == neighbour) for i in range(3)] for neighbour in (right, left))
        passed = yield AllToAll("passed", torch.full((5,), rank), splits, rank, lengths)
        none = yield AllToAll("none", torch.empty(0), [0, 0, 0], rank)
        return [total, ragged, known, nothing, sent, large, each, passed, none]

    return ProcessGroupWorld().run([program()])[0]


def test_collectives(tmp_path: Path) -> None:
    results = run_processes(_collectives, 3, tmp_path)
    for rank, (total, ragged, known, nothing, sent, large, each, passed, none) in enumerate(results):
        assert total.tolist() == [3, 3]
        assert [part.tolist() for part in ragged] == [[], [0, 1], [0, 1, 2, 3]]
        assert [part.tolist() for part in known] == [[[0, 0]], [[1, 1]] * 2, [[2, 2]] * 3]
        assert [part.tolist() for part in nothing] == [[], [], []]
        assert sent.tolist() == [20]
        assert (large == 3).all()
        assert [part.tolist() for part in each] == [[[sender, sender]] * sender * rank for sender in range(3)]
        left = (rank - 1) % 3
        assert [part.tolist() for part in passed] == [[left] * 5 if sender == left else [] for sender in range(3)]
        assert [part.tolist() for part in none] == [[], [], []]


def _count_sent_bytes(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[float, float, float]]:
    """Bytes that torch.distributed was really given for others, beside what the meter and the report say."""
    sent, others = 0.0, (world_size - 1) / world_size

    def counted(real: Any, bytes_of: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += bytes_of(*args)
            return real(*args, **kwargs)

        return call

    def all_to_all_bytes(_: Any, rows: Any, received: Any = None, splits: Any = None) -> float:
        return float(rows.nbytes - splits[rank]) if splits else others * rows.nbytes  # rows are bytes

    dist.all_reduce = counted(dist.all_reduce, lambda tensor: 2 * others * tensor.nbytes)
    dist.broadcast = counted(dist.broadcast, lambda tensor: others * tensor.nbytes)
    dist.all_to_all_single = counted(dist.all_to_all_single, all_to_all_bytes)
    found = {}
    for name in names:
        world = Meter(ProcessGroupWorld())
        reducer = SparseReducer(make_sparsifier(name), DENSITY, rank=rank, world_size=world_size)
        sent, reported = 0.0, 0.0
        for step in range(12):
            world.run([reducer.reduce(gradients("normal", N, world_size, step)[rank])])
            reported += reducer.report.ring_bytes + reducer.report.handshake_bytes
        found[name] = (sent, world.ledgers[0].total.ring_bytes, reported)
    return found


def test_meter_counts_what_is_sent(tmp_path: Path) -> None:
    results = run_processes(_count_sent_bytes, 3, tmp_path, LIBRARY)
    for name in LIBRARY:
        sent, metered, reported = (sum(result[name][i] for result in results) for i in range(3))
        assert sent == pytest.approx(metered) == pytest.approx(reported), name
        assert sent > 0


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
