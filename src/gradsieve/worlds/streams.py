"""Work beside the current stream of a device. On a CPU torch's own streams do nothing: same code, plain order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """A stream of its own. What it is given waits for what the current stream was given before."""

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self._module = module if hasattr(module, "Stream") else torch.cpu
        self._stream = self._module.Stream(device)

    def mark(self) -> Any:
        """All that the current stream was given so far, as an event."""
        return self._module.current_stream().record_event()

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Within it work is enqueued here, to be done after the mark."""
        self._stream.wait_event(mark)
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream is given from now on waits for all that was enqueued here."""
        self._module.current_stream().wait_stream(self._stream)
