"""Readers of text and tables: language modelling, sentences with a class, ratings, svmlight."""

import io
import zipfile
from pathlib import Path

import numpy as np

from gradsieve_lab.tasks._files import read, read_text
from gradsieve_lab.tasks.base import DataError

Sentences = list[tuple[list[str], int]]  # words and class


def read_words(path: Path) -> list[str]:
    """Words separated by whitespace; each line ends with `<eos>`."""
    words = [word for line in read_text(path).splitlines() for word in (*line.split(), "<eos>")]
    if all(word == "<eos>" for word in words):
        raise DataError(f"{path} must hold words, got none")
    return words


def read_sentences(path: Path) -> Sentences:
    """Read lines of a sentence, a tab and a class 0 or 1, below a header line."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n")[1:], start=2):
        if not line.strip():
            continue
        sentence, _, label = line.rstrip("\r").rpartition("\t")
        if label not in ("0", "1"):
            raise DataError(f"{path} line {number} must be a sentence, a tab and 0 or 1, got {line!r:.80}")
        rows.append((sentence.split(), int(label)))
    if not rows:
        raise DataError(f"{path} must hold a header line and sentences, got no sentence")
    return rows


def read_ratings(path: Path) -> np.ndarray:
    """User and item of each rating, oldest first, each numbered from 0."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            user, item, _, time = line.split("\t")
            rows.append((int(time), int(user), int(item)))
        except ValueError:
            raise DataError(
                f"{path} line {number} must be user, item, rating and time between tabs, got {line!r:.80}"
            ) from None
    if not rows:
        raise DataError(f"{path} must hold ratings, got none")
    rows.sort(key=lambda row: row[0])
    _, users = np.unique([user for _, user, _ in rows], return_inverse=True)
    _, items = np.unique([item for _, _, item in rows], return_inverse=True)
    return np.stack([users, items], axis=1)


def read_svmlight(path: Path, features: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of features, each with a class of -1 or 1. features: their number; 0: as many as occur."""
    import sklearn.datasets  # takes seconds

    try:
        rows, labels = sklearn.datasets.load_svmlight_file(
            io.BytesIO(read(path)), n_features=features or None, dtype=np.float32
        )
    except DataError:
        raise
    except (ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{path} must be an svmlight file, got: {error}") from error
    return rows.toarray(), _two_classes(path, labels)


def read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The training rows and classes of an npz file with the arrays X_train and y_train."""
    try:
        with np.load(io.BytesIO(read(path)), allow_pickle=False) as arrays:
            rows, labels = arrays["X_train"], arrays["y_train"]
    except (ValueError, KeyError, EOFError, OSError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} must be an npz file with X_train and y_train, got: {error}") from error
    if rows.ndim != 2 or rows.shape[:1] != labels.shape:
        raise DataError(f"{path} must hold rows and a class each, got {rows.shape} and {labels.shape}")
    return rows.astype(np.float32), _two_classes(path, labels)


def _two_classes(path: Path, labels: np.ndarray) -> np.ndarray:
    found = np.unique(labels)
    if len(found) != 2:
        raise DataError(f"{path} must hold examples of two classes, got {len(found)}")
    return np.where(labels == found[1], 1, -1)
