"""A side stream of a device. On a CPU torch's streams do nothing: the same code runs in plain order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """A stream beside the current one, with marks to order the work of the two."""

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self._module = module if hasattr(module, "Stream") else torch.cpu
        self._stream = self._module.Stream(device)

    def mark(self) -> Any:
        """An event after all work that is enqueued on the current stream."""
        return self._module.current_stream().record_event()

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """A context in which work is enqueued on this stream, after the mark."""
        self._stream.wait_event(mark)
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all work enqueued on this one."""
        self._module.current_stream().wait_stream(self._stream)
