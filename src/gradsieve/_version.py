"""The version as it was when the package was built, from the VCS tag: `[tool.hatch.version]` in pyproject.toml."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradsieve")
except PackageNotFoundError:  # the sources on sys.path, without an installation
    __version__ = "0+unknown"
