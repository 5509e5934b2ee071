"""Every test with an argument `sparsifier` runs for each entry of SPARSIFIERS, the example's included."""

import os

# On some CPUs the instructions that oneDNN picks for bfloat16 end torch with SIGILL. Before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import pytest
import torch
from hypothesis import settings

from gradsieve import SPARSIFIERS
from helpers import LIBRARY

# No deadline: a test must not fail because the machine is busy. `make test-all` takes the second profile.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")
torch.set_num_threads(1)  # the tests run in several processes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sparsifier" in metafunc.fixturenames:
        metafunc.parametrize("sparsifier", LIBRARY)
    if "exclusive" in metafunc.fixturenames:
        metafunc.parametrize("exclusive", [name for name in LIBRARY if SPARSIFIERS[name].EXCLUSIVE])


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No bytes in a test's name: an archive holds the second it was packed, and workers must collect the same."""
    return argname if isinstance(val, bytes) else None
