"""Run scripts on several ranks, one after the other: `forked.py MODULE,... FOLDER RANKS SCRIPT...`.

The modules, of a framework that takes long to import, are imported once; each rank of each script is a fork of this
process. What a rank prints is in FOLDER/SCRIPT-RANK.log. Ends with an error as soon as a script does.
"""

import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

from gradsieve import ops

ALWAYS = ("torch._dynamo", "torch.distributed.optim")  # DDP imports them when it is first used
# Frameworks look for these from the first moment.
ENVIRONMENT = {
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "test",
}


def run(script: Path, folder: Path, ranks: int) -> bool:
    """Whether all ranks of a script ended well; the first one that does not ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    left = {child(script, folder, rank) for rank in range(ranks)}
    good = True
    while left:
        ended, status = os.wait()
        left.discard(ended)
        if status and good:
            good = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return good


def child(script: Path, folder: Path, rank: int) -> int:
    """The process of a rank."""
    if made := os.fork():
        return made
    code = 1
    try:
        log = os.open(folder / f"{script.stem}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.chdir(folder)
        sys.argv = [str(script), str(folder)]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(modules: str, folder: Path, ranks: int, scripts: list[Path]) -> None:
    os.environ |= {**ENVIRONMENT, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    for module in (*ALWAYS, *modules.split(",")):
        importlib.import_module(module)
    ops.warm_up()
    assert threading.active_count() == 1, "a fork has only the thread that made it"
    sys.exit(not all(run(script, folder, ranks) for script in scripts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), [Path(each).resolve() for each in sys.argv[4:]])
