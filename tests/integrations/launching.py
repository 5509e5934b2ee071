"""Start a script in 2 real processes, as torchrun would, and read what each of them found."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS = 400  # importing a framework takes long on a busy machine


def launch(script: str, folder: Path, *arguments: str, world_size: int = 2) -> list[dict[str, Any]]:
    """Run tests/integrations/`script` on every rank in `folder`; returns what each wrote with `finish`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # its bfloat16 kernels end with SIGILL on machines that hide AMX
    }
    command = [sys.executable, str(HERE / script), str(folder), *arguments]
    logs = [folder / f"{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(command, env={**common, **place}, stdout=file, stderr=file, cwd=folder)
            )
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, "\n".join(log.read_text()[-4000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def finish(folder: Path, found: dict[str, Any]) -> None:
    """Hand a rank's findings to `launch`; nothing after it can turn them into a failure."""
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def words_of(function: Callable[[], object]) -> str:
    """The sentence that a call is refused with."""
    try:
        function()
    except (ValueError, TypeError) as problem:
        return str(problem)
    return "nothing was raised"
