"""Mixed precision: an overflow on one rank skips the step on all, and what is kept follows the loss scale."""

import math
from pathlib import Path

import torch
from processes import run_processes
from test_ddp import batch, network
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsieve import sparsify
from helpers import needs_bf16


def _overflow(rank: int, world_size: int, name: str, dtype: torch.dtype) -> dict[str, list[float]]:
    model = DDP(network(), bucket_cap_mb=0.003)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    options = {"threshold": 1e-3} if name == "hard_threshold" else {}
    sieve = sparsify(model, name, density=0.05, scaler=scaler, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: dict[str, list[float]] = {"scale": [], "finite": [], "moved": []}
    for step in range(14):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(batch(step, rank)).square().mean()
        if step in (0, 5) and rank == 1:
            loss = loss * math.inf
        scale = scaler.get_scale()
        unscaled_before = sieve.reducer.residual / sieve.hook.scale
        weights = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert sieve.report is not None
        if step in (0, 5):
            assert not sieve.report.finite
            assert torch.equal(sieve.reducer.residual / scale, unscaled_before), "residuals must stay as they were"
        assert bool(sieve.reducer.residual.isfinite().all())
        seen["scale"].append(scale)
        seen["finite"].append(sieve.report.finite)
        seen["moved"].append(any(not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)))
    sieve.check_replicas()
    return seen


def _run(rank: int, world_size: int) -> list[dict[str, list[float]]]:
    cases = [("exdyna", torch.bfloat16), ("exdyna", torch.float16), ("hard_threshold", torch.bfloat16)]
    return [_overflow(rank, world_size, name, dtype) for name, dtype in cases]


def test_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    needs_bf16()
    results = run_processes(_run, 2, tmp_path)
    for seen in [case for result in results for case in result]:
        good = [step not in (0, 5) for step in range(14)]
        assert seen["finite"] == good
        assert seen["moved"] == good
        assert seen["scale"][1] == 512.0
        assert max(seen["scale"]) > min(seen["scale"])


def _scale_does_not_matter(rank: int, world_size: int) -> None:
    """Powers of two: with and without a scaler, training is the same to the last bit."""

    def train(scaler: torch.amp.GradScaler | None, name: str) -> list[Tensor]:
        model = DDP(network())
        sieve = sparsify(model, name, density=0.05, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(12):
            optimizer.zero_grad()
            loss = model(batch(step, rank)).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return [*(p.detach().clone() for p in model.parameters()), sieve.reducer.residual / sieve.hook.scale]

    for name in ("exdyna", "micro", "topk", "hard_threshold"):
        growing = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        for plain, scaled in zip(train(None, name), train(growing, name), strict=True):
            assert torch.equal(plain, scaled), name
        assert growing.get_scale() > 256.0


def test_what_is_kept_follows_the_scale(tmp_path: Path) -> None:
    run_processes(_scale_does_not_matter, 2, tmp_path)
