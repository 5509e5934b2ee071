"""A language model: an LSTM that predicts the next character or word."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gradsieve_lab.tasks._text import SHAKESPEARE, STDLIB, WIKITEXT, LanguageModel
from gradsieve_lab.tasks.base import Recipe


@dataclass
class LSTM(LanguageModel):
    """An LSTM that reads each window from a zero state. "tied": embedding and softmax share their weights."""

    DATASETS: ClassVar[tuple[str, ...]] = (STDLIB, WIKITEXT, SHAKESPEARE)
    MODELS: ClassVar[tuple[str, ...]] = ("tied", "untied")

    @property
    def recipe(self) -> Recipe:
        if self.dataset == WIKITEXT:
            return Recipe(lr=2e-3, batch=8, steps=300, optimizer="adam", base_batch=32)
        return Recipe(lr=4e-3, batch=16, steps=400, optimizer="adam", base_batch=64)

    def make_model(self) -> nn.Module:
        with self.seeded():
            return Network(self.vocabulary, self.scaled(200), tied=self.model == "tied")


class Network(nn.Module):
    """Embedding, LSTM, softmax."""

    def __init__(self, vocabulary: int, units: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.lstm = nn.LSTM(units, units, batch_first=True)
        self.out = nn.Linear(units, vocabulary)
        nn.init.normal_(self.embedding.weight, std=units**-0.5)
        nn.init.zeros_(self.out.bias)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.out(states)
        return logits
