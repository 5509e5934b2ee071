"""AdamW for replicas: plain with one worker, and with more the steps that averaged gradients would take."""

import copy

import pytest
import torch
from torch import nn

from gradsieve import ReplicaAdamW
from gradsieve.share.adamw import averaged_noise_
from virtual_replicas import backward, make_model


def test_one_worker_is_adamw() -> None:
    model, other = make_model(), make_model()
    ours = ReplicaAdamW(model.parameters(), 0.01, weight_decay=0.1, workers=1)
    plain = torch.optim.AdamW(other.parameters(), 0.01, weight_decay=0.1)
    for step in range(20):
        for each, optimizer in ((model, ours), (other, plain)):
            optimizer.zero_grad()
            backward(each, 0, step)
            optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_noise_is_divided_and_signal_is_not() -> None:
    """Long means of a constant signal in noise: the moment is that of gradients averaged over the workers."""
    chance, slow = torch.Generator().manual_seed(0), 0.99
    for signal, noise in ((1.0, 0.1), (0.0, 1.0), (0.5, 0.5)):
        mean, square = torch.zeros(2_000), torch.zeros(2_000)
        for _ in range(1_500):
            grad = signal + noise * torch.randn(2_000, generator=chance)
            mean.lerp_(grad, 1 - slow)
            square.lerp_(grad.square(), 0.005)
        averaged_noise_([square], [mean], 8, slow)
        assert float(square.mean()) == pytest.approx(signal**2 + noise**2 / 8, rel=0.05)


def test_parameters_of_every_size() -> None:
    """Those that are updated together, those that are too large for it, and one without a gradient."""
    sizes = [3, 1 << 20, 5, 1 << 21, 7]
    params, others = ([nn.Parameter(torch.ones(size)) for size in sizes] for _ in range(2))
    ours, plain = ReplicaAdamW(params, 0.01, workers=1), torch.optim.AdamW(others, 0.01)
    for step in range(3):
        for place in range(len(sizes)):
            if place != 2 or step:  # so it is a step behind
                params[place].grad = others[place].grad = torch.full((sizes[place],), 1.0 + step)
        ours.step()
        plain.step()
    for one, two in zip(params, others, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_workers_by_default() -> None:
    assert ReplicaAdamW(nn.Linear(2, 2).parameters()).param_groups[0]["workers"] == 1


def test_it_goes_on_from_its_state() -> None:
    models, optimizers = [make_model()], []
    optimizers.append(ReplicaAdamW(models[0].parameters(), 0.01, workers=4))
    for step in range(3):
        backward(models[0], 0, step)
        optimizers[0].step()
    models.append(copy.deepcopy(models[0]))
    optimizers.append(ReplicaAdamW(models[1].parameters(), 0.01, workers=4))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        backward(model, 0, 9)
        optimizer.step()
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"workers": 2, "slow": 1.0}, r"slow must be in \[0, 1\), got 1.0"),
        ({"workers": 2, "lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"workers": 2, "betas": (0.9, 2.0)}, r"betas\[1\] must be in \[0, 1\), got 2.0"),
        ({"workers": 2, "weight_decay": -1}, "weight_decay must be at least 0, got -1"),
    ],
)
def test_bad_input(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplicaAdamW(nn.Linear(2, 2).parameters(), **change)  # type: ignore[arg-type]
