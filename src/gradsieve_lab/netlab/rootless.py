"""A lab without root: the command restarts itself in a user namespace, in which it may create networks.

There it is root for the networks it creates and for nothing else; its files still belong to the user.
"""

import os
import shutil
import subprocess
import sys

from gradsieve._check import BadInput
from gradsieve_lab.netlab.network import check_possible

_UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
_TRIAL = "ip link add trial type bridge && tc qdisc add dev trial root tbf rate 1mbit burst 6200 limit 10000"
_command: list[str] = []  # the command to restart this program; empty if that is not allowed


def may_restart() -> None:
    """Allow `enter_lab` to replace this process: called by the console script, never by a library."""
    _command[:] = [sys.executable, *sys.orig_argv[1:]]


def enter_lab() -> None:
    """Prepare this process for a lab, or raise `BadInput` with the reason why it cannot have one.

    An ordinary user's process is replaced by one in a user namespace, with the same command line.
    """
    if os.path.isdir("/proc/self/ns") and os.geteuid() != 0 and _command:
        check_rootless()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(_UNSHARE[0], [*_UNSHARE, *_command])
    check_possible()


def check_rootless() -> None:
    """Raise `BadInput` if an ordinary user cannot create networks here."""
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            raise BadInput(f"the lab needs the program {program}, which is not installed (package {package})")
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", _TRIAL], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if tried.returncode:
        raise BadInput(
            "the lab needs root, or user namespaces, which this system does not allow "
            f"({(tried.stderr.strip().splitlines() or ['no reason given'])[-1]}): use sudo, or ask for the sysctls "
            "kernel.apparmor_restrict_unprivileged_userns=0 and user.max_user_namespaces above 0"
        )
