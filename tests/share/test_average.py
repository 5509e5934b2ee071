"""Whole tensors averaged over workers."""

import pytest
import torch
from torch import Tensor

from gradsieve.share import average
from gradsieve.share.average import average_
from gradsieve.share.broadcast import broadcast_
from gradsieve.worlds import Meter, VirtualWorld


def tensors(rank: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(rank)
    return [
        torch.randn(63, generator=chance),
        torch.randn(7, 5, generator=chance).t(),  # not contiguous
        torch.randn(3, 3, generator=chance).bfloat16(),
        torch.randn((), generator=chance),
        torch.empty(0),
        torch.tensor([rank]),
    ]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 10, 63, 1000])
def test_floats_become_their_mean_and_integers_stay(
    workers: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(average, "CHUNK", chunk)
    each = [tensors(rank) for rank in range(workers)]
    before = [[tensor.clone() for tensor in own] for own in each]
    meter = Meter(VirtualWorld(workers))
    meter.run([average_(own, workers) for own in each])
    n = 63 + 35 + 9 + 1
    assert meter.ledgers[0].total.calls == -(-n // chunk)
    assert meter.ledgers[0].total.handed_bytes >= 4 * n  # some are padded
    for rank, own in enumerate(each):
        for place, tensor in enumerate(own[:-1]):
            mean = torch.stack([them[place].float() for them in before]).mean(0).to(tensor.dtype)
            torch.testing.assert_close(tensor, mean)
            assert torch.equal(tensor, each[0][place])
            assert tensor.stride() == before[rank][place].stride()
        assert own[-1].item() == rank


def test_one_worker_changes_nothing() -> None:
    own = tensors(0)
    VirtualWorld(1).run([average_(own, 1)])
    assert all(torch.equal(*pair) for pair in zip(own, tensors(0), strict=True))


def test_nothing_to_average_sends_nothing() -> None:
    meter = Meter(VirtualWorld(2))
    meter.run([average_([torch.tensor([1])], 2) for _ in range(2)])
    assert meter.ledgers[0].total.calls == 0


def test_broadcast_gives_all_the_first_workers() -> None:
    each = [tensors(rank) for rank in range(3)]
    VirtualWorld(3).run([broadcast_(own) for own in each])
    for own in each:
        assert all(torch.equal(*pair) for pair in zip(own, tensors(0), strict=True))


def test_float64_keeps_its_digits() -> None:
    workers = [[torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)], [torch.tensor([1.0], dtype=torch.float64)]]
    VirtualWorld(2).run([average_(tensors, 2) for tensors in workers])
    assert workers[0][0].item() == workers[1][0].item() == 1.0 + 2.0**-41
