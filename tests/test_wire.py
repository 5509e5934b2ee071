"""Values on the wire: how exactly they arrive, at what length, and what does not fit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve import VirtualWorld
from gradsieve.comm.rounded import rounded_sum
from gradsieve.comm.wire import FP8, VALUES, decode, encode, message_bytes, message_length, rounded

RELATIVE = {"fp32": 0.0, "bf16": 2**-8, "fp8": 2**-4}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = st.lists(FLOATS.filter(lambda value: abs(value) < 3e38), max_size=40)
WIRES = st.sampled_from(sorted(VALUES))


@given(row=ROWS, values=WIRES)
def test_values_arrive_nearly_as_they_were(row: list[float], values: str) -> None:
    sent, wire = torch.tensor(row), VALUES[values]
    found = rounded(sent, wire)
    largest = float(sent.abs().max()) if row else 0.0
    # In eight bits a message has 16 powers of two below its largest value; the rest is rounded to multiples.
    least = {"fp32": 0.0, "bf16": 2**-133, "fp8": max(largest * 2**-17, 2**-136)}[values]
    assert found.dtype == sent.dtype
    assert ((found - sent).abs() <= (sent.abs() * RELATIVE[values]).clamp(min=least)).all()
    assert torch.equal(found.double() + (sent - found).double(), sent.double())  # what is left out is known exactly


@given(row=ROWS, values=WIRES, data=st.data())
def test_a_part_of_what_was_rounded_is_not_rounded_again(
    row: list[float], values: str, data: st.DataObject
) -> None:
    wire = VALUES[values]
    found = rounded(torch.tensor(row), wire)
    part = found[torch.tensor([data.draw(st.booleans()) for _ in row], dtype=torch.bool)]
    assert torch.equal(rounded(part, wire), part)


def test_what_is_rounded_up_to_a_power_of_two_is_not_rounded_again() -> None:
    """A second rounding would see a larger number, and would leave less room for small ones."""
    once = rounded(torch.tensor([255.0, 3 * 2.0**-9]), FP8)
    assert torch.equal(rounded(once, FP8), once)
    for largest in torch.linspace(1, 2, 513):
        once = rounded(torch.cat([largest[None], 2.0 ** -torch.arange(20.0)]), FP8)
        assert torch.equal(rounded(once, FP8), once), f"largest {largest}"


@pytest.mark.parametrize("values", sorted(VALUES))
@pytest.mark.parametrize("count", [0, 1, 7])
def test_lengths_are_known_beforehand(values: str, count: int) -> None:
    wire = VALUES[values]
    message = encode(torch.randn(count), wire)
    assert message.shape == (message_length(count, wire),)
    assert message.nbytes == message_bytes(count, wire)
    assert torch.equal(decode(message.view(torch.uint8), wire), decode(message, wire))


def test_rows_do_not_share_a_scale() -> None:
    rows = torch.tensor([[1e30, 1.0], [1e-30, 3e-32], [0.0, 0.0]])
    found = decode(encode(rows, FP8), FP8)
    assert found.shape == rows.shape
    assert found[0, 1] == 0
    assert torch.allclose(found[1], rows[1], rtol=2**-4)
    assert torch.equal(found[2], rows[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_harms_no_other(bad: float) -> None:
    found = rounded(torch.tensor([0.5, bad, -2.0]), FP8)
    assert not found[1].isfinite()
    assert found[[0, 2]].tolist() == [0.5, -2.0]


@given(
    rows=st.integers(1, 12).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-1000, 1000).map(float), min_size=n, max_size=n), min_size=1, max_size=5
        )
    ),
    values=WIRES,
)
def test_what_a_rounded_sum_leaves_out_is_known_to_the_workers(rows: list[list[float]], values: str) -> None:
    """All hold the same total, which travelled as said; with everybody's errors it is what went in, exactly."""
    wire, size = VALUES[values], len(rows)
    programs = [rounded_sum("values", torch.tensor(row), wire, rank, size) for rank, row in enumerate(rows)]
    found = VirtualWorld(size).run(programs)
    for total, error in found:
        assert torch.equal(total, found[0][0])
        assert error.shape == total.shape
        assert values != "fp32" or not error.any()
    errors = torch.stack([error for _, error in found]).double().sum(0)
    assert torch.equal(found[0][0].double() + errors, torch.tensor(rows).double().sum(0))
    length = -(-len(rows[0]) // size)
    for part in found[0][0].split(length):
        assert torch.equal(rounded(part, wire), part)
