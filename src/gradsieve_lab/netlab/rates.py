"""Link rates as users write them: `1gbit`, `100mbit/20mbit` (up/down), or several, one per host."""

from dataclasses import dataclass

from gradsieve._check import BadInput
from gradsieve.plan.links import parse_rate as parse_within
from gradsieve.plan.links import show_rate as show

DEFAULT_RATE = "1gbit"
MOST_HOSTS = 64
_SLOWEST, _FASTEST = 10**5, 10**11


@dataclass(frozen=True)
class Link:
    """The rates at which a host may send and receive, in bits per second."""

    up: int
    down: int

    def __str__(self) -> str:
        return show(self.up) if self.up == self.down else f"{show(self.up)}/{show(self.down)}"


def parse_rate(text: str) -> int:
    """
    >>> parse_rate("2.5gbit")
    2500000000
    """
    return parse_within(text, _SLOWEST, _FASTEST)


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
