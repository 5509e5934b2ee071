"""The store of torch.distributed, where one of the workers keeps it."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from gradsieve import PeerLost, WorkersDiverged
from gradsieve.worlds import meeting
from gradsieve.worlds.processes import identity
from gradsieve.worlds.waiting import Waiting, during


def test_who_keeps_the_store_stays_until_all_survivors_know() -> None:
    store = dist.HashStore()
    waiting = Waiting(store, rank=0, size=3, timeout=5.0, owns_group=True)
    waiting._keeps = True
    lost = PeerLost("rank 1 did not take part", [1], "save")
    thread = threading.Thread(target=lambda: waiting._left(lost))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    store.set("knows/2", "")
    thread.join(2)
    assert not thread.is_alive()


def test_a_survivor_that_has_ended_is_not_named() -> None:
    """Rank 1 was in the call, learnt that rank 0 was lost, and ended: rank 2 comes later and names rank 0 alone."""
    store = dist.HashStore()
    waiting = Waiting(store, rank=2, size=3, timeout=5.0, owns_group=True)
    ended = json.dumps({**identity(), "begun": "another"})
    for rank in (0, 1):
        store.set(f"who/{rank}", ended)
    store.set("knows/1", "")
    with pytest.raises(PeerLost, match=r"rank 0 \(its process has ended\) did not take part") as caught:
        waiting.together("save")
    assert caught.value.ranks == [0]
    with pytest.raises(PeerLost) as caught, waiting.collective("round"):
        raise RuntimeError("Connection reset by peer")
    assert caught.value.ranks == [0]


def test_others_do_not_wait_for_each_other() -> None:
    waiting = Waiting(dist.HashStore(), rank=2, size=3, timeout=5.0, owns_group=True)
    thread = threading.Thread(target=lambda: waiting._left(PeerLost("rank 1 did not take part", [1], "save")))
    thread.start()
    thread.join(2)
    assert not thread.is_alive()


def _pair(timeout: float) -> list[Waiting]:
    store = dist.HashStore()
    return [Waiting(store, rank=rank, size=2, timeout=timeout, owns_group=True) for rank in range(2)]


def _both_save(pair: list[Waiting]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda waiting: waiting.together("save"), pair))


def test_a_rank_that_does_not_come_is_named_and_a_later_call_works() -> None:
    """It runs, and is in no exchange of ours: it may be slow, or wait in a collective of someone else."""
    pair = _pair(timeout=0.3)
    with pytest.raises(PeerLost) as caught, during("step 4"):
        pair[0].together("save")
    assert re.fullmatch(
        r"every rank must call save: rank 1 did not within 0\.\d s in step 4, phase save", str(caught.value)
    )
    assert caught.value.ranks == [1]
    _both_save(pair)
    _both_save(pair)


def test_a_rank_that_comes_late_and_was_not_missed_learns_at_once_who_was() -> None:
    store = dist.HashStore()
    first, late = (Waiting(store, rank=rank, size=3, timeout=0.3, owns_group=True) for rank in (0, 2))
    store.set("who/1", json.dumps({**identity(), "begun": "another"}))
    for waiting in (first, late):
        with pytest.raises(PeerLost, match=r"^rank 1 \(its process has ended\) did not take part in phase save$"):
            waiting.together("save")


def test_a_rank_in_a_later_exchange_is_named_at_once_and_a_later_call_works() -> None:
    pair = _pair(timeout=60.0)
    pair[1].count, pair[1].phase = 1, "values"
    pair[1].say()
    with pytest.raises(WorkersDiverged, match="every rank must call save: rank 1 did not, it is in phase values"):
        pair[0].together("save")
    assert pair[1].knows(0)
    with pair[0].collective("values"):  # it goes on: the exchange in which rank 1 waits
        pass
    assert not pair[1].knows(0), "if rank 0 is lost from now on, it must be named"
    assert not pair[1].said(0)["failed"]
    _both_save(pair)


def test_a_call_that_waits_for_long_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pair, kept = _pair(timeout=0.3), meeting._LOG_AFTER_S
    meeting._LOG_AFTER_S = 0.1
    try:
        with pytest.raises(PeerLost):
            pair[0].together("save")
    finally:
        meeting._LOG_AFTER_S = kept
    assert caplog.messages == ["save waits for rank 1: every rank must call save"]
