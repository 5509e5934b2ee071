"""Gradient exchange between processes: by our sieve, or by one of torch's own hooks, with its bytes counted."""

import inspect
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve.ddp import sparsify
from gradsieve.state import checkpoint
from gradsieve.worlds import ProcessGroupWorld
from gradsieve_lab.runs.bare_state import bare_state
from gradsieve_lab.runs.config import Config
from gradsieve_lab.runs.methods import DENSE, is_hook
from gradsieve_lab.runs.step_record import Stepped, all_at_once, from_report

# torch 2.13 renamed this option and warns about the old name.
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"


class Hook(Protocol):
    """A hook on a DDP model that exchanges gradients in its backward pass."""

    def begin(self) -> None:
        """Called before a backward pass."""

    def end(self) -> Stepped:
        """Called after the backward pass; returns what was done in it, by phase."""

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Save this hook's state and rank 0's `extra`; every rank calls it."""

    def load(self, folder: Path) -> dict[str, Any]:
        """Load that state; returns `extra`."""


def attach(model: torch.nn.Module, settings: Config) -> tuple[DistributedDataParallel, Hook]:
    """Make the model data-parallel with the method that the settings name."""
    # Buffers are averaged before they are used: see ProcessEngine.
    ways: dict[str, Any] = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
    if settings.sparsifier not in (DENSE, "fp16"):
        # torch's PowerSGD hangs on gloo with several buckets, and ours sends nothing before the last one.
        ways["bucket_cap_mb"] = 100_000
    ddp = DistributedDataParallel(model, **ways)
    if is_hook(settings.sparsifier):
        return ddp, TorchHook(ddp, settings)
    return ddp, SieveHook(ddp, settings)


class SieveHook:
    """Gradsieve's hook."""

    def __init__(self, ddp: DistributedDataParallel, settings: Config) -> None:
        self.sieve = sparsify(
            ddp,
            settings.sparsifier,
            settings.make_density(),
            dense_steps=settings.dense_steps,
            measure=True,
            values=settings.values,
            advise=False,  # methods are compared on purpose
            timeout=settings.timeout,
            **settings.all_options(),
        )

    def begin(self) -> None:
        pass

    def end(self) -> Stepped:
        assert self.sieve.report is not None
        return from_report(self.sieve.report)

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        self.sieve.save(folder, extra)

    def load(self, folder: Path) -> dict[str, Any]:
        return self.sieve.load(folder)


class TorchHook:
    """Plain data-parallel training, or torch's fp16 or PowerSGD hook. They overlap communication with the backward
    pass: only the part after the last gradient was ready counts as communication."""

    def __init__(self, ddp: DistributedDataParallel, settings: Config) -> None:
        self.settings, self.world = settings, ProcessGroupWorld(timeout=settings.timeout)
        self.n = sum(parameter.numel() for parameter in ddp.parameters())
        self.state: Any = None
        self._compressed = 0  # elements that PowerSGD has sent so far, by its own count
        self.begin()
        hook: Any = {DENSE: default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}.get(
            settings.sparsifier
        )
        if hook is None:
            hook = powerSGD_hook.powerSGD_hook
            options = settings.options
            self.state = powerSGD_hook.PowerSGDState(
                None, options["rank"], start_powerSGD_iter=options["start"], random_seed=settings.seed
            )

        def counted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
            started = time.perf_counter()
            handed, calls = bucket.buffer().nbytes, 1
            future: torch.futures.Future[torch.Tensor] = hook(self.state, bucket)
            if settings.sparsifier == "fp16":
                handed //= 2
            elif self.state is not None and self.state.iter >= settings.options["start"]:
                sent = self.state.total_numel_after_compression
                handed, calls, self._compressed = 4 * (sent - self._compressed), 3, sent
            self._handed += handed
            self._calls += calls
            self._last = time.perf_counter()
            self._inside += self._last - started
            return future

        ddp.register_comm_hook(None, counted)

    def begin(self) -> None:
        self._handed = self._calls = 0
        self._inside, self._last = 0.0, time.perf_counter()

    def end(self) -> Stepped:
        return all_at_once(
            self.n,
            collectives=self._calls,
            ring_bytes=ring_all_reduce_bytes(self._handed, self.world.size),
            select_s=self._inside,
            communicate_s=time.perf_counter() - self._last,
            exact=self.settings.sparsifier == DENSE,
        )

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        self.world.run([checkpoint.save(folder, self._state(extra["step"]), {}, extra)])

    def load(self, folder: Path) -> dict[str, Any]:
        state = self.world.run([checkpoint.load(folder, self._state(0), {})])[0]
        extra: dict[str, Any] = state["extra"]
        return extra

    def _state(self, step: int) -> dict[str, Any]:
        """Only the step: PowerSGD's memory is torch's own and starts from zero."""
        return bare_state(self.settings, self.world.rank, self.world.size, step)
