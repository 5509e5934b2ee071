"""Transformers' Trainer: one callback. Residuals are in its checkpoints, the numbers in its logs.

Run it:  torchrun --nproc-per-node 2 examples/trainer_sparsify.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gradsieve.integrations.transformers import GradsieveCallback


def language_model() -> LlamaForCausalLM:
    """A small one; a real script has `from_pretrained` here."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))


def sentences() -> list[dict[str, torch.Tensor]]:
    """Each word is the last one plus a step, which the model has to find."""
    rows = torch.randint(64, (256, 1)) + torch.randint(1, 4, (256, 1)) * torch.arange(16)
    return [{"input_ids": row, "labels": row} for row in rows % 64]


def train(folder: str, steps: int, resume: bool) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=10,
        logging_steps=10,
        learning_rate=1e-2,
        optim="sgd",
        optim_args="momentum=0.9",
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to="tensorboard",
        disable_tqdm=True,
    )
    callback = GradsieveCallback(sparsifier="exdyna", density=0.01)
    trainer = Trainer(language_model(), arguments, train_dataset=sentences(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        print(f"step {callback.sieve.report.step}: sent {callback.sieve.report.density:.1%} of the gradient")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)  # one for all ranks
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folders[0]}/tensorboard"
    train(folders[0], steps=20, resume=False)
    train(folders[0], steps=30, resume=True)
    dist.destroy_process_group()
