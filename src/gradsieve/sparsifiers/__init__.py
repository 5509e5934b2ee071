"""Every sparsifier by its name. A new one is a file here and a line in `SPARSIFIERS`: see CONTRIBUTING.md."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from gradsieve._check import BadType, one_of
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.accordion import Accordion
from gradsieve.sparsifiers.base import Shape, Sparsifier, Window
from gradsieve.sparsifiers.cltk import CLTk
from gradsieve.sparsifiers.deft import DEFT
from gradsieve.sparsifiers.dense import Dense
from gradsieve.sparsifiers.dgc import DGC
from gradsieve.sparsifiers.exdyna import ExDyna
from gradsieve.sparsifiers.gaussiank import GaussianK
from gradsieve.sparsifiers.gtopk import GTopK
from gradsieve.sparsifiers.hard_threshold import HardThreshold
from gradsieve.sparsifiers.micro import MiCRO
from gradsieve.sparsifiers.oktopk import OkTopk
from gradsieve.sparsifiers.randomk import RandomK
from gradsieve.sparsifiers.sage import SAGE
from gradsieve.sparsifiers.shared_threshold import SharedThreshold
from gradsieve.sparsifiers.sidco import SIDCo
from gradsieve.sparsifiers.topk import TopK

SPARSIFIERS: dict[str, type[Sparsifier[Any]]] = {
    "dense": Dense,
    "topk": TopK,
    "randomk": RandomK,
    "hard_threshold": HardThreshold,
    "gtopk": GTopK,
    "oktopk": OkTopk,
    "cltk": CLTk,
    "sidco": SIDCo,
    "gaussiank": GaussianK,
    "sage": SAGE,
    "dgc": DGC,
    "accordion": Accordion,
    "micro": MiCRO,
    "deft": DEFT,
    "exdyna": ExDyna,
    "shared_threshold": SharedThreshold,
}


def make_sparsifier(name: str, **options: Any) -> Sparsifier[Any]:
    """A sparsifier by name, with its options.

    >>> make_sparsifier("cltk", beta=0.1)
    CLTk(beta=0.1)
    """
    one_of("sparsifier", name, SPARSIFIERS)
    made = SPARSIFIERS[name]
    known = [field.name for field in dataclasses.fields(cast(Any, made))]
    for option in options:
        one_of(f"option of {name}", option, known or ["(none)"])
    return made(**options)


def name_of(sparsifier: Sparsifier[Any]) -> str:
    """The sparsifier's name in `SPARSIFIERS`; for others the name of the class."""
    names = (name for name, known in SPARSIFIERS.items() if type(sparsifier) is known)
    return next(names, type(sparsifier).__name__)


def as_sparsifier(sparsifier: str | Sparsifier[Any], options: Mapping[str, Any]) -> Sparsifier[Any]:
    """A sparsifier as it is, or made from its name and options."""
    if isinstance(sparsifier, str):
        return make_sparsifier(sparsifier, **options)
    if options:
        raise BadType(f"options must come with a sparsifier's name, got {sorted(options)} beside {sparsifier!r}")
    return sparsifier


def options_by_name(sparsifier: Sparsifier[Any]) -> dict[str, Any]:
    """The sparsifier's name and all options, for comparing workers."""
    name = name_of(sparsifier)
    return {"sparsifier": name, **{f"{name}.{option}": value for option, value in sparsifier.options().items()}}


__all__ = [
    "SPARSIFIERS",
    "Selection",
    "Sent",
    "Shape",
    "Sparsifier",
    "Step",
    "Window",
    "as_sparsifier",
    "make_sparsifier",
    "name_of",
    "options_by_name",
]
