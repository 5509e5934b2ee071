"""What the tests share: gradients of every kind, groups of virtual workers, and the laws they are held to."""

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve import SPARSIFIERS, StepReport, VirtualWorld, virtual_reducers
from gradsieve.density import Density, Schedule
from gradsieve.feedback import Feedback
from gradsieve.gradients import write_

ROOT = Path(__file__).parent.parent


def skip_without(*packages: str) -> None:
    """Skip a test, or a module, that needs a framework which is not installed; importing one takes seconds."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            words = f"{name} is not installed: pip install 'gradsieve[integrations]'"
            pytest.skip(words, allow_module_level=True)


def load_example(name: str) -> Any:
    """Run a file of examples/ as a module, as a user's script would be."""
    return load(f"examples/{name}.py")


def load(path: str) -> Any:
    """A file that belongs to no package, as a module; it finds the files beside it, as a script does."""
    if (beside := str((ROOT / path).parent)) not in sys.path:
        sys.path.append(beside)
    spec = importlib.util.spec_from_file_location(f"loaded_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load_example("new_sparsifier")
LIBRARY = list(SPARSIFIERS)  # the example's included, but not those of the studies, which tests may import


def _spike(n: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(n, generator=generator) * 1e-3
    x[int(torch.randint(n, (1,), generator=generator))] = 1e6
    return x


KINDS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "zeros": lambda n, g: torch.zeros(n),
    "equal": lambda n, g: torch.full((n,), 0.125),
    "denormals": lambda n, g: torch.randn(n, generator=g) * 1e-41,
    "huge": lambda n, g: torch.randn(n, generator=g) * 1e30,
    "spike": _spike,
    "signs": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, -0.5, 0.5),
    "few": lambda n, g: torch.where(torch.rand(n, generator=g) < 2 / n, 1.0, 0.0),
    "heavy tails": lambda n, g: torch.randn(n, generator=g) / torch.rand(n, generator=g).clamp_(1e-6),
}


def gradients(kind: str, n: int, world_size: int, seed: int) -> list[Tensor]:
    """One gradient a worker."""
    return [KINDS[kind](n, torch.Generator().manual_seed(1000 * seed + rank)) for rank in range(world_size)]


EVENTFUL_STEPS = 40


