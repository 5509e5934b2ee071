"""Lightning: the strategy is the one line. Checkpoints have every rank's state, the logger has the numbers.

Run it:  torchrun --nproc-per-node 2 examples/lightning_strategy.py
"""

import tempfile

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradsieve.integrations.lightning import GradsieveStrategy


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(folder: str, epochs: int, resume: str | None) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(1024, 64)
    loader = DataLoader(TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(1)), batch_size=32)
    trainer = lightning.Trainer(
        strategy=GradsieveStrategy(density=0.01),  # mode="weights" averages weights
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        logger=CSVLogger(folder),
        log_every_n_steps=4,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader, ckpt_path=resume)
    report, loss = trainer.strategy.sieve.report, trainer.callback_metrics["loss"]
    if trainer.is_global_zero:
        print(f"step {report.step}: loss {loss:.3f}, sent {report.density:.1%} of the gradient")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)  # one for all ranks
    fit(folders[0], 2, None)
    fit(folders[0], 3, f"{folders[0]}/last.ckpt")
    dist.destroy_process_group()
