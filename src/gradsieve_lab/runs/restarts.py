"""Restarts by torchrun: whether this launch of it began the run in a folder.

torchrun starts all workers again after a failure, and whenever nodes join or leave, which its count of restarts
does not show. A launch has no id of its own either: that is "none" unless given. What identifies it are its agents,
one per node: each serves one launch and outlives restarts. A record's header names the agents of all workers under
"launch". It is a run of this launch if one of them is an agent of ours: after a change of nodes, one node that took
part before is enough. If none did, the folder counts as another launch's.
"""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from gradsieve_lab import _owner
from gradsieve_lab.runs.records import RecordError, Run, read_run

_ERROR_FILE = re.compile(r".*/([^/]+)/attempt_\d+/\d+/error\.json")


def agent() -> str:
    """The torchrun agent that started this process.

    An agent makes one folder for its logs, with a random name, and passes it to workers, through scripts as well.
    Without that folder the agent is taken to be this process's parent.
    """
    found = _ERROR_FILE.fullmatch(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return found[1] if found else f"{socket.gethostname()}-{_owner.tag(os.getppid())}"


def own_run(folder: Path, launch: Sequence[str], command: str) -> Run | None:
    """The run in a folder, if this launch began it with this command."""
    try:
        run = read_run(folder)
    except RecordError:
        return None
    ours = run.header["command"] == command and not set(launch).isdisjoint(run.header.get("launch", []))
    return run if ours else None
