"""State is a type: frozen dataclasses whose fields say how they are shared between workers and how they scale.

    @dataclass(frozen=True)
    class Example(State):
        threshold: float = shared(0.0, power=1)   # the same on all workers; proportional to gradients
        velocity: Tensor = local(power=1)         # each worker's own
        bounds: tuple[int, ...] = shared(per_worker=True)   # depends on the number of workers

An update returns another state, so a step that is skipped leaves no trace. States may hold other states.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from gradsieve._check import BadInput


@dataclass(frozen=True)
class Mark:
    """How a field is shared and scaled."""

    shared: bool  # the same on all workers
    power: int  # by which it scales with the gradient: 1 for a magnitude, 2 for an energy
    per_worker: bool  # depends on the number of workers, and is reinitialized when that changes


S = TypeVar("S", bound="State")


def shared(default: Any = MISSING, *, power: int = 0, per_worker: bool = False) -> Any:
    """A field that is the same on all workers."""
    return field(default=default, metadata={"mark": Mark(True, power, per_worker)})


def local(default: Any = MISSING, *, power: int = 0, per_worker: bool = False) -> Any:
    """A field that differs between workers."""
    return field(default=default, metadata={"mark": Mark(False, power, per_worker)})


@dataclass(frozen=True)
class State:
    """No state at all, and the base of all others."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and copies of tensors, by name."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    def restored(self: S, values: Mapping[str, Any], *, resized: bool = False) -> S:
        """The state that `to_dict` was called on; its types and shapes must be those of this fresh one.

        resized: it comes from another number of workers; fields that depend on that keep their initial value.
        """
        names = [each.name for each in fields(self)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            got = sorted(map(str, values)) if isinstance(values, Mapping) else repr(values)
            raise BadInput(f"state must have the keys {sorted(names)}, got {got}")
        hints = get_type_hints(type(self))
        found = {}
        for each in fields(self):
            mark: Mark | None = each.metadata.get("mark")
            if not (resized and mark is not None and mark.per_worker):
                own = getattr(self, each.name)
                found[each.name] = _like(each.name, own, hints[each.name], values[each.name], resized)
        return replace(self, **found)

    def rescaled(self: S, factor: float) -> S:
        """The state of a run whose gradients were `factor` times as large."""
        found: dict[str, Any] = {}
        for each in fields(self):
            value, mark = getattr(self, each.name), each.metadata.get("mark")
            if isinstance(value, State):
                found[each.name] = value.rescaled(factor)
            elif mark is not None and mark.power and value is not None:
                found[each.name] = value * factor**mark.power
        return replace(self, **found)

    def with_shared(self: S, values: Mapping[str, Any]) -> S:
        """This state, with the shared fields of another worker's: see `shared_values`."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            own = getattr(self, name)
            if isinstance(own, State):
                found[name] = own.with_shared(value)
            elif isinstance(own, Tensor):
                found[name] = own.new_tensor(value)
            else:
                found[name] = tuple(value) if isinstance(own, tuple) else value
        return replace(self, **found)

    def fingerprint(self) -> str:
        """A short hash of the shared fields, for comparing workers."""
        text = json.dumps(self.shared_values(), default=lambda tensor: tensor.tolist(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def shared_values(self) -> dict[str, Any]:
        """The fields that are the same on all workers."""
        found = {}
        for each in fields(self):
            value, mark = getattr(self, each.name), each.metadata.get("mark")
            if isinstance(value, State):
                found[each.name] = value.shared_values()
            elif mark is not None and mark.shared:
                found[each.name] = value
        return found


@dataclass(frozen=True)
class States:
    """The states of sparsifier, density and feedback."""

    sparsifier: State
    density: State
    feedback: State

    def rescaled(self, factor: float) -> "States":
        return States(*(state.rescaled(factor) for state in vars(self).values()))

    def fingerprints(self) -> dict[str, str]:
        """Hashes of what must be the same on all workers."""
        return {
            "the sparsifier's state": self.sparsifier.fingerprint(),
            "the density's state": self.density.fingerprint(),
        }

    def shared_values(self) -> dict[str, Any]:
        return {name: state.shared_values() for name, state in vars(self).items()}

    def with_shared(self, values: Mapping[str, Any]) -> "States":
        return States(*(state.with_shared(values[name]) for name, state in vars(self).items()))

    def to_dict(self) -> dict[str, Any]:
        return {name: state.to_dict() for name, state in vars(self).items()}

    def restored(self, values: Mapping[str, Any], *, resized: bool) -> "States":
        if not isinstance(values, Mapping) or set(values) != set(vars(self)):
            raise BadInput(f"state must have the parts {', '.join(vars(self))}, got {str(values)[:100]}")
        return States(*(own.restored(values[name], resized=resized) for name, own in vars(self).items()))


def check_identity(owner: str, state: Mapping[str, Any], own: Mapping[str, Any], *further: str) -> None:
    """Check that a state dict fits the object that loads it."""
    current = own["version"]
    version = state.get("version", current)
    if isinstance(version, Tensor) or version != current:  # first, as other versions have other keys
        older = isinstance(version, int) and version < current
        words = ", of an older Gradsieve: load it with the one that saved it" if older else ""
        raise BadInput(f"state must have this {owner}'s version, {current}, got {version}{words}")
    if set(state) != set(own):
        raise BadInput(f"state must have the keys {sorted(own)}, got {sorted(map(str, state))}")
    for name in ("sparsifier", "options", "rank", "world_size", *further):
        if isinstance(state[name], Tensor) or state[name] != own[name]:
            raise BadInput(f"state must have this {owner}'s {name}, {own[name]}, got {state[name]}")


def _plain(value: Any) -> Any:
    if isinstance(value, State):
        return value.to_dict()
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, tuple) else value


def _like(name: str, own: Any, hint: Any, value: Any, resized: bool) -> Any:
    """`value`, checked and converted to the type of the field."""
    if isinstance(own, State):
        return own.restored(value, resized=resized)
    if isinstance(own, Tensor):
        if not isinstance(value, Tensor) or (value.dtype, value.shape) != (own.dtype, own.shape):
            raise BadInput(f"{name} must be {_words(own)}, got {_words(value)}")
        return value.detach().clone()
    if isinstance(own, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(own):
            raise BadInput(f"{name} must be {len(own)} numbers, got {value!r}")
        return tuple(value)
    if not isinstance(value, hint):
        raise BadInput(f"{name} must be {getattr(hint, '__name__', hint)}, got {value!r}")
    return value


def _words(value: Any) -> str:
    return f"a {value.dtype} tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
