"""One rank with Accelerate: trains with each way, saves, resumes, and is refused. `with_accelerate.py FOLDER`."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType
from launching import finish, words_of
from safetensors.torch import load_file
from small import dataset, digest, network, weights_digest
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import gradsieve
from gradsieve.integrations import accelerate as integration

ACCUMULATED, CLIP, STEPS, SAVED_AT = 2, 1.0, 12, 5


class Kept(GeneralTracker):
    """A tracker of Accelerate that keeps what it is given."""

    name, requires_logging_directory = "kept", False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    @property
    def tracker(self) -> list[dict[str, Any]]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.logged.append(values)


class Run:
    """A training run, as a user of Accelerate writes it."""

    def __init__(self, way: str, *, seed: int = 0, precision: str = "no") -> None:
        AcceleratorState._reset_state()
        self.tracker = Kept()
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=ACCUMULATED,
            mixed_precision=precision,
            log_with=self.tracker,
        )
        self.accelerator.init_trackers("tests")
        model = network(seed)
        optimizer = (gradsieve.ReplicaAdamW if way == "share" else torch.optim.SGD)(model.parameters(), lr=0.01)
        loader = DataLoader(dataset(), batch_size=16)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if way == "share":
            self.sieve: Any = integration.share(self.accelerator, self.model, self.optimizer, density=0.1, delay=1)
        else:
            self.sieve = integration.sparsify(self.accelerator, self.model, "exdyna", density=0.1)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def batches(self, skipped: int) -> Any:
        yield from self.accelerator.skip_first_batches(self.loader, skipped % len(self.loader))
        while True:
            yield from self.loader

    def train(self, first: int, last: int) -> "Run":
        batches = self.batches(first * ACCUMULATED)
        for _ in range((last - first) * ACCUMULATED):
            inputs, targets = next(batches)
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(inputs).float(), targets)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if self.sieve.report is not None:  # share with delay=1 has none in the first step
                self.accelerator.log({"loss": loss.item(), **self.sieve.report.scalars()})
        return self

    def digest(self) -> str:
        return digest(self.accelerator.unwrap_model(self.model), self.optimizer)

    @property
    def steps(self) -> int:
        return self.sieve.replica.steps if hasattr(self.sieve, "replica") else self.sieve.reducer.step


def refused(run: Run, folder: Path, way: str) -> dict[str, str]:
    accelerator, plain = run.accelerator, network()
    attach = integration.sparsify if way == "sparsify" else integration.share
    optimizer = [] if way == "sparsify" else [torch.optim.SGD(plain.parameters(), lr=0.1)]
    empty = folder / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    found = {
        "not an accelerator": words_of(lambda: attach(None, plain, *optimizer)),
        "not prepared": words_of(lambda: integration.sparsify(accelerator, plain)),
        "static graph": "",
        "without state": words_of(lambda: accelerator.load_state(str(empty))),
    }
    model = torch.nn.parallel.DistributedDataParallel(network(), static_graph=True)
    found["static graph"] = words_of(
        lambda: integration.share(accelerator, model, torch.optim.SGD(model.parameters()))
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    found["fsdp"] = words_of(lambda: attach(accelerator, plain, *optimizer))
    return found


def work(folder: Path, way: str) -> dict[str, Any]:
    run = Run(way).train(0, SAVED_AT)
    run.accelerator.save_state(str(folder / "state"))
    with run.sieve.shared() if way == "share" else nullcontext():
        agreed = {name: value.detach().clone() for name, value in run.model.module.named_parameters()}
    run.train(SAVED_AT, STEPS)
    again = Run(way, seed=1)
    again.accelerator.load_state(str(folder / "state"))
    again.train(SAVED_AT, STEPS)
    saved = load_file(folder / "state" / "model.safetensors")
    half = Run(way, precision="bf16").train(0, 4)
    return {
        "whole": run.digest(),
        "resumed": again.digest(),
        "weights": weights_digest(run.model),
        "losses": run.losses,
        "norms": run.norms,
        "steps": run.steps,
        "logged": run.tracker.logged,
        "scalars": run.sieve.report.scalars(),
        "files": sorted(path.name for path in (folder / "state").rglob("*") if path.is_file()),
        "model has the agreed weights": all(torch.equal(saved[name], agreed[name]) for name in agreed),
        "bf16": {"losses": half.losses, "density": half.sieve.report.density},
        "refused": refused(run, folder, way),
    }


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    finish(FOLDER, {way: work(FOLDER / way, way) for way in ("sparsify", "share")})
