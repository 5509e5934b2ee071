"""Run any program on the hosts of a lab, one process per host, with the environment of torchrun."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

from gradsieve._check import BadInput
from gradsieve_lab.launch import enter_network
from gradsieve_lab.netlab.network import INTERFACE, Network

_PORT = 29500
_GRACE_S = 5.0  # seconds that programs get to end after SIGTERM
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def run_everywhere(network: Network, command: Sequence[str], stop_requested: Callable[[], bool]) -> int:
    """Start `command` on every host and wait; the first failure, or a stop request, ends all.

    Returns the exit code of the first process that failed, or 0.
    """
    hosts = len(network.links)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(hosts):
            processes.append(_start(network, host, command))
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed or None not in codes or stop_requested():
                return failed[0] if failed else 0
            time.sleep(0.05)
    finally:
        _end(processes)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Terminate processes that still run, and kill them after a grace period."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(network: Network, host: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        "RANK": str(host),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(network.links)),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    try:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            preexec_fn=partial(_enter_host, network.namespace(host)),
        )
    except OSError as problem:
        raise BadInput(f"{command[0]} could not be started: {problem.strerror}") from problem


def _enter_host(namespace: str) -> None:
    """Move a new process to its host before the program starts, and make it end with the lab."""
    enter_network(namespace)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
