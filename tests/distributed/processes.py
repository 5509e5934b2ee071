"""Real workers: gloo processes on loopback, which save what they found to a folder."""

import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(work: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    """`work(rank, world_size, *args)` in each of `world_size` processes; returns their results in rank order."""
    processes = _started(work, world_size, folder, args)
    hung = _ended(processes)
    assert not hung, f"{len(hung)} of {world_size} processes did not end"
    results = [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]
    failures = [result for result in results if isinstance(result, _Failure)]
    assert not failures, failures[0].text
    return results


def _started(work: Callable[..., Any], world_size: int, folder: Path, args: tuple[Any, ...]) -> list[Any]:
    context = mp.get_context("forkserver")
    # Imported only once; torch._dynamo because the first optimizer of a process imports it, which takes seconds.
    context.set_forkserver_preload(["gradsieve", "torch.distributed", "torch._dynamo", "pytest", "hypothesis"])
    processes = [
        context.Process(target=_enter, args=(work, rank, world_size, folder, args)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def _ended(processes: list[Any]) -> list[Any]:
    """Wait for all; returns those that had to be killed."""
    for process in processes:
        process.join(240)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
        process.join()
    return hung


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _enter(work: Callable[..., Any], rank: int, world_size: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        result = work(rank, world_size, *args)
    except BaseException:
        result = _Failure(traceback.format_exc())
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_survivors(work: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> dict[int, Any]:
    """As `run_processes`, where some of the processes are killed: the results of the others, by rank."""
    processes = _started(work, world_size, folder, args)
    hung = _ended(processes)
    assert not hung, f"{len(hung)} of {world_size} processes did not end"
    found = {rank: folder / f"{rank}.pkl" for rank in range(world_size)}
    results = {rank: pickle.loads(path.read_bytes()) for rank, path in found.items() if path.exists()}
    failures = [result for result in results.values() if isinstance(result, _Failure)]
    assert not failures, failures[0].text
    return results
