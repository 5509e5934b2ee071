"""How fast links are, as the user says it: `1gbit`, `100mbit/20mbit` (up/down), or several, one a host."""

import re
from dataclasses import dataclass

from gradsieve._check import BadInput

DEFAULT_RATE = "1gbit"
MOST_HOSTS = 64
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SLOWEST, _FASTEST = 10**5, 10**11


@dataclass(frozen=True)
class Link:
    """What a host may send and receive, in bits a second."""

    up: int
    down: int

    def __str__(self) -> str:
        return show(self.up) if self.up == self.down else f"{show(self.up)}/{show(self.down)}"


def parse_rate(text: str) -> int:
    """
    >>> parse_rate("2.5gbit")
    2500000000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
    if found is None:
        raise BadInput(f"rate must be a number with kbit, mbit or gbit, such as 100mbit, got {text!r}")
    rate = round(float(found[1]) * _UNITS[found[2]])
    if not _SLOWEST <= rate <= _FASTEST:
        raise BadInput(f"rate must be between {show(_SLOWEST)} and {show(_FASTEST)}, got {text!r}")
    return rate


def parse_links(text: str, hosts: int) -> list[Link]:
    """The link of every host.

    >>> [str(link) for link in parse_links("1gbit,100mbit/20mbit", 2)]
    ['1gbit', '100mbit/20mbit']
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise BadInput(f"hosts must be between 1 and {MOST_HOSTS}, got {hosts}")
    links = []
    for part in text.split(","):
        up, slash, down = part.partition("/")
        links.append(Link(parse_rate(up), parse_rate(down if slash else up)))
    if len(links) == 1:
        links *= hosts
    if len(links) != hosts:
        raise BadInput(f"rate must be one, or one for each of {hosts} hosts, got {len(links)}")
    return links


def show(rate: int) -> str:
    """
    >>> show(100_000_000), show(1_500_000_000)
    ('100mbit', '1500mbit')
    """
    unit = next(unit for unit in ("gbit", "mbit", "kbit", "bit") if rate % _UNITS[unit] == 0)
    return f"{rate // _UNITS[unit]}{unit}"
