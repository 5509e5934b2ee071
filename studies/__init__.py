"""The papers' experiments, and trials of this library's own: run from a clone, not part of what is installed."""

import studies.sparsifiers  # noqa: F401  # adds those that only the studies need
