"""Virtual workers run in lock-step; where they part ways, they say so instead of hanging."""

from typing import Any

import pytest
import torch

from gradsieve import Meter, VirtualWorld, WorkersDiverged
from gradsieve.comm.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, Program, all_gather
from gradsieve.comm.rounded import rounded_sum


def asks(*calls: Collective) -> Program[list[Any]]:
    replies = []
    for call in calls:
        replies.append((yield call))
    return replies


def test_replies() -> None:
    programs = [
        asks(
            AllReduce("sum", torch.tensor([rank + 1.0])),
            AllGather("rows", torch.full((rank,), rank)),
            Broadcast("root", torch.tensor([rank]), 1),
            AllToAll("each", torch.full((3 * rank,), rank), [0, rank, 2 * rank], rank),
        )
        for rank in range(3)
    ]
    for receiver, (total, rows, root, each) in enumerate(VirtualWorld(3).run(programs)):
        assert total.tolist() == [6]
        assert [row.tolist() for row in rows] == [[], [1], [2, 2]]
        assert root.tolist() == [1]
        assert [part.tolist() for part in each] == [[sender] * sender * receiver for sender in range(3)]


def test_replies_are_not_shared() -> None:
    """A worker that changes what it received must not change what others received."""

    def program(rank: int) -> Program[list[torch.Tensor]]:
        rows = yield AllGather("rows", torch.zeros(2))
        total = yield AllReduce("sum", torch.ones(1))
        mine = torch.zeros(2)
        parts = yield AllToAll("each", mine, [1, 1], rank)
        rows[0] += 1
        total += 1
        parts[rank] += 1
        return [*rows, total, mine]

    for first, second, total, mine in VirtualWorld(2).run([program(0), program(1)]):
        assert first.tolist() == [1, 1]
        assert second.tolist() == [0, 0]
        assert total.tolist() == [3]
        assert mine.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([AllReduce("a", torch.zeros(1))], [AllReduce("b", torch.zeros(1))], r"asked for AllReduce\('b'"),
        ([AllReduce("a", torch.zeros(1))], [AllGather("a", torch.zeros(1))], r"asked for AllGather\('a'"),
        ([AllReduce("a", torch.zeros(1))], [AllReduce("a", torch.zeros(2))], r"float32 \[2\]"),
        ([AllReduce("a", torch.zeros(1))], [AllReduce("a", torch.zeros(1).double())], "float64"),
        ([AllReduce("a", torch.zeros(1))], [], "worker 0 asked for .*, worker 1 finished"),
        ([AllGather("a", torch.zeros(1))], [AllGather("a", torch.zeros(1), [1, 1])], "lengths"),
        ([AllGather("a", torch.zeros(1, 2))], [AllGather("a", torch.zeros(1, 3))], "'any', 3"),
        ([Broadcast("a", torch.zeros(1), 0)], [Broadcast("a", torch.zeros(1), 1)], "root 1"),
        ([AllGather("a", torch.zeros(1), [1, 1])], [AllGather("a", torch.zeros(2), [1, 1])], "announced were 1"),
        (
            [AllToAll("a", torch.zeros(2), [1, 1], 0, [1, 1])],
            [AllToAll("a", torch.zeros(2), [1, 1], 1)],
            r"worker 0 asked for .* lengths known\), worker 1 asked for AllToAll\('a', float32 \['any'\]\)",
        ),
        (
            [AllToAll("a", torch.zeros(1), [0, 1], 0, [0, 1])],
            [AllToAll("a", torch.zeros(1), [0, 1], 1, [1, 1])],
            r"worker 0 was sent \[0, 0\] rows of 'a', it expected \[0, 1\]",
        ),
        (
            [AllToAll("a", torch.zeros(2), [1, 1], 0)],
            [AllToAll("a", torch.zeros(3), [1, 1], 1)],
            r"worker 1 handed 3 rows to 'a' as worker 1, split for 2 workers into \[1, 1\]",
        ),
        ([AllToAll("a", torch.zeros(2), [1, 1], 0)], [AllToAll("a", torch.zeros(2), [1, 1], 0)], "as worker 0"),
        ([AllToAll("a", torch.zeros(2), [2], 0)], [AllToAll("a", torch.zeros(2), [2], 1)], r"into \[2\]"),
    ],
)
def test_divergence(one: list[Collective], other: list[Collective], words: str) -> None:
    with pytest.raises(WorkersDiverged, match=words):
        VirtualWorld(2).run([asks(*one), asks(*other)])


