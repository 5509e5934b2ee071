"""A language model: a small decoder-only transformer that predicts the next character or word.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradsieve_lab.tasks._text import SHAKESPEARE, STDLIB, WIKITEXT, LanguageModel
from gradsieve_lab.tasks.base import Recipe

LAYERS, UNITS, HEADS = 3, 96, 4
FIRST_STD = 0.02  # of embeddings and matrices, as in GPT-2


@dataclass
class GPT(LanguageModel):
    """A decoder without dropout, so that runs can be repeated. Embedding and softmax share their weights."""

    DATASETS: ClassVar[tuple[str, ...]] = (STDLIB, SHAKESPEARE, WIKITEXT)
    MODELS: ClassVar[tuple[str, ...]] = ("decoder",)

    @property
    def recipe(self) -> Recipe:
        if self.dataset == WIKITEXT:
            return Recipe(lr=2e-3, batch=8, steps=300, optimizer="adam", base_batch=32, clip=1.0)
        return Recipe(lr=8e-3, batch=16, steps=500, optimizer="adam", base_batch=64, clip=1.0)

    def make_model(self) -> nn.Module:
        with self.seeded():
            return Decoder(self.vocabulary, self.predictions, self.scaled(UNITS, multiple=HEADS))


class Decoder(nn.Module):
    """Learned positions, pre-norm blocks, a final norm, logits from the embedding."""

    def __init__(self, vocabulary: int, length: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.positions = nn.Parameter(torch.empty(length, units))
        self.blocks = nn.Sequential(*(Block(units) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(units)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() > 1:
                # Each of the 2 * LAYERS residual branches is scaled down, so that their sum does not grow.
                nn.init.normal_(weight, std=FIRST_STD / (2 * LAYERS) ** 0.5 if ".out." in name else FIRST_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.embedding.weight)


class Block(nn.Module):
    """Causal self-attention and a GELU MLP, both pre-norm with a residual connection."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(units), Attention(units))
        self.mlp = nn.Sequential(nn.LayerNorm(units), MLP(units))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.mlp(x)
        return result


class Attention(nn.Module):
    """Multi-head self-attention of each token to itself and those before it."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(units, 3 * units)
        self.out = nn.Linear(units, units)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """An MLP with four times as many hidden units, and GELU."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(units, 4 * units)
        self.out = nn.Linear(4 * units, units)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(nn.functional.gelu(self.hidden(x)))
        return result
