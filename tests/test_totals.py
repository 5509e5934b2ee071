"""What `sieve.summary()` adds up, and how a sieve shows itself."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.totals import Totals
from helpers import Group, gradients


def test_totals_are_sums_of_reports() -> None:
    group, totals = Group("exdyna", 0.01, 4), Totals(10_000, 4)
    sent = 0.0
    for step in range(5):
        group.step(gradients("normal", 10_000, 4, step))
        totals = totals.with_step(group.reports[0])
        sent += group.reports[0].ring_bytes
    assert totals.steps == 5
    assert totals.bytes_sent == sent
    assert totals.density == pytest.approx(0.01, rel=0.05)
    assert totals.fewer == pytest.approx(5 * 60_000 / sent)  # 2 * 3/4 * 40,000 bytes per dense step
    assert "times fewer bytes than plain DDP" in str(totals)


def test_a_skipped_step_is_counted_apart() -> None:
    group = Group("exdyna", 0.01, 2)
    grads = gradients("normal", 1_000, 2, 0)
    grads[1][7] = float("nan")
    group.step(grads)
    totals = Totals(1_000, 2).with_step(group.reports[0])
    assert (totals.steps, totals.skipped, totals.density) == (0, 1, 0.0)
    assert "(1 skipped)" in str(totals)


def test_everything_sent_once_costs_a_dense_step() -> None:
    totals = Totals(1_000, 4).with_silent_step().with_full_exchange()
    assert totals.bytes_sent == totals.dense_step_bytes == 6_000
    assert totals.fewer == 1.0
    assert str(totals).startswith("1 step, ")
    assert Totals(1_000, 4).fewer is None


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 10)).square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.usefixtures("one_process")
def test_sieves_show_themselves() -> None:
    model = DistributedDataParallel(nn.Linear(10, 10))
    sieve = gradsieve.sparsify(model, "exdyna", density=0.1)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(sieve) == "Sieve('exdyna', density=0.1, values='fp32', 110 elements, 1 workers, step 1)"
    assert sieve.summary().steps == 1
    plain = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(plain.parameters())
    shared = gradsieve.share(plain, optimizer, density=0.1, dense_steps=1, every=2)
    for _ in range(5):
        step(plain, optimizer)
    assert "ShareSieve('exdyna', every=2, delay=0" in repr(shared)
    assert shared.summary().steps == 5
    shared.close()


@pytest.mark.usefixtures("one_process")
def test_momentum_twice_is_warned_of_once() -> None:
    model = DistributedDataParallel(nn.Linear(10, 10))
    gradsieve.sparsify(model, "dgc", density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="momentum is applied twice: 0.9 by the sieve"):
        step(model, optimizer)
    step(model, optimizer)  # a second warning would be an error: see filterwarnings


@pytest.mark.usefixtures("one_process")
def test_a_forgotten_scaler_is_warned_of() -> None:
    model, other = DistributedDataParallel(nn.Linear(10, 10)), nn.Linear(10, 10)
    gradsieve.sparsify(model, density=0.1)
    step(other, torch.optim.SGD(other.parameters(), lr=0.1), torch.amp.GradScaler("cpu"))  # not ours: silent
    with pytest.warns(UserWarning, match="GradScaler steps the optimizer, but sparsify was called without it"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu"))


@pytest.mark.usefixtures("one_process")
def test_what_is_right_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    model, scaler = DistributedDataParallel(nn.Linear(10, 10)), torch.amp.GradScaler("cpu")
    gradsieve.sparsify(model, "dgc", density=0.1, scaler=scaler)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    assert not [found for found in recwarn if "gradsieve" in str(found.filename) or "sieve" in str(found.message)]
