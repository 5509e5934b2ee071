"""The hook in all corners of DDP, with real processes; the law is checked in every step."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lawful import flat_gradient, flat_update, lawful_backward, total
from processes import run_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsieve import Budget, dgc_warm_up, sparsify
from gradsieve.sparsifiers.hard_threshold import authors_rule
from helpers import LIBRARY, Group, assert_same

WIDTH, DENSITY = 24, 0.05


def network(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def batch(step: int, rank: int, size: int = 8) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def square(step: int, rank: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(batch(step, rank)).square().mean()


def train(model: DDP, sieve: Any, rank: int, steps: int = 6, tolerance: float = 1e-6) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        lawful_backward(model, sieve, square(step, rank), tolerance)
        optimizer.step()
        assert sieve.report.finite
        assert sieve.report.step == step
    sieve.check_replicas()


LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "many small buckets": {"bucket_cap_mb": 0.001},
    "one large bucket": {"bucket_cap_mb": 100},
    "buckets as views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.003},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.003},
    "unused parameters allowed": {"find_unused_parameters": True, "bucket_cap_mb": 0.003},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.003},
}


def _layouts(rank: int, world_size: int) -> dict[str, int]:
    numbers = {}
    for name, options in LAYOUTS.items():
        for sparsifier in ("exdyna", "topk", "randomk", "dense"):
            model = DDP(network(), **options)
            sieve = sparsify(model, sparsifier, density=DENSITY, measure=True)
            buckets: set[int] = set()
            add = sieve.hook._add
            sieve.hook._add = lambda b, buffer, add=add, buckets=buckets: (buckets.add(b.index()), add(b, buffer))  # type: ignore[method-assign]
            train(model, sieve, rank)
            numbers[f"{name}, {sparsifier}"] = len(buckets)
    return numbers


def test_bucket_layouts(tmp_path: Path) -> None:
    for numbers in run_processes(_layouts, 2, tmp_path):
        assert numbers["many small buckets, exdyna"] >= 4
        assert numbers["one large bucket, exdyna"] == 1
        assert numbers["buckets as views, topk"] > 1


def _every_sparsifier(rank: int, world_size: int) -> None:
    for name in LIBRARY:
        model = DDP(network(), bucket_cap_mb=0.003)
        train(model, sparsify(model, name, density=DENSITY), rank, steps=12)


def test_every_sparsifier(tmp_path: Path) -> None:
    run_processes(_every_sparsifier, 3, tmp_path)


def _no_sync(rank: int, world_size: int) -> None:
    for views in (False, True):
        model = DDP(network(), gradient_as_bucket_view=views)
        sieve = sparsify(model, density=DENSITY)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            before = sieve.reducer.residual.clone()
            parts = [square(10 * step + i, rank) for i in range(3)]
            acc = before + sum(flat_gradient(sieve, part(model.module)) for part in parts)
            for i, part in enumerate(parts):
                with model.no_sync() if i < 2 else nullcontext():
                    part(model).backward()
            update, after = flat_update(sieve), sieve.reducer.residual
            error = (total(acc) - world_size * update.double() - total(after)).abs().max()
            assert float(error) < 1e-5
            assert sieve.report is not None
            assert sieve.report.step == step
            optimizer.step()
        sieve.check_replicas()


def test_no_sync_accumulates(tmp_path: Path) -> None:
    run_processes(_no_sync, 2, tmp_path)


class Branches(nn.Module):
    """Three layers, of which a step uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for i in used:
            x = torch.tanh(self.parts[i](x))
        return x


def _unused(rank: int, world_size: int) -> None:
    for name in ("exdyna", "topk", "randomk", "cltk", "deft", "dense"):
        model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.003)
        sieve = sparsify(model, name, density=0.02)
        size = WIDTH * WIDTH + WIDTH
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(12):
            used = {
                0: (0, 1, 2),
                1: (0, 1) if rank == 0 else (0, 1, 2),  # the last layer rests on one rank
                2: (0, 1),  # and now on all
            }[step % 3]
            last = sieve.reducer.residual[:size].clone()  # the arena begins with the last layer
            lawful_backward(
                model, sieve, lambda m, used=used, step=step: m(batch(step, rank), used).square().mean()
            )
            if step % 3 == 2:
                assert model.module.parts[2].weight.grad is None
                assert torch.equal(sieve.reducer.residual[:size], last), "the residual must survive"
                assert name == "dense" or bool(last.any())
            optimizer.step()
        sieve.check_replicas()


def test_unused_parameters_keep_their_residual(tmp_path: Path) -> None:
    run_processes(_unused, 2, tmp_path)


