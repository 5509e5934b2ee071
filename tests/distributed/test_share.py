"""`gradsieve.share` in real processes: equal to virtual workers, and at home in the loops that users write."""

import contextlib
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from helpers import assert_same
from virtual_replicas import Workers, backward, make_model

STEPS = 9
WAYS = list(itertools.product((0, 1), ("fp32", "bf16", "fp8")))
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def _every_way(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for delay, values in WAYS:
        model = make_model()
        optimizer = OPTIMIZERS["adamw" if values == "bf16" else "sgd"](model.parameters())
        sieve = gradsieve.share(model, optimizer, "exdyna", 0.05, delay=delay, values=values, check_every=3)
        train(model, optimizer, rank, range(STEPS))
        state = sieve.state_dict()
        with sieve.shared():
            agreed = flat(model)
        found[f"{delay} {values}"] = state["weights"], state["shared"]
        assert torch.equal(agreed, state["shared"])
        assert torch.equal(flat(model), state["weights"])
        report = sieve.report
        assert report is not None
        assert {"select", "communicate", "waited", "hidden", "cpu", "write"} <= set(report.seconds)
        assert report.bytes_sent > 0
        assert report.spread is not None
        sieve.close()
    return found


def test_processes_equal_virtual_workers(tmp_path: Path) -> None:
    results = run_processes(_every_way, 3, tmp_path)
    for delay, values in WAYS:
        made: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
        if values == "bf16":  # entries are judged by Adam's second moment
            made = {"optimizer": torch.optim.AdamW, "lr": 0.01}
        virtual = Workers(3, 0.05, delay=delay, settings={"values": values}, **made)
        for step in range(STEPS):
            virtual.step(step)
        for rank, result in enumerate(results):
            weights, shared = result[f"{delay} {values}"]
            assert torch.equal(weights, virtual.weights()[rank]), (delay, values)
            assert torch.equal(shared, virtual.shared()[rank]), (delay, values)


def _limits(rank: int, world_size: int) -> None:
    plain = make_model()
    ddp = DistributedDataParallel(plain)
    optimizer = OPTIMIZERS["adamw"](ddp.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(ddp, rank, step)
        optimizer.step()

    # Dense steps are DDP's own, to the last bit (two workers: a sum has no order), moments included.
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sieve = gradsieve.share(model, optimizer, density=0.05, dense_steps=STEPS)
    train(model, optimizer, rank, range(STEPS))
    assert torch.equal(flat(model), flat(plain))
    assert torch.equal(sieve.replica.weights.shared, flat(plain))
    train(model, optimizer, rank, range(STEPS, STEPS + 2))
    assert sieve.report is not None
    assert sieve.report.step == STEPS + 2
    assert not torch.equal(flat(model), sieve.replica.weights.shared)

    # Density 1 every H steps is torch's own averager.
    for every in (1, 4):
        model, other = make_model(), make_model()
        optimizer, second = OPTIMIZERS["sgd"](model.parameters()), OPTIMIZERS["sgd"](other.parameters())
        gradsieve.share(model, optimizer, density=1.0, every=every)
        averager = PeriodicModelAverager(period=every)
        averager.step = 1  # it averages before its first period is over, unless it is told so
        for step in range(8):
            train(model, optimizer, rank, [step])
            train(other, second, rank, [step])
            averager.average_parameters(other.parameters())
        torch.testing.assert_close(flat(model), flat(other), rtol=1e-5, atol=1e-6)


def test_limits(tmp_path: Path) -> None:
    run_processes(_limits, 2, tmp_path)


class Tied(nn.Module):
    """An embedding tied to the output, a frozen layer, and batch normalisation with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(self.frozen(self.embedding(tokens))))
        return logits


def _loops(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)  # every worker starts elsewhere: rank 0's weights count
    for make in OPTIMIZERS.values():
        model = nn.Sequential(nn.Linear(9, 23), nn.Tanh(), nn.Linear(23, 1))
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        sieve = gradsieve.share(model, optimizer, density=0.05)
        for step in range(4):
            for part in range(2):  # gradient accumulation
                backward(model, rank, 2 * step + part)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert sieve.report is not None
        assert sieve.report.round == 3
        sieve.check_replicas()
        sieve.finish()
        together = [torch.empty_like(flat(model)) for _ in range(world_size)]
        dist.all_gather(together, flat(model))
        assert all(torch.equal(each, together[0]) for each in together)

    # Tied and frozen parameters, two groups, buffers, channels last, and activation checkpointing.
    tied = Tied()
    frozen = tied.frozen.weight.clone()
    optimizer = torch.optim.AdamW(
        [{"params": tied.embedding.parameters()}, {"params": tied.norm.parameters(), "lr": 0.1}]
    )
    sieve = gradsieve.share(tied, optimizer, density=0.1)
    assert sieve.replica.weights.n == 11 * 6 + 12
    for step in range(4):
        tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        hidden = torch.utils.checkpoint.checkpoint(tied, tokens, use_reentrant=False)
        nn.functional.cross_entropy(hidden, tokens).backward()
        optimizer.step()
    means = [torch.empty(6) for _ in range(world_size)]
    dist.all_gather(means, tied.norm.running_mean.clone())
    sieve.finish()
    torch.testing.assert_close(tied.norm.running_mean, torch.stack(means).mean(0))
    first = frozen.clone()
    dist.broadcast(first, 0)
    assert torch.equal(tied.frozen.weight, first)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(
        RuntimeError, match="must keep the 3 trainable parameters it had when share was called, got 4"
    ):
        optimizer.step()

    images = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    optimizer = OPTIMIZERS["sgd"](images.parameters())
    sieve = gradsieve.share(images, optimizer, density=0.1)
    for step in range(3):
        optimizer.zero_grad()
        images(
            torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step * 7 + rank))
        ).square().mean().backward()
        optimizer.step()
    assert not images.weight.is_contiguous()
    sieve.finish()

    # Two optimizers, one sieve; and an error in shared() that leaves the replica's own weights in place.
    model = make_model()
    one, two = OPTIMIZERS["sgd"](model[0].parameters()), OPTIMIZERS["adamw"](model[2:].parameters())
    sieve = gradsieve.share(model, [one, two], density=0.05, delay=1)
    for step in range(3):
        model.zero_grad()
        backward(model, rank, step)
        one.step()
        two.step()
    assert sieve.replica.steps == 3
    mine = flat(model)
    with contextlib.suppress(ZeroDivisionError), sieve.shared():
        assert not torch.equal(flat(model), mine)
        with pytest.raises(RuntimeError, match="must not step inside"):
            one.step()
        raise ZeroDivisionError
    assert torch.equal(flat(model), mine)

    # A density that follows the network: the same on all ranks, whatever each of them measures.
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sieve = gradsieve.share(model, optimizer, density=gradsieve.Auto(0.02, 0.5), delay=1)
    densities = []
    for step in range(40):
        train(model, optimizer, rank, [step])
        densities.append(0.0 if sieve.report is None else sieve.report.density)
    gathered = [torch.empty(40) for _ in range(world_size)]
    dist.all_gather(gathered, torch.tensor(densities))
    assert all(torch.equal(each, gathered[0]) for each in gathered)
    assert sieve.report is not None
    assert "ms of computing" in sieve.report.why
    assert 0.02 <= sieve.replica.schedule.at(0) <= 0.5

    compiled = make_model()
    optimizer = OPTIMIZERS["sgd"](compiled.parameters())
    gradsieve.share(torch.compile(compiled, backend="eager"), optimizer, density=0.05)
    train(compiled, optimizer, rank, range(2))


def test_loops_of_users(tmp_path: Path) -> None:
    run_processes(_loops, 2, tmp_path)


def _skipped_steps(rank: int, world_size: int, dense_steps: int) -> None:
    for delay in (0, 1):
        model = make_model()
        optimizer, scaler = OPTIMIZERS["adamw"](model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
        sieve = gradsieve.share(model, optimizer, density=0.05, delay=delay, dense_steps=dense_steps, scaler=scaler)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(8, 9, generator=torch.Generator().manual_seed(step * 7 + rank))
            loss = model(x).square().mean()
            if step in (1, 3) and rank == 1:  # this rank's scaler skips the step
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert sieve.replica.steps == 6
        sieve.check_replicas()
        sieve.finish()
        assert flat(model).isfinite().all()


@pytest.mark.parametrize("dense_steps", [0, 3])
def test_a_rank_whose_scaler_skips_takes_part(tmp_path: Path, dense_steps: int) -> None:
    run_processes(_skipped_steps, 3, tmp_path, dense_steps)


def _checkpoints(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    def start(delay: int) -> tuple[nn.Module, torch.optim.Optimizer, gradsieve.ShareSieve]:
        model = make_model()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        return model, optimizer, gradsieve.share(model, optimizer, density=0.05, delay=delay)

    for delay in (0, 1):
        place = folder / str(delay)
        model, optimizer, sieve = start(delay)
        train(model, optimizer, rank, range(4))
        sieve.save(place, {"optimizer": optimizer.state_dict(), "rank": rank})  # between start and application
        train(model, optimizer, rank, range(4, 8))
        expected = sieve.state_dict()

        model, optimizer, sieve = start(delay)
        extra = sieve.load(place)
        assert extra["rank"] == rank
        state = extra["optimizer"]
        optimizer.load_state_dict({**state, "state": {int(key): value for key, value in state["state"].items()}})
        train(model, optimizer, rank, range(4, 8))
        found = sieve.state_dict()
        for state in (found, expected):
            state["pending"].get("report", {}).pop("seconds", None)
        assert_same(found, expected)
    return {"weights": flat(model)}


def _another_size(rank: int, world_size: int, folder: Path) -> Tensor:
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sieve = gradsieve.share(model, optimizer, density=0.05, delay=1)
    assert sieve.load(folder / "1")["rank"] == rank % 3
    loaded = flat(model).clone()
    train(model, optimizer, rank, range(4, 6))
    sieve.check_replicas()
    return loaded


def test_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (tmp_path / "first").mkdir()
    run_processes(_checkpoints, 3, tmp_path / "first", folder)
    (tmp_path / "second").mkdir()
    loaded = run_processes(_another_size, 2, tmp_path / "second", folder)
    assert torch.equal(loaded[0], loaded[1])
    virtual = Workers(3, 0.05, delay=1, optimizer=torch.optim.AdamW, lr=0.01)
    for step in range(4):
        virtual.step(step)
    torch.testing.assert_close(loaded[0], torch.stack(virtual.weights()).mean(0))


def _refused(rank: int, world_size: int) -> None:
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for call, kind, words in (
        (lambda: gradsieve.share(model, "sgd"), TypeError, "optimizer must be a torch optimizer or a list"),
        (lambda: gradsieve.share("model", optimizer), TypeError, "model must be a torch.nn.Module, got str"),
        (lambda: gradsieve.share(model, optimizer, density=0), ValueError, r"density must be in \(0, 1\], got 0"),
        (lambda: gradsieve.share(model, optimizer, "dgc"), ValueError, "sparsifier must work on weights"),
        (lambda: gradsieve.share(model, optimizer, judge="curvature"), ValueError, "curvature needs Adam, AdamW"),
        (lambda: gradsieve.share(model, optimizer, judge="loss"), ValueError, "judge must be one of auto, drift"),
        (lambda: gradsieve.share(model, optimizer, density="most"), ValueError, "density must be one of auto"),
        (lambda: gradsieve.share(model, optimizer, delay=3), ValueError, "delay must be one of 0, 1, got 3"),
        (lambda: gradsieve.share(model, optimizer, check_every=-1), ValueError, "check_every must be at least 0"),
    ):
        with pytest.raises(kind, match=words):
            call()
    gradsieve.share(model, optimizer, density=0.05 if rank == 0 else 0.06)
    with pytest.raises(ValueError, match=r"workers disagree on density: rank 0 has 0.05, rank 1 has 0.06"):
        train(model, optimizer, rank, [0])
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sieve = gradsieve.share(model, optimizer, density=0.05, delay=1)
    train(model, optimizer, rank, range(2))
    sieve.driver.wait()  # weights must not be changed by hand while a round is made
    with torch.no_grad():
        if rank == 1:
            model[2].weight.fill_(float("nan"))
    with pytest.raises(gradsieve.NonFiniteWeights, match=r"of rank 1; nothing was averaged"):
        train(model, optimizer, rank, range(2, 5))
    assert sieve.replica.weights.shared.isfinite().all()


def test_errors_reach_every_rank(tmp_path: Path) -> None:
    run_processes(_refused, 2, tmp_path)


def _advised(rank: int, world_size: int) -> None:
    """A plain Adam is told of, on one rank; an optimizer that knows of the others is not."""
    for make, told in ((torch.optim.AdamW, rank == 0), (gradsieve.ReplicaAdamW, False), (torch.optim.SGD, False)):
        model = make_model()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            gradsieve.share(model, make(model.parameters(), lr=0.01), density=0.05)
        words = [str(each.message) for each in heard if "ReplicaAdamW" in str(each.message)]
        assert len(words) == told, words
        assert not told or words[0].startswith("every worker's AdamW divides by the noise of its own batch")
    assert gradsieve.ReplicaAdamW(make_model().parameters()).param_groups[0]["workers"] == world_size


def test_advice(tmp_path: Path) -> None:
    run_processes(_advised, 2, tmp_path)
