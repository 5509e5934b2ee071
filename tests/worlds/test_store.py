"""The store of torch.distributed, where one of the workers keeps it."""

import threading

import torch.distributed as dist

from gradsieve import PeerLost
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


def test_others_do_not_wait_for_each_other() -> None:
    waiting = Waiting(dist.HashStore(), rank=2, size=3, timeout=5.0, owns_group=True)
    thread = threading.Thread(target=lambda: waiting._left(PeerLost("rank 1 did not take part", [1], "save")))
    thread.start()
    thread.join(2)
    assert not thread.is_alive()
