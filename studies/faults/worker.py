"""One worker of a trial: it trains, triggers its fault at a chosen moment, and writes a report."""

import hashlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve_lab.launch import Place

MODES = ("sparsify", "share", "share, delay 1")
PHASES = ("startup", "handshake", "accumulate", "exchange", "write", "checkpoint")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "raise": 0}
_RATE = 0.05


class Injected(RuntimeError):
    """The fault of a trial, if it is an error."""


@dataclass(frozen=True)
class Plan:
    """One launch of workers."""

    mode: str
    folder: str  # of the checkpoint
    reports: str  # folder
    world_size: int = 3
    steps: int = 9
    save_every: int = 3
    timeout: float = 3.0
    victim: int = -1  # rank with the fault; -1: none
    phase: str = ""
    count: int = 1  # the fault occurs the nth time the victim reaches that phase
    fault: str = ""
    regroup: bool = False  # survivors continue without the victim
    pause: float = 0.0  # seconds between steps
    port: int = 0  # of the store in rank 0, as with env://; 0: the store is a file


class Trap:
    """Triggers the fault when the victim reaches the chosen phase."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.left = plan, plan.count if rank == plan.victim else 0

    def reach(self, phase: str) -> None:
        if self.left and phase == self.plan.phase:
            self.left -= 1
            if not self.left:
                (Path(self.plan.reports) / "fault").write_text(str(time.monotonic()))
                if self.plan.fault == "raise":
                    raise Injected("an error of the trial")
                os.kill(os.getpid(), SIGNALS[self.plan.fault])
                time.sleep(0.2)  # a signal may take a moment

    def before(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it reaches the trap first."""

        def passing(*arguments: Any, **keywords: Any) -> Any:
            self.reach(phase)
            return call(*arguments, **keywords)

        return passing


class TrappedWatch:
    """A watch that reports its phases to the trap."""

    owns_group = True

    def __init__(self, watch: Any, trap: Trap) -> None:
        self.watch, self.trap = watch, trap

    @contextmanager
    def collective(self, phase: str) -> Iterator[None]:
        self.trap.reach(phase if phase in PHASES else "exchange")
        with self.watch.collective(phase):
            yield

    def together(self, call: str) -> None:
        self.watch.together(call)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    result: Tensor = (model(torch.randn(8, 20, generator=generator)) - 1).square().mean()
    return result


def enter(rank: int, store: str, plan: Plan, place: Place) -> None:
    """Process body of one worker."""
    place.enter()
    torch.set_num_threads(1)
    trap, report = Trap(plan, rank), {"outcome": "finished", "rank": rank}
    worker = None
    try:
        trap.reach("startup")
        limit = timedelta(seconds=max(10.0, 2 * plan.timeout))
        where = f"tcp://127.0.0.1:{plan.port}" if plan.port else f"file://{store}"
        dist.init_process_group("gloo", where, rank=rank, world_size=plan.world_size, timeout=limit)
        worker = Worker(plan, rank, trap)
        report["from"] = worker.step
        report |= worker.run()
    except Exception as error:
        report |= {"outcome": type(error).__name__, "words": str(error)[:300]}
        report["in"] = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        report["ranks"] = getattr(error, "ranks", [])
    report["at"] = report.get("at", time.monotonic())
    if worker is not None:
        report["step"] = report.get("step", worker.step)
    path = Path(plan.reports) / f"rank-{rank}.json"
    path.with_suffix(".partial").write_text(json.dumps(report))
    path.with_suffix(".partial").rename(path)
    os._exit(0)  # groups whose peers are gone may take their time


class Worker:
    """Trains from the last checkpoint, if there is one, to the last step."""

    def __init__(self, plan: Plan, rank: int, trap: Trap) -> None:
        self.plan, self.rank, self.trap = plan, rank, trap
        self.net = network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=_RATE)
        self.folder = Path(plan.folder)
        self._wrap()
        if (self.folder / "latest.json").exists():
            extra = self.sieve.load(self.folder)
            if plan.mode == "sparsify":
                self.net.load_state_dict(extra["model"])

    def _wrap(self) -> None:
        mode = self.plan.mode
        ways: dict[str, Any] = {"density": 0.1, "timeout": self.plan.timeout}
        self.model: nn.Module = self.net
        self.sieve: Any
        if mode == "sparsify":
            self.model = DistributedDataParallel(self.net)
            self.sieve = gradsieve.sparsify(self.model, "exdyna", **ways)
        else:
            self.sieve = gradsieve.share(self.net, self.optimizer, "exdyna", delay=int(mode != "share"), **ways)
        self._set_traps()

    def _set_traps(self) -> None:
        trap, sieve = self.trap, self.sieve
        if self.plan.mode == "sparsify":
            sieve.reducer.add = trap.before("accumulate", sieve.reducer.add)
            sieve.hook.layout.write_ = trap.before("write", sieve.hook.layout.write_)
        else:
            sieve.replica.apply_ = trap.before("write", sieve.replica.apply_)
            beside = sieve._beside
            if beside is not sieve.world:
                beside.watch = TrappedWatch(beside.watch, trap)
        sieve.world.watch = TrappedWatch(sieve.world.watch, trap)

    @property
    def step(self) -> int:
        return int(self.sieve.reducer.step if self.plan.mode == "sparsify" else self.sieve.replica.steps)

    def run(self) -> dict[str, Any]:
        try:
            self._train(self.rank)
        except gradsieve.PeerLost as lost:
            known = {"at": time.monotonic(), "ranks": lost.ranks, "words": str(lost), "outcome": "lost"}
            known["step"] = self.step
            return known | (self._go_on() if self.plan.regroup else {})
        return {"weights": self._digest()}

    def _train(self, rank: int) -> None:
        while (step := self.step) < self.plan.steps:
            time.sleep(self.plan.pause)
            self.optimizer.zero_grad()
            if self.plan.mode != "sparsify":
                self.trap.reach("accumulate")
            loss_of(self.model, step, rank).backward()
            self.optimizer.step()
            if self.step % self.plan.save_every == 0:
                self.save()

    def save(self) -> None:
        self.trap.reach("checkpoint")
        extra = {"model": self.net.state_dict()} if self.plan.mode == "sparsify" else None
        self.sieve.save(self.folder, extra)

    def _go_on(self) -> dict[str, Any]:
        """Continue without the victim, in a group of the survivors."""
        rank = self.rank - (self.rank > self.plan.victim)
        dist.destroy_process_group()
        store = Path(self.plan.reports) / "store-of-survivors"
        size = self.plan.world_size - 1
        dist.init_process_group(
            "gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
        )
        if self.plan.mode == "sparsify":
            del self.model
            self.model = DistributedDataParallel(self.net)
            found = self.sieve.regroup(ddp_model=self.model)
        else:
            found = self.sieve.regroup()
        self._train(rank)
        self.sieve.check_replicas()
        return {"outcome": "regrouped", "lost_norm": found.lost_norm, "kept_norm": found.kept_norm}

    def _digest(self) -> str:
        if self.plan.mode == "sparsify":
            parts = [parameter.detach() for parameter in self.net.parameters()]
        else:
            self.sieve.finish()
            parts = [self.sieve.replica.weights.shared]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
