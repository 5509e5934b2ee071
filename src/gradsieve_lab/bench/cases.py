"""Benchmark cases: one model trained with plain DDP, torch's hooks, our methods, and without communication."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve._check import one_of
from gradsieve.ddp import Sieve, sparsify
from gradsieve.share import ShareSieve, share

LAYERS, WIDTH, BATCH = 10, 1024, 32
N = LAYERS * (WIDTH * WIDTH + WIDTH)
WARM_UP = 12  # steps that are not timed
PLAIN, ALONE, OURS = "plain DDP", "compute alone", "exdyna"
BF16, FP8 = "exdyna, bf16 values", "exdyna, fp8 values"
NARROW = {BF16: "bf16", FP8: "fp8"}
SHARE, LATE, LATE_FP8, AUTO = "share", "share, delay=1", "share, delay=1, fp8 values", "share, delay=1, auto"
SHARING: dict[str, dict[str, Any]] = {
    SHARE: {},
    LATE: {"delay": 1},
    LATE_FP8: {"delay": 1, "values": "fp8"},
    AUTO: {"delay": 1, "density": "auto"},
}
STREAK = 16  # steps timed together where exchanges overlap the next step; the last one waits for its own
POWERSGD = ("PowerSGD rank 1", "PowerSGD rank 4")
SPARSE = ("topk", "cltk", "sidco", "hard_threshold", "micro", OURS, "shared_threshold")
CASES = (PLAIN, "fp16 hook", *POWERSGD, *SPARSE, *NARROW, *SHARING, ALONE)
_SHORT_WARM_UP = 2  # of cases without state other than DDP's buckets


@dataclass(frozen=True)
class Case:
    """A model and the function that trains it for one step; `sieve` is set for our own methods."""

    name: str
    step: Callable[[], None]
    sieve: Sieve | ShareSieve | None = None

    def turn(self) -> int:
        """Train until no exchange is pending; returns the number of steps."""
        if not isinstance(self.sieve, ShareSieve) or not self.sieve.driver.delay:
            self.step()
            return 1
        for _ in range(STREAK):
            self.step()
        self.sieve.driver.wait()
        return STREAK

    @property
    def warm_up(self) -> int:
        return WARM_UP if self.sieve is not None or self.name in POWERSGD else _SHORT_WARM_UP


def parse_cases(text: str, *needed: str) -> tuple[str, ...]:
    """Parse names of cases, separated by semicolons, and add those `needed`; all cases if there are none.

    >>> parse_cases("exdyna; share", "compute alone")
    ('exdyna', 'share', 'compute alone')
    """
    named = [one_of("case", part.strip(), CASES) for part in text.split(";") if part.strip()]
    return tuple(case for case in CASES if case in (*named, *needed)) if named else CASES


def make_case(name: str, rank: int, density: float, width: int = WIDTH) -> Case:
    """Make the case of this name on one worker. Gradients are views of DDP's buckets in all cases."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers)
    inputs = _inputs(rank, width)
    sieve: Sieve | ShareSieve | None = None
    if name != ALONE and name not in SHARING:
        options = {"threshold": _threshold(model, density, width)} if name == "hard_threshold" else {}
        several = name in (PLAIN, "fp16 hook")  # the others send only after the last bucket: they get one
        model = ddp = DistributedDataParallel(  # all start with the same parameters: no broadcast needed
            model, gradient_as_bucket_view=True, bucket_cap_mb=None if several else 1000, init_sync=False
        )
        sieve = _attach(ddp, name, density, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if name in SHARING:
        sieve = share(model, optimizer, OURS, **{"density": density, **SHARING[name]})

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return Case(name, step, sieve)


def _attach(ddp: DistributedDataParallel, name: str, density: float, options: dict[str, Any]) -> Sieve | None:
    if name == PLAIN:
        return None
    if name == "fp16 hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return None
    if name in POWERSGD:
        state = powerSGD_hook.PowerSGDState(None, int(name.split()[-1]), start_powerSGD_iter=2)
        state.iter = 2  # its first steps would send the full gradient: slow, and irrelevant here
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return None
    if name in NARROW:
        return sparsify(ddp, OURS, density=density, values=NARROW[name], advise=False)
    return sparsify(ddp, name, density=density, advise=False, **options)


def _inputs(rank: int, width: int) -> Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank))


def _threshold(model: nn.Module, density: float, width: int) -> float:
    """Find a constant threshold that sends about `density` of a nearly constant gradient in the first steps.

    An element is sent whenever its sum passes the threshold. Found by bisection, on every 16th element.
    """
    loss = model(_inputs(0, width)).square().mean()  # the same on all workers
    grads = torch.cat([grad.flatten()[::16] for grad in torch.autograd.grad(loss, list(model.parameters()))]).abs()
    low, high = 0.0, float(grads.max()) * 3 * WARM_UP
    for _ in range(40):
        middle = (low + high) / 2
        sent = (grads * 3 * WARM_UP / middle).floor() - (grads * WARM_UP / middle).floor()
        if float(sent.mean()) / (2 * WARM_UP) > density:
            low = middle
        else:
            high = middle
    return high
