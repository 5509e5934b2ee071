"""Readers of the standard formats, on tiny files, and what they say about damaged ones."""

import gzip
import io
import lzma
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradsieve_lab.tasks import DataError
from gradsieve_lab.tasks._files import find, read, read_cifar, read_idx, read_mnist, read_text
from gradsieve_lab.tasks._tables import read_arrays, read_ratings, read_sentences, read_svmlight, read_words

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def npz(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def cifar(labels: Any = (3, 7), protocol: int = 2) -> bytes:
    data = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
    return pickle.dumps({b"data": data, b"labels": list(labels)}, protocol=protocol)


def mnist_labels(path: Path) -> Any:
    return read_mnist(put(path.parent, "images", idx(IMAGES)), path)


def put(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def test_find(tmp_path: Path) -> None:
    put(tmp_path, "b", b"")
    assert find(tmp_path, "x", "a", "b") == tmp_path / "b"
    with pytest.raises(DataError, match=rf"^c or d must be in the data folder {tmp_path}, got no such file$"):
        find(tmp_path, "x", "c", "d")
    with pytest.raises(
        DataError, match=r"^dataset x needs a data folder: name it with --data-dir or GRADSIEVE_DATA$"
    ):
        find(None, "x", "a")


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), ("", bytes)])
def test_packed(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    assert read(put(tmp_path, f"file{suffix}", pack(b"content"))) == b"content"
    assert (read_idx(put(tmp_path, f"idx{suffix}", pack(idx(IMAGES))), 3) == IMAGES).all()


@pytest.mark.parametrize("name", ["a.gz", "a.xz", "a.bz2"])
@pytest.mark.parametrize(
    "content",
    [b"no archive", gzip.compress(b"x" * 99)[:-9], lzma.compress(b"x" * 99)[:-9]],
    ids=["text", "gzip", "xz"],
)
def test_damaged_archives(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(DataError, match=f"{name} must be a complete, readable file, got: "):
        read(put(tmp_path, name, content))


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a complete, readable file"):
        read(tmp_path)
    with pytest.raises(DataError, match="must be UTF-8 text"):
        read_text(put(tmp_path, "text", b"\xff\xff"))


def test_mnist(tmp_path: Path) -> None:
    paths = put(tmp_path, "i", idx(IMAGES)), put(tmp_path, "l", idx(np.array([0, 9], dtype=np.uint8)))
    images, labels = read_mnist(*paths)
    assert images.shape == (2, 1, 3, 4)
    assert labels.tolist() == [0, 9]


@pytest.mark.parametrize("protocol", range(6))
def test_cifar(tmp_path: Path, protocol: int) -> None:
    images, labels = read_cifar(put(tmp_path, "data_batch_1", cifar(protocol=protocol)))
    assert images.shape == (2, 3, 32, 32)
    assert images[0, 1, 0, 0] == 1024 % 256
    assert labels.tolist() == [3, 7]


def test_cifar_calls_no_functions(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "attacked"),)

    path = put(tmp_path, "data_batch_1", pickle.dumps({b"data": Attack(), b"labels": []}))
    with pytest.raises(DataError, match=r"got: posix.mkdir, which a pickle of arrays does not need$"):
        read_cifar(path)
    assert not (tmp_path / "attacked").exists()


def test_words(tmp_path: Path) -> None:
    assert read_words(put(tmp_path, "t", b" \n a b \n")) == ["<eos>", "a", "b", "<eos>"]


def test_sentences(tmp_path: Path) -> None:
    rows = read_sentences(put(tmp_path, "t", b'sentence\tlabel\na "b \t1\r\nc\t0\n'))
    assert rows == [(["a", '"b'], 1), (["c"], 0)]


def test_ratings_by_time(tmp_path: Path) -> None:
    assert read_ratings(put(tmp_path, "t", b"7\t30\t5\t99\n3\t10\t1\t98\n")).tolist() == [[0, 0], [1, 1]]


def test_svmlight(tmp_path: Path) -> None:
    rows, classes = read_svmlight(put(tmp_path, "t", b"2 1:0.5 3:1\n1\n1 2:2\n"), features=4)
    assert rows.tolist() == [[0.5, 0, 1, 0], [0, 0, 0, 0], [0, 2, 0, 0]]
    assert classes.tolist() == [1, -1, -1]


def test_arrays(tmp_path: Path) -> None:
    rows, classes = read_arrays(put(tmp_path, "a.npz", npz(X_train=np.eye(2), y_train=np.array([0, 1]))))
    assert rows.tolist() == np.eye(2).tolist()
    assert classes.tolist() == [-1, 1]


DAMAGED: list[tuple[Callable[[Path], Any], bytes, str]] = [
    (lambda path: read_idx(path, 3), b"", "must be an idx file of 3 dimensions, got header ''"),
    (lambda path: read_idx(path, 3), idx(IMAGES[0]), "must be an idx file of 3 dimensions, got header '00000802'"),
    (lambda path: read_idx(path, 3), idx(IMAGES)[:-1], r"must hold as much as its header \(2, 3, 4\) says, got 23"),
    (lambda path: read_idx(path, 1), idx(IMAGES[0, 0])[:4] + b"\xff" * 4, "must hold as much as its header"),
    (mnist_labels, idx(np.zeros(3, np.uint8)), "must hold one label for each of 2 images, got 3"),
    (mnist_labels, idx(np.full(2, 10, np.uint8)), "must hold labels below 10, got 10"),
    (read_cifar, b"", "must be a batch of CIFAR-10, python version, got: "),
    (read_cifar, cifar()[:-100], "must be a batch of CIFAR-10, python version, got: "),
    (read_cifar, pickle.dumps([1]), "must be a batch of CIFAR-10, python version, got: "),
    (read_cifar, cifar(labels=[1]), r"must hold rows of 3072 bytes and a label each, got \(2, 3072\) and \(1,\)"),
    (read_cifar, cifar(labels=[0, 10]), "must hold labels from 0 to 9, got 0 to 10"),
    (read_words, b"\n\n", "must hold words, got none"),
    (read_sentences, b"", "must hold a header line and sentences, got no sentence"),
    (read_sentences, b"sentence\tlabel\na b\n", "line 2 must be a sentence, a tab and 0 or 1, got 'a b'"),
    (read_ratings, b"", "must hold ratings, got none"),
    (read_ratings, b"1\t2\t3\t4\n1\t2\t3\n", "line 2 must be user, item, rating and time between tabs, got"),
    (read_svmlight, b"", "must "),
    (read_svmlight, b"1 1:x\n", "must be an svmlight file, got: "),
    (read_svmlight, b"1 1:1\n2 1:1\n3 1:1\n", "must hold examples of two classes, got 3"),
    (read_arrays, b"", "must be an npz file with X_train and y_train, got: "),
    (read_arrays, npz(X_train=np.eye(2)), "must be an npz file with X_train and y_train, got: "),
    (read_arrays, npz(X_train=np.eye(2), y_train=np.eye(2)), "must hold rows and a class each, got"),
    (read_arrays, npz(X_train=np.eye(2), y_train=np.array([None, 1])), "must be an npz file with"),
]


@pytest.mark.parametrize(("reader", "content", "message"), DAMAGED)
def test_damaged(tmp_path: Path, reader: Callable[[Path], Any], content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/damaged {message}"):
        reader(put(tmp_path, "damaged", content))
