"""A framework that is not installed: one sentence names the extra. Nothing of Gradsieve imports one by itself."""

import importlib
import subprocess
import sys

import pytest

FRAMEWORKS = ("accelerate", "lightning", "ray", "transformers")
SLOW_TO_IMPORT = ("numba", "plotly", "scipy", "sklearn")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    monkeypatch.delitem(sys.modules, f"gradsieve.integrations.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"gradsieve.integrations.{name}")
    assert str(caught.value) == f"{name} is not installed: pip install 'gradsieve[integrations]'"


def test_import_and_help_load_no_framework_and_nothing_slow() -> None:
    code = "import sys, gradsieve_lab.cli, gradsieve.integrations.common; "
    code += f"found = {set(FRAMEWORKS + SLOW_TO_IMPORT)} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
