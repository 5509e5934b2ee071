"""A framework that is not installed: one sentence names the extra. Nothing of Gradsieve imports one by itself."""

import importlib
import subprocess
import sys

import pytest

FRAMEWORKS = ("accelerate", "lightning", "ray", "transformers")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    monkeypatch.delitem(sys.modules, f"gradsieve.integrations.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"gradsieve.integrations.{name}")
    assert str(caught.value) == f"{name} is not installed: pip install 'gradsieve[integrations]'"


def test_gradsieve_imports_no_framework() -> None:
    code = f"import sys, gradsieve, gradsieve.integrations.common; assert not {set(FRAMEWORKS)} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
