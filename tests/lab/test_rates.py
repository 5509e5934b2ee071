"""Rates as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsieve_lab.netlab.rates import Link, parse_links, parse_rate, show


@given(rate=st.integers(10**5, 10**11))
def test_what_is_shown_can_be_read(rate: int) -> None:
    assert parse_rate(show(rate)) == rate
    assert parse_links(str(Link(rate, 2 * 10**6)), 1) == [Link(rate, 2 * 10**6)]


def test_links() -> None:
    assert parse_links("100Mbit", 3) == [Link(10**8, 10**8)] * 3
    assert parse_links("1gbit,20mbit/1.5mbit", 2) == [Link(10**9, 10**9), Link(20 * 10**6, 1_500_000)]


@pytest.mark.parametrize(
    ("text", "hosts", "words"),
    [
        ("fast", 2, "rate must be a number with kbit, mbit or gbit, such as 100mbit, got 'fast'"),
        ("100", 2, "rate must be a number with"),
        ("", 2, "rate must be a number with"),
        ("-1mbit", 2, "rate must be a number with"),
        ("1mbit/", 2, "rate must be a number with"),
        ("1kbit", 2, "rate must be between 100kbit and 100gbit, got '1kbit'"),
        ("1gbit,2gbit,3gbit", 2, "rate must be one, or one for each of 2 hosts, got 3"),
        ("1gbit", 0, "hosts must be between 1 and 64, got 0"),
        ("1gbit", 65, "hosts must be between 1 and 64, got 65"),
    ],
)
def test_bad_rates(text: str, hosts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_links(text, hosts)
