"""Start scripts in 2 real processes, as torchrun would, and read what each of them found."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS = 400  # importing a framework takes long on a busy machine
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "ACCELERATE_USE_CPU": "true",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{HERE}",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # its bfloat16 kernels end with SIGILL on machines that hide AMX
}


def launch(modules: str, script: str, folder: Path, *examples: str, world_size: int = 2) -> list[dict[str, Any]]:
    """Run tests/integrations/`script`, and then examples, on every rank in `folder`; returns what each rank wrote
    with `finish`. All processes are forks of one that imports the framework's modules."""
    scripts = [HERE / script, *(ROOT / "examples" / f"{example}.py" for example in examples)]
    command = [sys.executable, HERE / "forked.py", modules, folder, str(world_size), *scripts]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    logs = "\n".join(log.read_text()[-4000:] for log in sorted(folder.glob("*.log")))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    for example in examples:
        printed = "".join((folder / f"{example}-{rank}.log").read_text() for rank in range(world_size))
        losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", printed)]
        assert losses == sorted(losses, reverse=True), "the first thing a user sees must fall"
        assert re.search(r"step \d+: ", printed), printed
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
