"""The live line of a run: step, loss, metric, density, bytes, time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gradsieve._check import BadInput
from gradsieve_lab.cli.common import refuse
from gradsieve_lab.launch import WorkerFailed
from gradsieve_lab.report.table import size
from gradsieve_lab.runs.running import Listen, Stop
from gradsieve_lab.runs.training import Progress, Starting
from gradsieve_lab.tasks.base import Metric

COLUMNS, LOGGED = 80, 1000  # of a live line, which must not wrap, and of a line in a log
_SHORTEST_LABEL = 8


def show(progress: Progress, metric: Metric, columns: int = COLUMNS) -> str:
    """One line: if it has more columns, a long label is cut, then words are left out."""
    value = "" if progress.metric is None else f"  {metric.name} {metric.show(progress.metric)}"
    steps, loss = f"{progress.step}/{progress.steps}", f"{progress.loss:.3g}"
    rest = f"{progress.density:.2g}  {size(progress.bytes)}  {clock(progress.seconds)}"
    line = f"{steps}  loss {loss}{value}  density {rest}"
    room = columns - len(line) - 2
    if room < _SHORTEST_LABEL:
        line = f"{steps}  {loss}{value}  {rest}"
        room = columns - len(line) - 2
    return f"{progress.label[: max(room, 0)]}  {line}"[:columns]


def clock(seconds: float) -> str:
    """
    >>> clock(75.2)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def watched(metric: Metric, stop: Stop, *, hidden: bool, brief: bool = False) -> Iterator[Listen]:
    """Show a live line; report bad input in one sentence, a worker's failure with its traceback."""
    with live(metric, hidden=hidden, brief=brief) as listen, stop.watching(), clear_failures():
        yield listen


@contextmanager
def clear_failures() -> Iterator[None]:
    """Report bad input in one sentence, a worker's failure with its traceback, and a second Ctrl-C at once."""
    try:
        yield
    except BadInput as error:
        refuse(str(error))
    except WorkerFailed as error:
        typer.echo(f"gradsieve: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("gradsieve: interrupted", err=True)
        raise typer.Exit(130) from None


class Line:
    """The latest progress of a run in one line; while workers start, it counts the seconds."""

    def __init__(self, metric: Metric) -> None:
        self.metric, self.news = metric, Text("")
        self.starting: tuple[str, float] | None = None

    def listen(self, news: Progress | Starting) -> None:
        if isinstance(news, Starting):
            self.starting = (f"{news.label}: {started(news)}", time.monotonic())
        else:
            self.starting, self.news = None, Text(show(news, self.metric))

    def __rich__(self) -> Text:
        if self.starting is None:
            return self.news
        words, since = self.starting
        return Text(f"{words} {clock(time.monotonic() - since)}")


def started(news: Starting) -> str:
    return f"starting {news.workers} worker{'s' * (news.workers > 1)} ..."


@contextmanager
def live(metric: Metric, *, hidden: bool, brief: bool = False) -> Iterator[Listen]:
    """Yield a listener that shows a run's progress: one changing line on a terminal; in a log, one line per
    evaluation, or only the run's last line if `brief`."""
    screen = Console(stderr=True)
    with _live(screen, metric, hidden, brief) as show_it:

        def listen(progress: Progress) -> None:
            if not closed:
                try:
                    show_it(progress)
                except (OSError, SystemExit):  # rich raises these when nobody reads any more
                    closed.append(True)

        closed: list[bool] = []
        yield listen


@contextmanager
def _live(screen: Console, metric: Metric, hidden: bool, brief: bool) -> Iterator[Listen]:
    if hidden:
        yield lambda news: None
    elif screen.is_terminal:
        line = Line(metric)
        with Live(line, console=screen, transient=True, refresh_per_second=4):
            yield line.listen
    else:
        last: list[float | None] = [None]

        def log(news: Progress | Starting) -> None:
            if isinstance(news, Starting):
                if not brief:
                    screen.print(f"{news.label}: {started(news)}", highlight=False, soft_wrap=True)
            elif news.over or (news.metric != last[0] and not brief):
                last[0] = news.metric
                screen.print(show(news, metric, LOGGED), highlight=False, soft_wrap=True)

        yield log
