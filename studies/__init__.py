"""The papers' experiments and this library's own trials: run from a clone, not part of the installed packages."""

import studies.sparsifiers  # noqa: F401  # registers sparsifiers that only the studies need