def _frozen_and_mixed(rank: int, world_size: int) -> None:
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    ddp = DDP(model)
    sieve = sparsify(ddp, density=DENSITY)
    assert len(sieve.reducer.residual) == 3 * (WIDTH * WIDTH + WIDTH)
    train(ddp, sieve, rank)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).bfloat16()).float()

    for views in (False, True):
        ddp = DDP(Mixed(), gradient_as_bucket_view=views)
        sieve = sparsify(ddp, density=DENSITY)
        train(ddp, sieve, rank, tolerance=4e-3)  # updates of bfloat16 parameters are rounded to 8 bits
        assert ddp.module.second.weight.grad.dtype == torch.bfloat16
        assert sieve.reducer.residual.dtype == torch.float32


def test_frozen_parameters_and_mixed_dtypes(tmp_path: Path) -> None:
    run_processes(_frozen_and_mixed, 2, tmp_path)


class WithEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


def _sparse_embedding(rank: int, world_size: int) -> None:
    model = DDP(WithEmbedding())
    sieve = sparsify(model, density=DENSITY)
    assert list(sieve.hook.parameters) == ["head.bias", "head.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        words = torch.randint(50, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        model.module.embedding.weight.grad = None
        loss = model.module(words).square().mean()
        own = torch.autograd.grad(loss, model.module.embedding.weight)[0].to_dense()
        lawful_backward(model, sieve, lambda m, words=words: m(words).square().mean())
        found = model.module.embedding.weight.grad.to_dense()
        model.module.embedding.weight.grad = None  # computed twice more by the check of the law
        lawful_backward(model, sieve, lambda m, words=words: m(words).square().mean())
        expected = total(own) / world_size
        assert torch.allclose(model.module.embedding.weight.grad.to_dense().double(), expected, atol=1e-6)
        assert found.shape == own.shape
        rows = len(words.unique())
        assert sieve.report.bytes_sent == sieve.reducer.ledger.total.handed_bytes + 16 + rows * (8 + 4 * WIDTH)
        assert sieve.report.collectives == sieve.reducer.ledger.total.calls + 4
        mean_rows = float(total(torch.tensor(rows))) / world_size
        beside = (world_size - 1) * (16 + mean_rows * (8 + 4 * WIDTH))
        assert sieve.report.ring_bytes == pytest.approx(sieve.reducer.ledger.total.ring_bytes + beside)
        optimizer.step()
    sieve.check_replicas()


def test_sparse_embeddings_are_summed_exactly(tmp_path: Path) -> None:
    run_processes(_sparse_embedding, 2, tmp_path)


def _join(rank: int, world_size: int) -> int:
    model = DDP(network())
    sieve = sparsify(model, density=DENSITY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            square(step, rank)(model).backward()
            optimizer.step()
    sieve.check_replicas()
    return sieve.reducer.step


def test_join_with_uneven_inputs(tmp_path: Path) -> None:
    assert run_processes(_join, 2, tmp_path) == [7, 7]


def _one_worker_two_models(rank: int, world_size: int) -> None:
    one, other = DDP(network()), DDP(network(2))
    sieves = [sparsify(one, "exdyna", density=DENSITY), sparsify(other, "topk", density=0.1)]
    for step in range(4):
        for model, sieve in zip((one, other), sieves, strict=True):
            lawful_backward(model, sieve, square(step, rank))
    assert sieves[0].report.n != sieves[1].report.n  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size", [1, 2])
def test_world_of_one_and_two_models(world_size: int, tmp_path: Path) -> None:
    run_processes(_one_worker_two_models, world_size, tmp_path)


def _compiled(rank: int, world_size: int) -> None:
    for inner in (False, True):
        torch._dynamo.reset()
        plain = network()
        model = DDP(torch.compile(plain, backend="aot_eager") if inner else plain)
        compiled = model if inner else torch.compile(model, backend="aot_eager")
        sieve = sparsify(compiled, density=DENSITY)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            compiled(batch(step, rank)).square().mean().backward()
            optimizer.step()
        assert sieve.report is not None
        assert sieve.report.step == 3
        sieve.check_replicas()


def test_compiled_models(tmp_path: Path) -> None:
    run_processes(_compiled, 2, tmp_path)


def _densities(rank: int, world_size: int) -> list[float]:
    model = DDP(network())
    sieve = sparsify(model, density=dgc_warm_up(0.01, steps_per_epoch=2), dense_steps=1)
    found = []
    for step in range(12):
        if step == 10:
            sieve.set_density(lambda step: 0.5 if step == 10 else 0.02)
        lawful_backward(model, sieve, square(step, rank))
        assert sieve.report is not None
        found.append(round(sieve.report.density, 3))
    return found


def test_density_schedule(tmp_path: Path) -> None:
    expected = [1.0, 0.25, 0.062, 0.062, 0.016, 0.016, 0.01, 0.01, 0.01, 0.01, 0.5, 0.02]
    for found in run_processes(_densities, 2, tmp_path):
        assert found == pytest.approx(expected, abs=0.002)


def _budget(rank: int, world_size: int) -> list[int]:
    """A surge in the beginning, and a run that is shorter than was said: what was spent so far counts."""
    model = DDP(network())
    sieve = sparsify(model, density=Budget(DENSITY, total_steps=300))
    found = []
    for step in range(150):
        if step == 60:
            sieve.set_density(Budget(DENSITY, total_steps=150))
        scale = 20.0 if 10 <= step < 25 else 1.0
        lawful_backward(model, sieve, lambda m, step=step, scale=scale: scale * square(step, rank)(m))
        assert sieve.report is not None
        found.append(sieve.report.union)
    return found


def test_a_budget_is_met_over_the_run(tmp_path: Path) -> None:
    k = round(DENSITY * 4 * (WIDTH * WIDTH + WIDTH))
    for found in run_processes(_budget, 2, tmp_path):
        assert max(found[:30]) > 2 * k
        assert sum(found) == 150 * k


DENSE_STEPS, STEPS, SIDE = 10, 14, 200


def _starts_after_dense_steps(rank: int, world_size: int) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """By sparsifier: gradient, update and threshold of each step, and the last state."""
    import studies  # noqa: F401  # adds released_exdyna

    found = {}
    for name in ("sage", "released_exdyna"):
        torch.manual_seed(0)
        model = DDP(nn.Linear(SIDE, SIDE))
        sieve = sparsify(model, name, density=0.01, dense_steps=DENSE_STEPS)
        steps: list[Any] = []
        for step in range(STEPS):
            x = torch.randn(8, SIDE, generator=torch.Generator().manual_seed(1000 * step + rank))
            gradient = flat_gradient(sieve, model.module(x).square().mean())
            update = lawful_backward(model, sieve, lambda m, x=x: m(x).square().mean())
            assert sieve.report is not None
            steps.append((gradient, update, sieve.report.threshold))
        found[name] = steps, sieve.reducer.state_dict()
    return found


def test_thresholds_after_dense_steps_are_those_of_virtual_workers(tmp_path: Path) -> None:
    """They start with the density that is asked for, not with that of the dense steps."""
    import studies  # noqa: F401  # adds released_exdyna

    results = run_processes(_starts_after_dense_steps, 2, tmp_path)
    n = SIDE * SIDE + SIDE
    for name in ("sage", "released_exdyna"):
        group = Group(name, 0.01, 2, sizes=[SIDE, SIDE * SIDE], dense_steps=DENSE_STEPS)
        for step in range(STEPS):
            real = [result[name][0][step] for result in results]
            updates = group.step([gradient for gradient, _, _ in real])
            for (_, update, threshold), same, report in zip(real, updates, group.reports, strict=True):
                assert torch.equal(update, same), f"{name}, step {step}"
                assert threshold == report.threshold
            if step == DENSE_STEPS:
                assert group.reports[0].threshold == authors_rule(round(0.01 * n))
        for result, state in zip(results, group.states(), strict=True):
            assert_same(result[name][1], state)


class Small(nn.Module):
    """A real, small model: a convolution with batch norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _long(rank: int, world_size: int, steps: int) -> tuple[float, int]:
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    model = DDP(Small(), bucket_cap_mb=0.02, broadcast_buffers=False)
    sieve = sparsify(model, "exdyna", density=0.01, check_every=50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    most = 0
    for step in range(steps):
        chosen = torch.randint(len(x), (16,), generator=torch.Generator().manual_seed(step * world_size + rank))
        lawful_backward(model, sieve, lambda m, c=chosen: nn.functional.cross_entropy(m(x[c]), y[c]), 1e-5)
        optimizer.step()
        assert sieve.report is not None
        assert sieve.report.union == sieve.report.k
        assert sieve.report.bytes_sent == sieve.reducer.ledger.total.handed_bytes
        most = max(most, sieve.report.collectives if step else 0)
    sieve.check_replicas()
    with torch.no_grad():
        model.eval()
        return float((model.module(x).argmax(1) == y).float().mean()), most


@pytest.mark.slow
def test_200_steps_of_a_real_model(tmp_path: Path) -> None:
    for accuracy, most in run_processes(_long, 4, tmp_path, 200):
        assert accuracy > 0.9
        assert most <= 4  # three, and a fourth where all magnitudes fell below the cut


@pytest.mark.slow
def test_2000_steps_of_a_real_model(tmp_path: Path) -> None:
    for accuracy, most in run_processes(_long, 4, tmp_path, 2_000):
        assert accuracy > 0.97
        assert most <= 4


def test_process_groups_are_not_left_behind() -> None:
    assert not dist.is_initialized()
