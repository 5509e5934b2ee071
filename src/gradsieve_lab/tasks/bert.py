"""Sentence classification by a small BERT-like transformer encoder.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", NAACL 2019.
"""

import importlib
import importlib.util
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradsieve._check import BadInput
from gradsieve_lab.tasks import _embedded, _files
from gradsieve_lab.tasks._classifier import Classifier
from gradsieve_lab.tasks._tables import Sentences, read_sentences
from gradsieve_lab.tasks.base import Data, Recipe

PADDING, CLS, UNKNOWN = 0, 1, 2  # tokens that are not words
LENGTHS = {"generated": 16, "sst2": 40}  # tokens; longer sentences are cut
GENERATED_TRAIN, GENERATED_TEST = 8000, 1000
LAYERS, UNITS, HEADS = 2, 128, 4
SPLITS = {
    "train": ("sst2/train.tsv.xz", "sst2/train.tsv", "SST-2/train.tsv"),
    "test": ("sst2/glue_dev.tsv.xz", "sst2/glue_dev.tsv", "sst2/dev.tsv", "SST-2/dev.tsv"),
}


@dataclass
class BERT(Classifier):
    """A sentence classifier without dropout, so that runs can be repeated."""

    DATASETS: ClassVar[tuple[str, ...]] = tuple(LENGTHS)
    MODELS: ClassVar[tuple[str, ...]] = ("encoder", "transformers")

    def check_files(self) -> None:
        if self.model == "transformers" and importlib.util.find_spec("transformers") is None:
            raise BadInput("model transformers needs another package: pip install 'gradsieve[transformers]'")
        if self.dataset == "sst2":
            for names in SPLITS.values():
                _files.find(self.data_dir, self.dataset, *names)

    def load(self) -> Data:
        train, test = self._sentences()
        train, test = train[: self.limit or None], test[: self.limit or None]
        counts = Counter(word for words, _ in train for word in words)
        words = sorted(counts, key=lambda word: (-counts[word], word))
        numbers = {word: UNKNOWN + 1 + i for i, word in enumerate(words)}
        self.vocabulary = UNKNOWN + 1 + len(words)
        x, y = self._encode(train, numbers)
        return Data((x, y), self._encode(test, numbers), y)

    def _sentences(self) -> tuple[Sentences, Sentences]:
        if self.dataset == "generated":
            rows = _embedded.sentences(GENERATED_TRAIN + GENERATED_TEST, self.seed)
            return rows[:GENERATED_TRAIN], rows[GENERATED_TRAIN:]
        train, test = (
            read_sentences(_files.find(self.data_dir, self.dataset, *names)) for names in SPLITS.values()
        )
        return train, test

    def _encode(self, rows: Sentences, numbers: dict[str, int]) -> tuple[Tensor, Tensor]:
        length = LENGTHS[self.dataset]
        tokens = torch.full((len(rows), length), PADDING)
        for i, (words, _) in enumerate(rows):
            known = [CLS, *(numbers.get(word, UNKNOWN) for word in words)][:length]
            tokens[i, : len(known)] = torch.tensor(known)
        return tokens, torch.tensor([label for _, label in rows])

    @property
    def recipe(self) -> Recipe:
        if self.dataset == "generated":
            return Recipe(lr=1e-3, batch=16, steps=400, optimizer="adam", base_batch=64, warm_up=0.1)
        return Recipe(lr=5e-4, batch=16, steps=800, optimizer="adam", base_batch=64, warm_up=0.1)

    def make_model(self) -> nn.Module:
        make = Encoder if self.model == "encoder" else Transformers
        with self.seeded():
            return make(self.vocabulary, LENGTHS[self.dataset], self.scaled(UNITS, multiple=HEADS))


class Encoder(nn.Module):
    """Learned positions, normalisation before each part of a layer, a class from the first token."""

    def __init__(self, vocabulary: int, length: int, units: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, units)
        self.positions = nn.Parameter(torch.empty(length, units))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(units, HEADS, 4 * units, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(units)
        self.out = nn.Linear(units, 2)
        for weight in (self.words.weight, self.positions):
            nn.init.normal_(weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x, absent = self.words(tokens) + self.positions, tokens == PADDING
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=absent)
        logits: Tensor = self.out(self.norm(x[:, 0]))
        return logits


class Transformers(nn.Module):
    """`BertForSequenceClassification` of the package transformers, with random weights; downloads nothing."""

    def __init__(self, vocabulary: int, length: int, units: int) -> None:
        super().__init__()
        package = importlib.import_module("transformers")
        config = package.BertConfig(
            vocab_size=vocabulary,
            hidden_size=units,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * units,
            max_position_embeddings=length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,
            pad_token_id=PADDING,
            num_labels=2,
        )
        self.bert = package.BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=tokens, attention_mask=(tokens != PADDING).long()).logits
        return logits
