"""The version, taken from the VCS tag when the package was built: `[tool.hatch.version]` in pyproject.toml."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradsieve")
except PackageNotFoundError:  # the sources on sys.path, without an installation
    __version__ = "0+unknown"
