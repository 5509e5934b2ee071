"""Sparsifiers that only the studies need; importing this package adds them to `SPARSIFIERS`."""

from typing import Any

from gradsieve import SPARSIFIERS, Sparsifier
from studies.sparsifiers.oracle import Oracle
from studies.sparsifiers.released import ReleasedExDyna, ReleasedMiCRO
from studies.sparsifiers.variants import FixedExDyna, StillExDyna

STUDIED: dict[str, type[Sparsifier[Any]]] = {
    "oracle": Oracle,
    "released_exdyna": ReleasedExDyna,
    "released_micro": ReleasedMiCRO,
    "still_exdyna": StillExDyna,
    "fixed_exdyna": FixedExDyna,
}
SPARSIFIERS.update(STUDIED)
