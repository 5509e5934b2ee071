"""The version comes from the version control system, by way of the installed package."""

import re
import subprocess
import sys
from importlib.metadata import version

import gradsieve
from helpers import ROOT


def test_the_version_is_that_of_the_installed_package() -> None:
    assert gradsieve.__version__ == version("gradsieve")
    assert re.match(r"\d+\.\d+", gradsieve.__version__)


def test_sources_that_are_not_installed_have_a_version_too() -> None:
    """`-S` hides the installed package's metadata."""
    code = "import runpy; print(runpy.run_path('src/gradsieve/_version.py')['__version__'])"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "0+unknown\n"
