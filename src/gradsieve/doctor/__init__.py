"""`gradsieve doctor`: what is installed, whether it works on these devices, and how fast it is.

Run it alone, or on every worker: `torchrun --nproc-per-node 2 -m gradsieve doctor`.
"""

import argparse
import json
import os
import sys
from typing import NoReturn

from gradsieve._check import BadInput, positive
from gradsieve.doctor.examination import examine
from gradsieve.doctor.group import DEVICES, joined
from gradsieve.doctor.page import page

__all__ = ["main"]

SECONDS = 40.0
BACKENDS = ("auto", "gloo", "nccl")


class _Parser(argparse.ArgumentParser):
    """Prints an error once, not once per worker."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"gradsieve doctor: {message}\n")
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gradsieve doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON, nothing else")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"time to measure speeds in (default {SECONDS:g})",
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="where to compute (default: a GPU if any)"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of torch.distributed (default: auto)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Examine this machine; returns the exit code: 0, or 1 if a check failed on any worker."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        seconds = positive("--seconds", options.seconds)
        with joined(options.device, options.backend) as group:
            report = examine(group, seconds)
            first = group.rank == 0
    except BadInput as error:
        parser.error(str(error))
    if first:
        sys.stdout.write(json.dumps(report, indent=2) + "\n" if options.json else page(report))
    return 0 if report["ok"] else 1
