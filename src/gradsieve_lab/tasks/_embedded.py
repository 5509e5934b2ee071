"""Data that needs no download: scikit-learn's digits, the source text of Python's library, and generated sets."""

import sysconfig
from pathlib import Path

import numpy as np

from gradsieve_lab.tasks._files import Images
from gradsieve_lab.tasks._tables import Sentences
from gradsieve_lab.tasks.base import DataError

DIGITS_TRAIN = 1500  # the other 297 are kept for testing
MODULES = """ast bdb calendar codecs contextlib csv dataclasses difflib enum fractions ftplib functools gettext
gzip heapq ipaddress locale mimetypes os pickle platform plistlib pprint random shutil smtplib socket statistics
string textwrap threading tokenize traceback uuid"""


def digits() -> tuple[Images, Images]:
    """Training and test images of 8 x 8 pixels from 0 to 16, shuffled: the source is ordered by writer."""
    import sklearn.datasets  # takes seconds

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = images[order].astype(np.uint8).reshape(-1, 1, 8, 8), labels[order].astype(np.int64)
    return (x[:DIGITS_TRAIN], y[:DIGITS_TRAIN]), (x[DIGITS_TRAIN:], y[DIGITS_TRAIN:])


def library_text() -> str:
    """About 1.4 million characters of Python source, as ASCII; the same for the same version of Python."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for name in sorted(MODULES.split()) if (path := folder / f"{name}.py").is_file()]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    if len(text) < 100_000:
        raise DataError(f"dataset stdlib needs the sources of Python's library in {folder}, got {len(files)} files")
    return text.encode("ascii", "replace").decode()


SUBJECTS = "film story cast music plot ending script hero dialogue camera city train hotel meal garden"
VERBS = "was seemed felt looked became"
NEGATIONS = "not never hardly"
DEGREES = "very quite rather really so"
GOOD = "good great lovely bright funny warm clever fresh moving sharp rich brave calm tender"
BAD = "bad poor ugly dull sad cold stupid stale boring blunt cheap weak loud harsh"


def sentences(count: int, seed: int) -> Sentences:
    """Sentences of two clauses, one of which decides the class: the one after "but", or before "although".

    A clause is good if its adjective is, unless it is negated. So no single word gives the class away, only their
    combination and order.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % 2)
    return [(_sentence(int(label), rng), int(label)) for label in labels]


def _sentence(label: int, rng: np.random.Generator) -> list[str]:
    decides, other = _clause(label, rng), _clause(int(rng.integers(2)), rng)
    return [*other, "but", *decides] if rng.integers(2) else [*decides, "although", *other]


def _clause(label: int, rng: np.random.Generator) -> list[str]:
    negated = int(rng.integers(2))
    words = ["the", _one_of(SUBJECTS, rng), _one_of(VERBS, rng)]
    words += [_one_of(NEGATIONS, rng)] * negated
    words += [_one_of(DEGREES, rng)] * int(rng.integers(2))
    return [*words, _one_of(GOOD if label != negated else BAD, rng)]


def _one_of(words: str, rng: np.random.Generator) -> str:
    known = words.split()
    return known[rng.integers(len(known))]


def ratings(seed: int, users: int = 600, items: int = 800, factors: int = 6) -> np.ndarray:
    """User and item of some 30,000 interactions in random order, from low-rank tastes and item popularity."""
    rng = np.random.default_rng(seed)
    popular = -0.7 * np.log(rng.permutation(items) + 1.0)
    tastes, traits = rng.normal(size=(users, 1, factors)), rng.normal(size=(1, items, factors))
    liking = popular + 1.2 * (tastes * traits).sum(-1) + rng.gumbel(size=(users, items))
    ranked = np.argsort(-liking, axis=1)
    pairs = [(u, i) for u, count in enumerate(rng.integers(20, 81, size=users)) for i in ranked[u, :count]]
    return rng.permutation(np.array(pairs))


def logistic(samples: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in [-1, 1] and classes -1 or 1, similar to gisette: most entries are -1, the lowest value.

    Features depend on a few common factors, and the classes on one of them, through a linear model with some noise.
    """
    rng = np.random.default_rng(seed)
    factors = 12
    hidden = rng.normal(size=(samples, factors)).astype(np.float32)
    loads = rng.normal(size=(factors, features)).astype(np.float32) / np.float32(factors**0.5)
    x = rng.standard_normal((samples, features), dtype=np.float32)
    for k in range(factors):  # not a matrix product, whose last bits depend on the number of threads
        for start in range(0, samples, 500):
            x[start : start + 500] += hidden[start : start + 500, k, None] * loads[k]
    x -= rng.normal(1.2, 0.6, size=features).astype(np.float32)
    np.clip(x * np.float32(0.8), 0, 1, out=x)
    np.multiply(x, 2, out=x)
    x -= 1
    truth = loads[0] + 0.1 * rng.normal(size=features)
    margin = x.astype(np.float64) @ truth
    margin -= np.median(margin)
    noisy = margin + 0.1 * margin.std() * rng.normal(size=samples)
    return x, np.where(noisy > 0, 1, -1)
