"""Commands that start quickly: forked from a process that has torch loaded, where a shell would load it again.

Processes, sessions, signals, sockets and files are real. Loading torch is most of the cost of a trial.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

import torch

_FORK_SERVER = "multiprocessing.forkserver"
_spawn = util.spawnv_passfds


def start(words: Sequence[str], log: Path, server: Path) -> Any:
    """Start `gradsieve WORDS` in a process and session of its own; its fork server's pid is written to `server`."""
    process = multiprocessing.get_context("fork").Process(target=_command, args=(list(words), log, server))
    process.start()
    return process


def _command(words: list[str], log: Path, server: Path) -> None:
    from gradsieve_lab.cli import main

    os.setsid()
    _output_to(log)
    torch.set_num_threads(os.cpu_count() or 1)
    util.spawnv_passfds = lambda path, args, keep: _spawned(path, args, keep, server)  # type: ignore[assignment]
    sys.argv = ["gradsieve", *words]
    main()


def _spawned(path: bytes, args: Sequence[Any], keep: Sequence[int], server: Path) -> int:
    """As `multiprocessing.util.spawnv_passfds`, but a fork server is forked without exec."""
    if _FORK_SERVER not in str(args[-1]):
        return _spawn(path, args, keep)
    pid = os.fork()
    if not pid:
        _serve(str(args[-1]), keep)
    server.write_text(str(pid))
    return pid


def _serve(program: str, keep: Sequence[int]) -> NoReturn:
    """Run a fork server with the given files open and no others, as after exec."""
    try:
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
            signal.signal(name, signal.SIG_DFL)
        first = 3
        for file in sorted(keep):
            os.closerange(first, file)
            first = file + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        util._finalizer_registry.clear()  # type: ignore[attr-defined]  # its starter's
        util.spawnv_passfds = _spawn
        exec(program, {})  # what python -c would run
    finally:
        os._exit(0)


def _output_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for copy, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(copy, target)
