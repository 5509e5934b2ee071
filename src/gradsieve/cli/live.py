"""The live line of a run: step, loss, metric, density, bytes, time."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gradsieve.experiments.running import Listen
from gradsieve.experiments.training import Progress
from gradsieve.report.table import size
from gradsieve.tasks.base import Metric

COLUMNS = 80


def show(progress: Progress, metric: Metric) -> str:
    """One line of at most 80 columns."""
    value = "" if progress.metric is None else f"  {metric.name} {metric.show(progress.metric)}"
    left = f"{progress.step}/{progress.steps}  loss {progress.loss:.3g}{value}"
    right = f"density {progress.density:.2g}  {size(progress.bytes)}  {clock(progress.seconds)}"
    room = COLUMNS - len(left) - len(right) - 4
    return f"{progress.label[:room]}  {left}  {right}"


def clock(seconds: float) -> str:
    """
    >>> clock(75.2)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def live(metric: Metric, *, hidden: bool) -> Iterator[Listen]:
    """What listens to a run and shows it: one line that changes on a terminal, a new one an evaluation in a log."""
    screen = Console(stderr=True)
    if hidden:
        yield lambda progress: None
    elif screen.is_terminal:
        with Live(console=screen, transient=True, auto_refresh=False) as display:
            yield lambda progress: display.update(Text(show(progress, metric)), refresh=True)
    else:
        last: list[float | None] = [None]

        def log(progress: Progress) -> None:
            if progress.metric != last[0] or progress.step == progress.steps:
                last[0] = progress.metric
                screen.print(show(progress, metric), highlight=False, soft_wrap=True)

        yield log
