"""Kernels for GPUs are interpreted in a process of their own: see test_gpu_interpreted.py."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["gpu_laws.py"]
