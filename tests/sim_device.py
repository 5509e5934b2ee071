"""A simulated accelerator: tensors on a device `sim`, computed in CPU memory, under the rules of a real one.

- Tensors on the host (but for single numbers) cannot be mixed with those on the device.
- Whatever makes the host wait for a real device is counted: reading a number, operations whose result has a size
  that depends on the data, copies to the host, and copies from it that do not say `non_blocking`. `watch()` lists
  them, each with the function of the library that asked.
- Work is enqueued on streams. Reading what another stream has written, without having waited for it, is an error
  here; on a real device it would be a race that a test rarely sees.

Kernels of this library run as they do on any device without kernels of its own: `ops/reference.py`.
"""

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gradsieve.ops import reference

NAME = "sim"
LIBRARY = Path(reference.__file__).parent.parent
aten = torch.ops.aten

# Their result's size depends on the data, so CUDA's versions wait for it. `bincount` looks for the largest number.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "isin",
    "item",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
COPIES = {"copy_", "_to_copy", "_copy_from"}


class UnsynchronisedRead(RuntimeError):
    """A stream uses what another one has written, without having waited for it."""


@dataclass(frozen=True)
class Wait:
    """One moment at which the host waits for the device."""

    op: str
    where: str  # file:function of the library, from which it was asked for


@dataclass
class Watch:
    """The waits of a part of a program."""

    waits: list[Wait] = field(default_factory=list)

    @property
    def places(self) -> Counter[str]:
        return Counter(wait.where for wait in self.waits)

    def __len__(self) -> int:
        return len(self.waits)


_watches: list[Watch] = []


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """Collects the waits of what is run inside, in all threads."""
    seen = Watch()
    _watches.append(seen)
    try:
        yield seen
    finally:
        _watches.remove(seen)


