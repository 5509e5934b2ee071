"""A background thread with a stream of its own, which runs one task at a time."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from gradsieve.worlds.streams import SideStream

T = TypeVar("T")

_PATIENCE = 5.0  # seconds for which the end of a process waits for a task whose peers may be gone


class Task(Generic[T]):
    """A running task. `result` waits for it, and raises its error."""

    def __init__(self, work: Callable[[], T], stream: SideStream) -> None:
        self._work, self._stream = work, stream
        self._before = stream.mark()  # the task may use what is enqueued up to here
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._stream.behind(self._before):
                self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for at most this many seconds; returns whether the task is done."""
        return self._done.wait(seconds)

    def result(self) -> T:
        self._done.wait()
        self._stream.join()
        if self._error is not None:
            raise self._error
        return self._result


class Background(Generic[T]):
    """A thread that runs tasks in order. It ends with its owner, and does not keep a process alive for long."""

    def __init__(self, name: str, stream: SideStream | None = None) -> None:
        self._stream = stream or SideStream(torch.device("cpu"))
        self._tasks: queue.SimpleQueue[Task[T] | None] = queue.SimpleQueue()
        self._last: list[Task[T]] = []
        threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True).start()
        self._end = weakref.finalize(self, _end, self._tasks, self._last)
        self._end.atexit = False  # done by `atexit` itself, which runs while threads still may
        atexit.register(self._end)

    def submit(self, work: Callable[[], T]) -> Task[T]:
        task = Task(work, self._stream)
        self._last[:] = [task]
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End the thread, after the last task."""
        self._end()
        atexit.unregister(self._end)


def _work(tasks: "queue.SimpleQueue[Task[T] | None]") -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # an idle thread keeps nothing alive


def _end(tasks: "queue.SimpleQueue[Task[T] | None]", last: list[Task[T]]) -> None:
    tasks.put(None)
    for task in last:
        task.wait(_PATIENCE)