def eventful(n: int, world_size: int, step: int) -> list[Tensor]:
    """Gradients that change in many ways: outliers, another scale, a dead half, workers that agree, and back."""
    grads = gradients("heavy tails" if step % 9 == 4 else "normal", n, world_size, step)
    scale = 100.0 if 12 <= step < 18 else 0.01 if 30 <= step < 36 else 1.0
    for grad in grads:
        grad *= scale
        if 18 <= step < 24:
            grad[: n // 2] = 0
    return [grads[0].clone() for _ in grads] if 24 <= step < 30 else grads


# Options under which a sparsifier adds nothing but the gradient: for laws that are about gradients themselves.
PLAIN: dict[str, dict[str, Any]] = {"dgc": {"momentum": 0.0}}


class Group:
    """Virtual workers with one reducer each."""

    def __init__(
        self,
        name: str,
        density: float | Schedule | Density,
        world_size: int,
        sizes: Sequence[int] | None = None,
        values: str = "fp32",
        dense_steps: int = 0,
        feedback: Feedback | None = None,
        **options: Any,
    ) -> None:
        self.world = VirtualWorld(world_size)
        self.reducers = virtual_reducers(
            name,
            density,
            world_size=world_size,
            options=options,
            sizes=sizes,
            values=values,
            dense_steps=dense_steps,
            feedback=feedback,
        )
        self.reports: list[StepReport] = []

    def step(self, grads: list[Tensor]) -> list[Tensor]:
        """Run a step; returns the updates, and leaves the reports in `reports`."""
        updates = self.world.run([r.reduce(g) for r, g in zip(self.reducers, grads, strict=True)])
        self.reports = [report for reducer in self.reducers if (report := reducer.report) is not None]
        return updates

    def residuals(self, n: int) -> list[Tensor]:
        """Copies, zero before the first step."""
        return [torch.zeros(n) if r._arena is None else r.residual.clone() for r in self.reducers]

    def accumulators(self, grads: list[Tensor]) -> list[Tensor]:
        """What the next step with these gradients has to send or to keep."""
        pairs = zip(self.residuals(len(grads[0])), self.reducers, grads, strict=True)
        return [e + added(reducer.state_dict(), g) for e, reducer, g in pairs]

    def step_lawfully(self, grads: list[Tensor]) -> Tensor:
        """Run a step and check that nothing was lost; returns the update."""
        n = len(grads[0])
        accs = self.accumulators(grads)
        updates = self.step(grads)
        check_nothing_lost(accs, updates, self.residuals(n))
        for report in self.reports:
            assert report.finite
            assert report.counts == self.reports[0].counts
            assert 0 <= report.density <= 1
        return updates[0]

    def states(self) -> list[dict[str, Any]]:
        return [reducer.state_dict() for reducer in self.reducers]


def run_in_pieces(group: Group, grads: list[Tensor], edges: list[int], held: dict[int, set[int]]) -> list[Tensor]:
    """A step whose gradient comes in pieces, last one first, as DDP's buckets do; `held` are (rank: pieces)."""
    outs, programs = [grad.clone() for grad in grads], []
    for rank, (reducer, out) in enumerate(zip(group.reducers, outs, strict=True)):
        reducer.open(len(out), out.device)
        reducer.begin()
        for number in reversed(range(len(edges) - 1)):
            piece = out[edges[number] : edges[number + 1]]
            reducer.add(piece, edges[number], piece, hold_back=number in held.get(rank, set()))
        programs.append(reducer.finish())
    for out, sent in zip(outs, group.world.run(programs), strict=True):
        write_(out, sent)
    group.reports = [report for reducer in group.reducers if (report := reducer.report) is not None]
    return outs


def check_loss_scale(plain: Group, scaled: Group) -> None:
    """If gradients come 1024 times as large from some step on, so do updates, and nothing else changes."""
    for step in range(12):
        grads, factor = gradients("normal", 2_000, 2, step), 1.0 if step < 5 else 1024.0
        if step == 5:
            for reducer in scaled.reducers:
                reducer.rescale(factor)
        expected = plain.step(grads)[0]
        assert torch.equal(scaled.step([factor * grad for grad in grads])[0], factor * expected), f"step {step}"


def added(state: dict[str, Any], grad: Tensor) -> Tensor:
    """What a gradient adds to the residual of a worker with this state: itself, or with momentum its velocity."""
    grad = grad.to(torch.float32)
    velocity = state["state"].get("feedback", {}).get("velocity")
    return grad if velocity is None else velocity * state["options"]["momentum"] + grad


def check_nothing_lost(accs: list[Tensor], updates: list[Tensor], residuals: list[Tensor]) -> None:
    """All workers have the same update, and `sum acc == P * update + sum residual`, bit-exact where not sent."""
    for update in updates:
        assert torch.equal(update, updates[0]), "workers hold different updates"
    world_size, scale = len(accs), torch.stack(accs).abs().max(0).values.double()
    for acc, residual in zip(accs, residuals, strict=True):
        kept = residual != 0
        assert torch.equal(residual[kept], acc[kept]), "an element that was not sent changed"
    before = torch.stack(accs).double().sum(0)
    after = world_size * updates[0].double() + torch.stack(residuals).double().sum(0)
    # Sums of P float32 numbers: P rounding errors of their size, and those of float32's smallest numbers.
    error = (before - after).abs()
    assert bool((error <= world_size * (scale * 2**-22 + 2**-148)).all()), f"lost up to {error.max()}"


def assert_same(left: Any, right: Any, path: str = "state") -> None:
    """Equality to the last bit of nested states."""
    assert type(left) is type(right), path
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), path
    else:
        assert left == right, path


@functools.cache
def bf16_problem() -> str:
    """Why bf16 autocast cannot be used here, or nothing: on some CPUs plain torch dies of SIGILL in it."""
    code = (
        "import torch; m = torch.nn.Linear(64, 64)\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16): m(torch.randn(8, 64)).sum().backward()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    return f"plain torch fails in bf16 autocast on this CPU: exit code {done.returncode}" * bool(done.returncode)


def needs_bf16() -> None:
    """Skip a test where plain torch cannot compute in bf16."""
    if problem := bf16_problem():
        pytest.skip(problem)
