"""Defects of the first campaign: empty parameters, float16, densities that differ, odd surroundings."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from test_ddp import network
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsieve import Budget, VirtualWorld, share, sparsify, virtual_reducers
from gradsieve._check import BadInput
from gradsieve.ddp import advice
from gradsieve.extend import Density
from helpers import LIBRARY

SENDERS = ("randomk", "exdyna", "topk")


class _Gaps(nn.Module):
    """Parameters without an element, between others and last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.empty(0))
        self.c, self.d = nn.Parameter(torch.randn(5)), nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat([self.a, self.c]) * x
        return whole.sum() + self.b.sum() + self.d.sum()


@dataclass(frozen=True)
class _Own(Density):
    """A density as a user writes one, which differs between ranks from step 2 on."""

    rank: int

    @property
    def target(self) -> float:
        return 0.05

    def at(self, step: int) -> float:
        return 0.05 if step < 2 or self.rank == 0 else 0.1


def _defects(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for unused in (False, True):
        model = DDP(_Gaps(), find_unused_parameters=unused)
        sparsify(model, "topk", density=1 / 11)
        hot = torch.zeros(11)
        for place in range(11):
            model.zero_grad()
            hot.zero_()[place] = 1.0 + place
            model(hot).backward()
            got = torch.cat([model.module.a.grad, model.module.c.grad])
            assert torch.equal(got, hot), (unused, place, got)

    half = DDP(nn.Linear(50, 50, bias=False).half())
    sieve = sparsify(half, "topk", density=0.02)
    total = torch.zeros(50, 50, dtype=torch.float64)
    for _ in range(30):
        half.zero_grad()
        half(torch.full((1, 50), 3000.0, dtype=torch.float16)).sum().backward()
        assert half.module.weight.grad.isfinite().all()
        total += half.module.weight.grad
    kept = sieve.reducer.residual.view(50, 50).double()
    torch.testing.assert_close(total + kept, torch.full_like(total, 30 * 3000.0), rtol=1e-3, atol=0.0)

    function: Any = _Own(rank).at
    for case, name, density in (*((name, name, function) for name in SENDERS), ("own", "randomk", _Own(rank))):
        model = DDP(network())
        sieve = sparsify(model, name, density=density)
        try:
            for _ in range(4):
                model.zero_grad()
                model(torch.randn(4, next(model.parameters()).shape[1])).sum().backward()
        except BadInput as error:
            found[case] = str(error)
            assert sieve.reducer.step == 2
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    shared = share(plain, optimizer, "topk", density=lambda step: function(step - 1))
    try:
        for _ in range(4):
            plain(torch.randn(4, next(plain.parameters()).shape[1])).sum().backward()
            optimizer.step()
    except BadInput as error:
        found["share"] = str(error)
        assert shared.replica.rounds == 2
    model = DDP(network())
    sieve = sparsify(model, "randomk", density=0.1)
    model(torch.randn(4, next(model.parameters()).shape[1])).sum().backward()
    sieve.set_density(0.1 + 0.1 * rank)
    try:
        model(torch.randn(4, next(model.parameters()).shape[1])).sum().backward()
    except BadInput as error:
        found["set_density"] = str(error)
    for wrong in ({"scaler": 3}, {"process_group": "all"}, {"density": 10**400}, {"timeout": "long"}):
        with pytest.raises(BadInput, match=next(iter(wrong))):
            sparsify(DDP(network()), **wrong)
    return found


def test_defects_in_real_processes(tmp_path: Path) -> None:
    for found in run_processes(_defects, 2, tmp_path):
        for name in (*SENDERS, "own", "share"):
            assert "workers disagree on density in step 2: rank 0 sends" in found[name]
        assert "workers disagree on density: rank 0 has 0.1, rank 1 has 0.2" in found["set_density"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    grads = [
        [torch.randn(400, generator=torch.Generator().manual_seed(10 * s + r)) for r in range(2)] for s in range(3)
    ]
    before = torch.get_default_dtype()
    for name in LIBRARY:
        updates = []
        for kind in (before, dtype):
            torch.set_default_dtype(kind)
            try:
                reducers = virtual_reducers(name, 0.1, world_size=2)
                for pair in grads:
                    programs = [reducer.reduce(grad) for reducer, grad in zip(reducers, pair, strict=True)]
                    updates.append(VirtualWorld(2).run(programs)[0])
            finally:
                torch.set_default_dtype(before)
        for one, other in zip(updates[:3], updates[3:], strict=True):
            assert torch.equal(one, other), name


def test_densities_after_dense_steps_are_compared_at_once() -> None:
    """In the first step both send everything."""
    reducers = [virtual_reducers("topk", 0.1 + 0.1 * rank, world_size=2, dense_steps=3)[rank] for rank in range(2)]
    words = "workers disagree on density: rank 0 has 0.1 after 3 dense steps, rank 1 has 0.2 after 3 dense steps"
    with pytest.raises(BadInput, match=words):
        VirtualWorld(2).run([reducer.reduce(torch.randn(20)) for reducer in reducers])


def _with_default(dtype: torch.dtype, rank: int) -> list[Tensor]:
    """Weights after steps of `sparsify`, with its advice, and of `share`, with another default on rank 1."""
    models, data = [network(), network()], [torch.randn(4, 24, dtype=torch.float32) + rank for _ in range(6)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    torch.set_default_dtype(dtype if rank else torch.float32)
    try:
        wrapped = DDP(models[0])
        sparsify(wrapped, density=0.1)
        share(models[1], optimizers[1], density=0.1, check_every=2)
        for x in data:
            for model, optimizer in zip((wrapped, models[1]), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]


def _defaults(rank: int, world_size: int) -> None:
    advice.AFTER = 4  # steps
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        found.append(_with_default(dtype, rank))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_the_default_dtype_does_not_matter_in_real_processes(tmp_path: Path) -> None:
    run_processes(_defaults, 2, tmp_path)


def test_kernels_work_where_nothing_can_be_cached() -> None:
    """Neither the package's folder nor HOME can be written: Numba finds no place for its cache."""
    script = (
        "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []\n"
        "import torch, gradsieve.ops as ops\n"
        "assert ops.select_above(torch.tensor([1.0, -3.0, 2.0]), 2.0).tolist() == [1, 2]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("ceiling", [float("inf"), float("nan"), 0.5])
def test_a_ceiling_is_checked_at_once(ceiling: float) -> None:
    with pytest.raises(BadInput, match="ceiling must be at least 1 and finite"):
        Budget(0.1, total_steps=10, ceiling=ceiling)
