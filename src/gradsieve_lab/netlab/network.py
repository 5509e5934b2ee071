"""Several hosts on one machine: network namespaces, joined by a switch in another, over links of a given rate.

No interface and no address ever exists outside the namespaces. Each namespace has its maker's tag in its name, so
that whatever a killed process left is known as such: the next lab removes it, and nothing else.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from gradsieve._check import BadInput
from gradsieve_lab import _owner
from gradsieve_lab.launch import Place
from gradsieve_lab.netlab.rates import Link

INTERFACE = "eth0"
_PREFIX = "gradsieve-lab"
_SWITCH = "switch"
_NAME = re.compile(rf"{_PREFIX}-(\d+-\d+)-(?:{_SWITCH}|\d+)")
# A link may save up a millisecond of sending, or four full packets. Its queue holds more than any TCP window here,
# so that no packet is lost: losses are another matter than rates.
_BURST_S, _LEAST_BURST, _QUEUE = 0.001, 6200, 16 << 20


@dataclass(frozen=True)
class Network:
    """Hosts that exist now; `address(i)` can be reached from all of them."""

    tag: str
    links: tuple[Link, ...]

    def namespace(self, host: int | str) -> str:
        return f"{_PREFIX}-{self.tag}-{host}"

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}"

    def places(self, workers: int) -> list[Place]:
        """Where each worker lives: as many on every host, neighbours together."""
        hosts = len(self.links)
        assert workers % hosts == 0
        return [Place(self.namespace(rank * hosts // workers), INTERFACE) for rank in range(workers)]


@contextmanager
def network(links: list[Link]) -> Iterator[Network]:
    """A lab with one host a link, there while inside; what killed labs left is removed first."""
    check_possible()
    remove_leftovers()
    made = Network(_owner.tag(), tuple(links))
    try:
        with _ending_gracefully():
            _make(made)
            yield made
    finally:
        with _undisturbed():
            for name in _names():
                if f"-{made.tag}-" in name:
                    _remove(name)


def check_possible() -> None:
    """Say in a sentence what is missing, if anything is."""
    if not os.path.isdir("/proc/self/ns"):
        raise BadInput("the lab needs Linux with network namespaces, got a system without them")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise BadInput(f"the lab needs the program {program}, which is not installed (package iproute2)")
    if os.geteuid() != 0:
        raise BadInput("the lab needs root, to make network namespaces, got an ordinary user")


def remove_leftovers() -> list[str]:
    """Remove the namespaces of labs whose makers are gone; returns their names."""
    left = []
    for name in _names():
        found = _NAME.fullmatch(name)
        if found is not None and not _owner.lives(found[1]):
            _remove(name)
            left.append(name)
    return left


def _make(network: Network) -> None:
    switch = network.namespace(_SWITCH)
    _ip(f"netns add {switch}")
    _ip(f"-n {switch} link add {_SWITCH} type bridge")
    _ip(f"-n {switch} link set {_SWITCH} up")
    for host, link in enumerate(network.links):
        name, port = network.namespace(host), f"host{host}"
        _ip(f"netns add {name}")
        _ip(f"-n {switch} link add {port} type veth peer name {INTERFACE} netns {name}")
        _ip(f"-n {switch} link set {port} master {_SWITCH} up")
        _ip(f"-n {name} address add {network.address(host)}/15 dev {INTERFACE}")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set {INTERFACE} up")
        _limit(name, INTERFACE, link.up)
        _limit(switch, port, link.down)


def _limit(namespace: str, device: str, rate: int) -> None:
    burst = max(_LEAST_BURST, round(rate / 8 * _BURST_S))
    _run("tc", "-n", namespace, *f"qdisc add dev {device} root tbf".split(), *_tbf(rate, burst))


def _tbf(rate: int, burst: int) -> list[str]:
    return f"rate {rate}bit burst {burst} limit {_QUEUE}".split()


def _names() -> list[str]:
    return [line.split()[0] for line in _ip("netns list").splitlines() if line.strip()]


def _remove(name: str) -> None:
    """Also what still runs in it: only the lab's own workers ever do."""
    with suppress(BadInput):
        for number in _ip(f"netns pids {name}").split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
    with suppress(BadInput):  # another lab's start may have been faster
        _ip(f"netns delete {name}")


@contextmanager
def _ending_gracefully() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C would, not on the spot, unless somebody else sees to it."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait until the end: an impatient Ctrl-C shall leave nothing behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ip(command: str) -> str:
    return _run("ip", *command.split())


def _run(*command: str) -> str:
    # A session of its own: Ctrl-C is the lab's business, not that of the programs it calls.
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
    if done.returncode:
        raise BadInput(f"the lab could not be built: {' '.join(command)} said {done.stderr.strip()!r}")
    return done.stdout
