"""Bytes per element sent: by our own meter, and by the counters of the hosts' interfaces."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from gradsieve_lab.bench.cases import BF16, FP8, OURS, N, make_case
from gradsieve_lab.bench.timing import Row
from gradsieve_lab.launch import Post, run_workers
from gradsieve_lab.netlab.network import network
from gradsieve_lab.netlab.rates import DEFAULT_RATE, parse_links

CASES = ("topk", "cltk", "micro", OURS, BF16, FP8)
HEADERS = 66  # bytes per packet of Ethernet, IP and TCP headers, with Linux's timestamps
_DRAIN_S = 0.2  # seconds after which a link's queue is empty


@dataclass(frozen=True)
class Sent:
    """What one worker sent over some steps."""

    selected: int
    metered: float
    counted: int
    packets: int


def bench_wire(hosts: int, density: float, steps: int, cases: Sequence[str] = CASES) -> list[Row]:
    """Per case: the meter's bytes per element, then what the interfaces counted, without and with headers."""
    with network(parse_links(DEFAULT_RATE, hosts)) as made:
        found = run_workers(_send, hosts, density, steps, tuple(cases), places=made.places(hosts))
    rows = []
    for case in cases:
        parts: list[Sent] = [worker[case] for worker in found]
        selected = parts[0].selected
        metered = sum(part.metered for part in parts) / hosts / selected
        payload = sum(part.counted - HEADERS * part.packets for part in parts) / hosts / selected
        whole = sum(part.counted for part in parts) / hosts / selected
        meter, count, all_ = (
            Row("wire", f"{case}: {what}", N, density, hosts, value, value, value, "bytes", links=DEFAULT_RATE)
            for what, value in (("metered", metered), ("counted", payload), ("with headers", whole))
        )
        unit = Row("wire", "a selected element", N, density, hosts, 1.0, 1.0, 1.0, "bytes")
        rows += [meter.with_ratio(unit), count.with_ratio(meter), all_.with_ratio(meter)]
    return rows


def _send(post: Post, density: float, steps: int, names: tuple[str, ...]) -> dict[str, Sent]:
    found = {}
    for name in names:
        case = make_case(name, post.rank, density)
        assert case.sieve is not None
        case.step()  # compares settings
        _drain_queues()
        bytes_, packets = post.place.sent()
        selected, metered = 0, 0.0
        for _ in range(steps):
            case.step()
            assert case.sieve.report is not None
            selected += case.sieve.report.selected
            metered += case.sieve.report.ring_bytes
        _drain_queues()
        counted = tuple(now - before for now, before in zip(post.place.sent(), (bytes_, packets), strict=True))
        found[name] = Sent(selected, metered, *counted)
    return found


def _drain_queues() -> None:
    dist.barrier()
    time.sleep(_DRAIN_S)