def _note_wait(op: str) -> None:
    if _watches:
        frame = sys._getframe(1)
        while frame is not None and not _asks(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        where = "outside" if frame is None else _place(frame)
        for seen in _watches:
            seen.waits.append(Wait(op, where))


def _asks(path: str) -> bool:
    """Whether it is a file of the library, but not the one through which all others read."""
    return path.startswith(str(LIBRARY)) and not path.endswith("ops/host.py")


def _place(frame: Any) -> str:
    return f"{Path(frame.f_code.co_filename).relative_to(LIBRARY)}:{frame.f_code.co_qualname}"


class Stream:
    """A queue of work: what it has seen of the others' work is what it waited for."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.seen: dict[Stream, int] = {}
        self.done = 0  # operations enqueued so far

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        for stream, done in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), done)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        _note_wait("Stream.synchronize")

    def enqueue(self) -> int:
        self.done += 1
        return self.done

    def knows(self, stream: "Stream", done: int) -> bool:
        return stream is self or self.seen.get(stream, 0) >= done


class Event:
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.seen = {**stream.seen, stream: stream.done}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _note_wait("Event.synchronize")

    def query(self) -> bool:
        return True


_DEFAULT = Stream()
_current = threading.local()
_written: dict[int, tuple[Stream, int, str]] = {}  # by address of memory: who wrote last, when, and with what


def current_stream(device: Any = None) -> Stream:
    return getattr(_current, "stream", _DEFAULT)


@contextlib.contextmanager
def stream(used: Stream | None) -> Iterator[None]:
    before = current_stream()
    _current.stream = used or before
    try:
        yield
    finally:
        _current.stream = before


class Module:
    """`torch.sim`: what device-independent code asks of a device module."""

    Stream, Event = Stream, Event
    current_stream, stream = staticmethod(current_stream), staticmethod(stream)

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())  # opcheck asks every device
    set_rng_state = staticmethod(lambda state, device=None: None)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: _note_wait("synchronize"))


class SimTensor(Tensor):
    """A tensor on the device; `raw` is the memory behind it."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> "SimTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device="sim:0",
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimTensor({self.raw})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SimTensor, (self.raw.detach(),)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op, kwargs = _op(func), kwargs or {}
        if op.kernel is not None:
            return op.kernel(*args, **kwargs)
        if op.composite:
            return func.decompose(*args, **kwargs)
        if op.name in COPIES:
            return _copied(op.name, args, dict(kwargs))
        return _computed(op, args, kwargs)


@dataclass(frozen=True)
class Op:
    """What is known of an operation: asked once, as schemas are slow."""

    call: Any
    name: str
    kernel: Any  # of this library
    composite: bool  # made of others, which are looked at one by one
    writes: tuple[tuple[int, str], ...]  # arguments that it changes
    view: bool  # its result is memory of an argument


@functools.cache
def _op(func: Any) -> Op:
    schema = func._schema
    space, name = schema.name.split("::")
    writes = [
        (place, each.name)
        for place, each in enumerate(schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    kernel = getattr(reference, name) if space == "gradsieve" else None
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Op(
        func, name, kernel, composite, tuple(writes), any(each.alias_info is not None for each in schema.returns)
    )


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with every tensor of a kind changed, wherever it is."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([_mapped(each, kind, change) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(each, kind, change) for key, each in value.items()}
    return value


def _computed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _tensors((args, kwargs))
    for tensor in given:
        if not isinstance(tensor, SimTensor) and tensor.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu! "
                f"({op.name})"
            )
    on_device = [tensor for tensor in given if isinstance(tensor, SimTensor)]
    if op.name in WAITING or _has_mask(op.name, args):
        _note_wait(op.name)
    _check_streams(op.name, on_device)
    wrappers = {id(tensor.raw): tensor for tensor in on_device}
    raw_args, raw_kwargs = _mapped((args, kwargs), SimTensor, _raw)
    raw_kwargs.pop("device", None)
    result = op.call(*raw_args, **raw_kwargs)
    for place, name in op.writes:
        _note_written(op.name, _tensors(raw_args[place] if place < len(raw_args) else raw_kwargs.get(name)))

    def wrap(raw: Tensor) -> Tensor:
        if id(raw) in wrappers:
            return wrappers[id(raw)]
        if not op.view:
            _note_written(op.name, [raw])
        return SimTensor(raw)

    return _mapped(result, Tensor, wrap)


def _raw(tensor: SimTensor) -> Tensor:
    return tensor.raw


def _copied(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies are the only operations between host and device."""
    if name == "_to_copy":
        source = args[0]
        device = torch.device(kwargs.pop("device", None) or source.device)
        waits = not kwargs.get("non_blocking", False)
        raw = source.raw if isinstance(source, SimTensor) else source
        _check_streams(name, _tensors(args, SimTensor))
        made = aten._to_copy(raw, **{key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs})
        if device.type != NAME:
            _note_wait("copy to the host")
            return made
        if not isinstance(source, SimTensor) and waits:
            _note_wait("copy from the host")
        _note_written(name, [made])
        return SimTensor(made)
    source, target = (args[0], args[1]) if name == "_copy_from" else (args[1], args[0])
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    _check_streams(name, _tensors((source, target), SimTensor))
    raws = [tensor.raw if isinstance(tensor, SimTensor) else tensor for tensor in (source, target)]
    if not isinstance(target, SimTensor):
        _note_wait("copy to the host")
    elif not isinstance(source, SimTensor) and source.dim() and not non_blocking:
        _note_wait("copy from the host")
    raws[1].copy_(raws[0])
    if isinstance(target, SimTensor):
        _note_written(name, [raws[1]])
    return target


def _tensors(value: Any, kind: type = Tensor) -> list[Any]:
    found: list[Any] = []
    _mapped(value, kind, found.append)
    return found


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Indexing with a mask must first find out where it is true."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _memory(raw: Tensor) -> int:
    return 0 if raw.layout != torch.strided else raw.untyped_storage()._cdata


def _check_streams(name: str, tensors: list[Any]) -> None:
    used = current_stream()
    for tensor in tensors:
        writer = _written.get(_memory(tensor.raw))
        if writer is not None and not used.knows(writer[0], writer[1]):
            raise UnsynchronisedRead(f"{name} uses what {writer[2]} has written on another stream, without waiting")


def _note_written(name: str, raws: list[Tensor]) -> None:
    used = current_stream()
    for raw in raws:
        if memory := _memory(raw):
            _written[memory] = (used, used.enqueue(), name)


def _empty_strided(size: Any, stride: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("device", None)
    raw = torch.empty_strided(size, stride, dtype=kwargs.get("dtype") or torch.get_default_dtype())
    _note_written("empty", [raw])
    return SimTensor(raw)


def _empty(size: Any, *arguments: Any, **kwargs: Any) -> Tensor:
    raw = torch.empty(size, dtype=kwargs.get("dtype") or torch.get_default_dtype())
    _note_written("empty", [raw])
    return SimTensor(raw)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _copied("_copy_from", (source, target, non_blocking), {})  # type: ignore[no-any-return]


def _arange(*arguments: Any, **kwargs: Any) -> Tensor:
    kwargs = {key: value for key, value in kwargs.items() if key == "dtype"}
    raw = torch.arange(*arguments, **kwargs)
    _note_written("arange", [raw])
    return SimTensor(raw)


_setup_privateuseone_for_python_backend(NAME, backend_module=Module())
_KERNELS = torch.library.Library("aten", "IMPL")
for _overload in ("arange", "arange.start", "arange.start_step"):
    _KERNELS.impl(_overload, _arange, "PrivateUse1")
_KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
_KERNELS.impl("empty.memory_format", _empty, "PrivateUse1")
_KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")

DEVICE = torch.device("sim", 0)


def to_sim(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the device, which is not counted: tests make their input with it."""
    raw = tensor.detach().clone()
    _note_written("input", [raw])
    return SimTensor(raw)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, which is not counted: tests read results with it."""
    return tensor.raw.detach().clone() if isinstance(tensor, SimTensor) else tensor


def module_to_sim(module: nn.Module) -> nn.Module:
    """The module with its parameters and buffers on the device."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = nn.Parameter(to_sim(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = to_sim(buffer)
    return module
