"""One rank with Lightning's Trainer and with Fabric: trains with each way, saves, resumes, and is refused."""

import logging
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from launching import finish, words_of
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from small import dataset, digest, network, weights_digest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import gradsieve
from gradsieve.integrations import lightning as integration

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EPOCHS, STEPS, SAVED_AT = 3, 12, 5  # of the Trainer; of Fabric
OPTIONS: dict[str, dict[str, Any]] = {
    "gradients": {"sparsifier": "exdyna", "density": 0.1},
    "weights": {"density": 0.1, "delay": 1},
}


def optimizer_for(mode: str, model: nn.Module) -> torch.optim.Optimizer:
    kind = gradsieve.ReplicaAdamW if mode == "weights" else torch.optim.SGD
    return kind(model.parameters(), lr=0.02)


class Classifier(lightning.LightningModule):
    def __init__(self, mode: str, seed: int) -> None:
        super().__init__()
        self.mode, self.net = mode, network(seed)
        self.validated: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        torch.manual_seed(1000 * self.global_rank + self.trainer.global_step)  # Lightning keeps no dropout state
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.validated.append(float(sum(parameter.double().sum() for parameter in self.net.parameters())))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self.mode, self)


def fitted(folder: Path, mode: str, seed: int = 0, **fit: Any) -> tuple[lightning.Trainer, Classifier]:
    model = Classifier(mode, seed)
    trainer = lightning.Trainer(
        strategy=integration.GradsieveStrategy(mode=mode, **OPTIONS[mode]),
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        limit_train_batches=8,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="log", version=0),
        callbacks=[
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=2, monitor="epoch", mode="max", save_last=True)
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset(), batch_size=16), DataLoader(dataset(), batch_size=16), **fit)
    return trainer, model


def with_trainer(folder: Path, mode: str) -> dict[str, Any]:
    trainer, model = fitted(folder / "whole", mode)
    strategy = trainer.strategy
    assert isinstance(strategy, integration.GradsieveStrategy)
    sieve = strategy.sieve
    assert sieve is not None
    assert sieve.report is not None
    checkpoint = folder / "whole" / "epoch=1.ckpt"
    resumed, again = fitted(folder / "resumed", mode, seed=1, ckpt_path=str(checkpoint))
    saved = [
        torch.load(folder / name / "last.ckpt", weights_only=True)["state_dict"] for name in ("whole", "resumed")
    ]
    bare = folder / "bare" / "epoch=1.ckpt"
    if dist.get_rank() == 0:
        bare.parent.mkdir()
        bare.write_bytes(checkpoint.read_bytes())
    dist.barrier()
    return {
        "whole": digest(model, model.optimizers().optimizer),
        "resumed": digest(again, again.optimizers().optimizer),
        "weights": weights_digest(model),
        "same model saved": all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0]),
        "validated": model.validated,
        "steps": trainer.global_step,
        "report": sieve.report.scalars(),
        "log": (folder / "whole" / "log" / "version_0" / "metrics.csv").read_text() if dist.get_rank() == 0 else "",
        "folders": sorted(path.name for path in (folder / "whole").iterdir() if path.is_dir()),
        "refused": {
            "mode": words_of(lambda: integration.GradsieveStrategy(mode="both")),
            "without state": words_of(lambda: fitted(folder / "other", mode, ckpt_path=str(bare))),
            "elsewhere": words_of(lambda: resumed.strategy.save_checkpoint({}, "memory://gone")),
        },
    }


class FabricRun:
    def __init__(self, folder: Path, mode: str, seed: int = 0) -> None:
        self.log = FabricLogger(folder, name=f"seed-{seed}", version=0)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", loggers=self.log)
        self.fabric.launch()
        model = network(seed)
        self.model, self.optimizer = self.fabric.setup(model, optimizer_for(mode, model))
        if mode == "weights":
            self.sieve: Any = integration.share(self.fabric, self.model, self.optimizer, **OPTIONS[mode])
        else:
            self.sieve = integration.sparsify(self.fabric, self.model, **OPTIONS[mode])
        self.loader = self.fabric.setup_dataloaders(DataLoader(dataset(), batch_size=16))

    def train(self, first: int, last: int) -> "FabricRun":
        batches = list(self.loader)
        for step in range(first, last):
            torch.manual_seed(step * 2 + self.fabric.global_rank)
            inputs, targets = batches[step % len(batches)]
            with self.fabric.no_backward_sync(self.model):  # half of the batch without an exchange
                self.fabric.backward(cross_entropy(self.model(inputs[:8]), targets[:8]))
            self.fabric.backward(cross_entropy(self.model(inputs[8:]), targets[8:]))
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.sieve.report is not None:  # share with delay=1 has none in the first step
                self.fabric.log_dict(self.sieve.report.scalars(), step=step)
        return self

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def digest(self) -> str:
        return digest(self.model, self.optimizer)


def with_fabric(folder: Path, mode: str) -> dict[str, Any]:
    run = FabricRun(folder, mode).train(0, SAVED_AT)
    run.fabric.save(folder / "state.ckpt", run.state)
    agreed = weights_digest(run.model)
    if mode == "weights":
        with run.sieve.shared():
            agreed = weights_digest(run.model)
    run.train(SAVED_AT, STEPS)
    run.log.save()
    again = FabricRun(folder, mode, seed=1)
    again.fabric.load(folder / "state.ckpt", again.state)
    again.train(SAVED_AT, STEPS)
    saved = network()
    saved.load_state_dict(torch.load(folder / "state.ckpt", weights_only=True)["model"])
    plain = network()
    return {
        "whole": run.digest(),
        "resumed": again.digest(),
        "weights": weights_digest(run.model),
        "agreed": agreed,
        "saved": weights_digest(saved),
        "report": run.sieve.report.scalars(),
        "log": (folder / "seed-0" / "version_0" / "metrics.csv").read_text() if dist.get_rank() == 0 else "",
        "refused": {
            "not set up": words_of(lambda: integration.sparsify(run.fabric, plain)),
            "not a fabric": words_of(lambda: integration.share(None, plain, run.optimizer)),
        },
    }


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    found = {f"trainer {mode}": with_trainer(FOLDER / "trainer" / mode, mode) for mode in OPTIONS}
    found |= {f"fabric {mode}": with_fabric(FOLDER / "fabric" / mode, mode) for mode in OPTIONS}
    finish(FOLDER, found)
