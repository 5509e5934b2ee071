"""Several hosts on one machine: network namespaces, joined by a switch in another, over links of a given rate.

No interface or address exists outside the namespaces. They have no names, only open files of the process that made
them: when it ends, for whatever reason, the kernel removes them.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from gradsieve._check import BadInput
from gradsieve_lab.launch import Place, enter_network, new_network
from gradsieve_lab.netlab.rates import Link

INTERFACE = "eth0"
_SWITCH = "switch"
# A link's burst is a millisecond of sending, or four full packets. Its queue holds more than any TCP window here,
# so that no packet is lost: the lab limits rates only.
_BURST_S, _LEAST_BURST, _QUEUE = 0.001, 6200, 16 << 20


@dataclass(frozen=True)
class Network:
    """The hosts of a lab; `address(i)` can be reached from all of them."""

    links: tuple[Link, ...]
    namespaces: tuple[str, ...]  # one file per host, as for `nsenter --net=FILE`; the last is the switch

    def namespace(self, host: int) -> str:
        return self.namespaces[host]

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}"

    def set_link(self, host: int, *, up: bool) -> None:
        """Take a host's link down, or bring it up again."""
        _ip(self.namespaces[-1], f"link set {_port(host)} {'up' if up else 'down'}")

    def set_rate(self, host: int, rate: int) -> None:
        """Change the rate of a host's link, in bits per second, both ways."""
        _limit(self.namespace(host), INTERFACE, rate, "change")
        _limit(self.namespaces[-1], _port(host), rate, "change")

    def places(self, workers: int) -> list[Place]:
        """The place of each worker: equally many on every host, neighbours together."""
        hosts = len(self.links)
        assert workers % hosts == 0
        return [Place(self.namespace(rank * hosts // workers), INTERFACE) for rank in range(workers)]


@contextmanager
def network(links: list[Link]) -> Iterator[Network]:
    """Create a lab with one host per link; it is removed on exit."""
    check_possible()
    files: list[int] = []
    try:
        for _ in range(len(links) + 1):
            files.append(_new_namespace())
        made = Network(tuple(links), tuple(f"/proc/{os.getpid()}/fd/{file}" for file in files))
        _join(made)
        yield made
    finally:
        for file in files:
            os.close(file)


def check_possible() -> None:
    """Raise `BadInput` if anything that the lab needs is missing."""
    if not os.path.isdir("/proc/self/ns"):
        raise BadInput("the lab needs network namespaces, which only Linux has")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise BadInput(f"the lab needs the program {program}, which is not installed (package iproute2)")
    if os.geteuid() != 0:
        raise BadInput("the lab must run as root or in a user namespace (creates network namespaces)")


def _new_namespace() -> int:
    """Make a network namespace; returns an open file of it. Done in a thread, since the maker moves there."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            new_network()
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as problem:
            made.append(problem)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, OSError):
        raise BadInput(f"the lab could not make a network namespace: {result.strerror}") from result
    return result


def _join(network: Network) -> None:
    """Connect every host to the switch."""
    *hosts, switch = network.namespaces
    _ip(switch, f"link add {_SWITCH} type bridge")
    _ip(switch, f"link set {_SWITCH} up")
    for host, (name, link) in enumerate(zip(hosts, network.links, strict=True)):
        port = _port(host)
        _ip(switch, f"link add {port} type veth peer name {INTERFACE} netns {name}")
        _ip(switch, f"link set {port} master {_SWITCH} up")
        _ip(name, f"address add {network.address(host)}/15 dev {INTERFACE}")
        _ip(name, "link set lo up")
        _ip(name, f"link set {INTERFACE} up")
        _limit(name, INTERFACE, link.up)
        _limit(switch, port, link.down)


def _port(host: int) -> str:
    """The switch's port for a host."""
    return f"host{host}"


def _limit(namespace: str, device: str, rate: int, verb: str = "add") -> None:
    burst = max(_LEAST_BURST, round(rate / 8 * _BURST_S))
    _run(namespace, f"tc qdisc {verb} dev {device} root tbf rate {rate}bit burst {burst} limit {_QUEUE}")


def _ip(namespace: str, command: str) -> None:
    _run(namespace, f"ip {command}")


def _run(namespace: str, command: str) -> None:
    # A new session: Ctrl-C is for the lab to handle, not for the programs it calls.
    done = subprocess.run(
        command.split(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(enter_network, namespace),
    )
    if done.returncode:
        raise BadInput(f"the lab could not be built: {command} failed with {done.stderr.strip()!r}")
