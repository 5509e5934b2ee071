"""Language modelling: windows of text, the loss of the next token, and perplexity."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradsieve_lab.tasks import _embedded, _files
from gradsieve_lab.tasks._tables import read_words
from gradsieve_lab.tasks.base import Batch, Data, DataError, Metric, Task

WORDS, CHARACTERS = 35, 64  # predictions per window
TEST_WINDOWS = 256  # spread evenly over the test text
AT_ONCE = 16  # test windows: the logits of more, over 33,278 words, take gigabytes
PIECES = 10  # of the training text, whose numbers are the labels for skewed shards
STDLIB, SHAKESPEARE, WIKITEXT = "stdlib", "tiny_shakespeare", "wikitext-2"


@dataclass
class LanguageModel(Task):
    """A task that predicts the next character, or the next word of WikiText-2, in windows of text.

    `load()` sets `vocabulary`, the number of tokens the model must know.
    """

    METRIC: ClassVar[Metric] = Metric("perplexity", higher_is_better=False)

    def check_files(self) -> None:
        self._paths()

    def _paths(self) -> list[Path]:
        if self.dataset == WIKITEXT:
            return [
                _files.find(
                    self.data_dir,
                    self.dataset,
                    *(f"{WIKITEXT}/{name}" for name in (f"{split}.txt.xz", f"{split}.txt", f"wiki.{split}.tokens")),
                )
                for split in ("train", "test")
            ]
        if self.dataset == SHAKESPEARE:
            return [_files.find(self.data_dir, self.dataset, "tiny_shakespeare/input.txt")]
        return []

    def load(self) -> Data:
        train, test = self._tokens()
        known = [token for token, _ in sorted(Counter(train).items(), key=lambda item: (-item[1], item[0]))]
        numbers = {token: i for i, token in enumerate(known)}
        unknown = numbers.get("<unk>", len(known))
        self.vocabulary = max(len(known), unknown + 1)
        windows, held_out = (
            _windows(torch.tensor([numbers.get(token, unknown) for token in tokens]), self.predictions)
            for tokens in (train, test)
        )
        if not len(windows) or not len(held_out):
            raise DataError(
                f"dataset {self.dataset} must hold windows of {self.predictions + 1} tokens, got too few"
            )
        windows = windows[: self.limit or None]
        many = min(len(held_out), TEST_WINDOWS, self.limit or TEST_WINDOWS)
        spread = torch.arange(many) * len(held_out) // many
        return Data((windows,), (held_out[spread],), torch.arange(len(windows)) * PIECES // len(windows))

    def _tokens(self) -> tuple[list[str], list[str]]:
        if self.dataset == WIKITEXT:
            train, test = map(read_words, self._paths())
            return train, test
        text = _files.read_text(self._paths()[0]) if self._paths() else _embedded.library_text()
        split = len(text) * 9 // 10
        return list(text[:split]), list(text[split:])

    @property
    def predictions(self) -> int:
        """Predictions per window: the context length of the model."""
        return WORDS if self.dataset == WIKITEXT else CHARACTERS

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        (windows,) = batch
        return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, int]:
        (windows,) = batch
        total = sum(float(self.loss(model, (part,)).detach()) * len(part) for part in windows.split(AT_ONCE))
        return total * self.predictions, len(windows) * self.predictions

    def value(self, mean: float, model: nn.Module) -> float:
        return float(torch.tensor(mean, dtype=torch.float64).exp())


def _windows(tokens: Tensor, predictions: int) -> Tensor:
    """Consecutive windows; each begins with the last token of the one before."""
    count = max(0, len(tokens) - 1) // predictions
    return tokens[: count * predictions + 1].unfold(0, predictions + 1, predictions) if count else tokens[:0]
