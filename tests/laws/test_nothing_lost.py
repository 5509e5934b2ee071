"""Every gradient entry is either sent or still in a residual, whatever the size, the workers and the values."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gradsieve.comm.wire import VALUES, rounded
from helpers import KINDS, LIBRARY, PLAIN, Group, check_nothing_lost, gradients

SHORT = {1: (1, 16), 2: (2, 7), 31: (3,), 32: (2, 4), 33: (7,), 1_000: (1, 4)}  # and any in any sequence
LONG = (32_767, 32_769, 1_000_003)


@pytest.mark.parametrize(("n", "worlds"), SHORT.items())
def test_every_kind_of_gradient(sparsifier: str, n: int, worlds: tuple[int, ...]) -> None:
    densities = {max(1, round(density * n)): density for density in (0.0001, 0.01, 0.3)}  # one for each k
    for world_size in worlds:
        for kind in KINDS:
            for density in densities.values():
                group = Group(sparsifier, density, world_size)
                for step in range(3):
                    group.step_lawfully(gradients(kind, n, world_size, step))


@pytest.mark.parametrize("n", LONG)
def test_large_vectors(sparsifier: str, n: int) -> None:
    for world_size in (2, 7, 16) if n < 1_000_000 else (1, 5):
        group = Group(sparsifier, 0.001, world_size, sizes=[n // 2, n - n // 2])
        for step, kind in enumerate(("normal", "heavy tails", "spike")):
            group.step_lawfully(gradients(kind, n, world_size, step))


@given(
    sparsifier=st.sampled_from(sorted(LIBRARY)),
    n=st.integers(1, 400),
    world_size=st.integers(1, 9),
    density=st.floats(1e-4, 1.0),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
def test_any_sequence(
    sparsifier: str, n: int, world_size: int, density: float, kinds: list[str], dtype: torch.dtype
) -> None:
    group = Group(sparsifier, density, world_size)
    for step, kind in enumerate(kinds):
        grads = [grad.to(dtype) for grad in gradients(kind, n, world_size, step)]
        accs = group.accumulators(grads)
        updates = group.step(grads)
        assert all(update.dtype == dtype for update in updates)
        if not group.reports[0].finite:  # float16 ends at 65,504
            assert dtype == torch.float16
            continue
        # An update in 16 bits is rounded, so the law can only be checked where it is not.
        if dtype in (torch.float32, torch.float64):
            check_nothing_lost(accs, [update.float() for update in updates], group.residuals(n))


def test_update_is_zero_where_nothing_was_sent(sparsifier: str) -> None:
    group = Group(sparsifier, 0.01, 4)
    for step in range(5):
        update = group.step_lawfully(gradients("normal", 5_000, 4, step))
        assert int((update != 0).sum()) <= group.reports[0].union


def test_everything_is_sent_in_the_end(sparsifier: str) -> None:
    """After gradients stop, residuals drain: what was held back does arrive."""
    if sparsifier in ("hard_threshold", "sidco"):
        pytest.skip("what stays below a fixed or fitted threshold is never sent, by definition")
    group = Group(sparsifier, 0.05, 3, **PLAIN.get(sparsifier, {}))
    total = torch.zeros(300, dtype=torch.float64)
    for step in range(10):
        grads = gradients("normal", 300, 3, step)
        total += torch.stack(grads).double().mean(0) - group.step_lawfully(grads).double()
    for _ in range(200):
        total -= group.step_lawfully([torch.zeros(300)] * 3).double()
    if sparsifier != "randomk":  # chance may spare an element
        assert max(float(e.norm()) for e in group.residuals(300)) == 0
    assert float((total - torch.stack(group.residuals(300)).double().mean(0)).abs().max()) < 1e-5


@example("oktopk", 95, 9, 0.875, "fp8", ["equal", "equal", "huge", "equal"])  # rounded more than once
@given(
    sparsifier=st.sampled_from(sorted(LIBRARY)),
    n=st.integers(1, 400),
    world_size=st.integers(1, 9),
    density=st.floats(1e-3, 0.9),
    values=st.sampled_from(["bf16", "fp8"]),
    kinds=st.lists(st.sampled_from(sorted(set(KINDS) - {"denormals"})), min_size=1, max_size=6),
)
def test_rounded_values(
    sparsifier: str, n: int, world_size: int, density: float, values: str, kinds: list[str]
) -> None:
    """What rounding leaves out stays in some worker's residual: sums come out as exactly as with fp32."""
    group = Group(sparsifier, density, world_size, values=values)
    for step, kind in enumerate(kinds):
        grads = gradients(kind, n, world_size, step)
        accs = group.accumulators(grads)
        updates = group.step(grads)
        assert group.reports[0].finite
        assert all(torch.equal(update, updates[0]) for update in updates)
        before = torch.stack(accs).double().sum(0)
        after = world_size * updates[0].double() + torch.stack(group.residuals(n)).double().sum(0)
        scale = torch.stack(accs).abs().max(0).values.double()
        assert ((before - after).abs() <= world_size * (scale * 2**-22 + 2**-148)).all()


@pytest.mark.parametrize("values", ["bf16", "fp8"])
def test_rounded_values_are_rounded(values: str) -> None:
    group = Group("topk", 0.1, 1, values=values)
    update = group.step(gradients("normal", 1_000, 1, 0))[0]
    assert torch.equal(update, rounded(update, VALUES[values]))
    assert (group.reducers[0].residual[update != 0] != 0).any()
