"""The store of torch.distributed, where one of the workers keeps it."""

import json
import threading

import pytest
import torch.distributed as dist

from gradsieve import PeerLost
from gradsieve.worlds.processes import identity
from gradsieve.worlds.waiting import Waiting


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
