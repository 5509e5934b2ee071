"""Replicas that share weights under torchft's manager, which reports who is alive: one dies, the others regroup.

Run it:  python -m studies.faults.with_torchft        (pip install torchft)
"""

import importlib
import json
import logging
import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsieve

REPLICAS, VICTIM, DIES_S, SECONDS = 3, 1, 12.0, 38.0


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    result: Tensor = (model(torch.randn(16, 8, generator=generator)) - 1).square().mean()
    return result


def replica(rank: int, lighthouse: str, folder: str) -> None:
    """Process body of one replica; every membership that the manager reports gets its own process group."""
    logging.disable(logging.INFO)
    torchft = importlib.import_module("torchft")
    groups = importlib.import_module("torchft.process_group")
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = torchft.Manager(
        pg=groups.ProcessGroupDummy(0, 1),
        load_state_dict=lambda state: None,  # regroup brings a newcomer's weights
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        replica_id=f"replica{rank}_",
        init_sync=False,
    )
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begun, sieve, before, step, events = Path(folder) / "begun", None, None, 0, []
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        manager.start_quorum()
        if rank == VICTIM and time.monotonic() - started > DIES_S:
            os._exit(9)
        members = (manager._quorum_id, manager._participating_replica_rank, manager.num_participants())
        try:
            if members != before:
                found = _regroup(members, folder, sieve)
                if sieve is None:
                    sieve = gradsieve.share(model, optimizer, density=0.2, timeout=5, join=begun.exists())
                events.append({"at": round(time.monotonic() - started, 1), "replicas": members[2], **found})
                before = members
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            step += 1
            begun.touch()
        except gradsieve.PeerLost as lost:
            events.append({"at": round(time.monotonic() - started, 1), "lost": lost.ranks})
            before = None
        manager.should_commit()
        time.sleep(0.1)
    loss = float(loss_of(model, 1_000_000, 99).detach())
    print(json.dumps({"rank": rank, "steps": step, "loss": loss, "events": events}), flush=True)  # noqa: T201
    os._exit(0)


def _regroup(members: tuple[int, int, int], folder: str, sieve: Any) -> dict[str, Any]:
    if dist.is_initialized():
        dist.destroy_process_group()
    quorum, rank, size = members
    where, limit = f"file://{folder}/quorum-{quorum}", timedelta(seconds=10)
    dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=limit)
    return {} if sieve is None else {"lost norm": sieve.regroup().lost_norm}


def main() -> None:
    server = importlib.import_module("torchft._torchft").LighthouseServer
    lighthouse = server(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (lighthouse.address(), folder)
        processes = [context.Process(target=replica, args=(rank, *arguments)) for rank in range(REPLICAS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(3 * SECONDS)
            process.kill()


if __name__ == "__main__":
    main()
