"""One rank with Transformers' Trainer: trains with each way, saves, resumes, and is refused."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import finish, words_of
from safetensors.torch import load_file
from small import digest, weights_digest
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradsieve
from gradsieve.integrations.transformers import GradsieveCallback

STEPS, SAVED_AT, ACCUMULATED = 8, 4, 2
WORDS, LENGTH = 48, 12


def language_model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2))


def sentences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(WORDS, (256, 1), generator=generator)
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(LENGTH)) % WORDS]


def made(folder: Path, mode: str, *, seed: int = 0, **more: Any) -> tuple[Trainer, GradsieveCallback]:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "optim": "sgd",
        "use_cpu": True,
        "report_to": "tensorboard",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        **more,
    }
    options: dict[str, Any] = {"density": 0.05}
    replicas = {}
    if mode == "weights":
        options["delay"] = 1
        replicas = {"optimizer_cls_and_kwargs": (gradsieve.ReplicaAdamW, {"lr": 1e-2})}
        given |= {"eval_strategy": "steps", "eval_steps": SAVED_AT, "per_device_eval_batch_size": 4}
    callback = GradsieveCallback(mode=mode, **options)
    data = sentences()
    trainer = Trainer(
        language_model(seed),
        TrainingArguments(**given),
        train_dataset=data,
        eval_dataset=data[:16],
        callbacks=[callback],
        **replicas,
    )
    return trainer, callback


def work(folder: Path, mode: str) -> dict[str, Any]:
    whole, callback = made(folder / "whole", mode)
    whole.train()
    resumed, _ = made(folder / "resumed", mode, seed=1)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{SAVED_AT}"))
    dist.barrier()
    saved = [
        load_file(folder / name / f"checkpoint-{STEPS}" / "model.safetensors") for name in ("whole", "resumed")
    ]
    state = json.loads((folder / "whole" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    checkpoint = folder / "whole" / f"checkpoint-{SAVED_AT}"
    assert callback.sieve is not None
    assert callback.sieve.report is not None
    return {
        "whole": digest(whole.model, whole.optimizer),
        "resumed": digest(resumed.model, resumed.optimizer),
        "weights": weights_digest(whole.model),
        "same model saved": all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0]),
        "history": state["log_history"],
        "report": callback.sieve.report.scalars(),
        "steps": callback.sieve.report.step,
        "files": sorted(path.name for path in (checkpoint / "gradsieve").rglob("*") if path.is_file()),
        "refused": refused(folder, mode, checkpoint),
    }


def refused(folder: Path, mode: str, checkpoint: Path) -> dict[str, str]:
    """A checkpoint without state, and none at all, on each node's own disk."""
    bare = folder / "bare" / checkpoint.name
    if dist.get_rank() == 0:
        bare.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if path.is_file():
                (bare / path.name).write_bytes(path.read_bytes())
    dist.barrier()
    trainer, _ = made(folder / "other", mode)
    return {
        "without state": words_of(lambda: trainer.train(resume_from_checkpoint=str(bare))),
        "mode": words_of(lambda: GradsieveCallback(mode="both")),
    }


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    finish(FOLDER, {mode: work(FOLDER / mode, mode) for mode in ("gradients", "weights")})