def test_an_error_in_one_worker_ends_all() -> None:
    closed = []

    def fails() -> Program[None]:
        yield AllReduce("a", torch.zeros(1))
        raise KeyError("mine")

    def waits() -> Program[None]:
        try:
            yield AllReduce("a", torch.zeros(1))
            yield AllReduce("a", torch.zeros(1))
        finally:
            closed.append(True)

    with pytest.raises(KeyError, match="mine"):
        VirtualWorld(2).run([waits(), fails()])
    assert closed == [True]


def test_numbers_of_workers() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        VirtualWorld(0)
    with pytest.raises(ValueError, match="one for each of 2 workers, got 1"):
        VirtualWorld(2).run([asks()])


def pair(rank: int) -> list[int]:
    return [5 * (sender == rank ^ 1) for sender in range(4)]


def asks_in_every_way(rank: int) -> Program[None]:
    yield from asks(
        AllReduce("values", torch.zeros(10)),
        AllGather("indices", torch.zeros(rank, dtype=torch.int32)),
        AllGather("known", torch.zeros(rank, dtype=torch.int32), [0, 1, 2, 3]),
        Broadcast("plan", torch.zeros(3), 0),
        AllToAll("each", torch.zeros(4 * rank), [rank] * 4, rank),
        AllToAll("pairs", torch.zeros(5), pair(rank), rank, pair(rank)),
    )
    yield from rounded_sum("rounded", torch.zeros(10), torch.bfloat16, rank, 4)


def test_meter_by_tag() -> None:
    meter = Meter(VirtualWorld(4))
    for _ in range(2):
        meter.run([asks_in_every_way(rank) for rank in range(4)])
    for rank, ledger in enumerate(meter.ledgers):
        tags = ("values", "indices", "known", "plan", "rounded", "each", "pairs")
        values, indices, known, plan, rounded, each, pairs = (ledger.by_tag[tag] for tag in tags)
        assert (values.calls, values.handed_bytes, values.ring_bytes) == (2, 96, 144)  # 10 as 4 rows of 3
        assert (indices.calls, indices.handed_bytes, indices.ring_bytes) == (4, 2 * (8 + 4 * rank), 84)
        assert (known.calls, known.handed_bytes, known.ring_bytes) == (2, 2 * 4 * rank, 36)  # no padding
        # 10 as 4 rows of 3 to all, a sum of 3 back to all: two collectives that send what a ring would.
        assert (rounded.calls, rounded.handed_bytes, rounded.ring_bytes) == (4, 2 * (24 + 6), 72)
        assert (plan.calls, plan.handed_bytes, plan.ring_bytes) == (2, 24, 18)
        # A worker tells lengths to all, as on a process group, and sends rows to others only.
        assert (each.calls, each.handed_bytes, each.ring_bytes) == (4, 2 * (32 + 16 * rank), 2 * (24 + 12 * rank))
        assert (pairs.calls, pairs.handed_bytes, pairs.ring_bytes) == (2, 40, 40)
        assert ledger.total.calls == 20
        assert ledger.total.seconds > 0


def test_workers_may_change_what_they_gathered() -> None:
    """Also what they sent: the others receive it as it was."""

    def program(rank: int) -> Program[list[float]]:
        own = torch.tensor([float(rank)])
        parts = yield from all_gather("parts", own)
        found = torch.cat(parts).tolist()
        own.fill_(-1.0)
        for part in parts:
            part.fill_(-1.0)
        return found

    assert VirtualWorld(3).run([program(rank) for rank in range(3)]) == [[0.0, 1.0, 2.0]] * 3
