"""Screens that open above the table of ``watch``: help, a question, a run's details, its log.

Texts of runs are shown as ``rich.text.Text`` or without markup: nothing in them is interpreted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Log, Static
from typing_extensions import override

from hpc_train.console import one_line
from hpc_train.paths import RunPaths
from hpc_train.report.live.details import Details, LogTail, log_of, problem_words

#: Key, as printed → its effect; the table of docs/watch.md.
KEYS = {
    "up, down": "select a run; also page up, page down, home, end",
    "enter": "details of the run: metrics, attempts and their ends, log",
    "l": "log of rank 0, followed",
    "c": "cancel the run for good; asks first",
    "r": "resume the run; asks first",
    "/ or f": "filter: words of name, values, job, node or reason; a state",
    "s": "sort by name, state, progress, ETA, loss",
    "u": "update now",
    "?": "this list",
    "q": "back, or quit; escape goes back",
}
_FOLLOW_EVERY_S = 1.0
#: Lines of a log that are kept.
_MAX_LINES = 10_000
_BACK: list[BindingType] = [("escape,q", "app.pop_screen", "back")]


class Question(ModalScreen[bool]):
    """Shows a question; the result is True if ``y`` was pressed."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Static { width: auto; max-width: 90%; height: auto; border: round $primary; padding: 1 2; }
    """
    BINDINGS = [("y", "dismiss(True)", "yes"), ("n,escape,q", "dismiss(False)", "no")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._words = question

    @override
    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._words}\n\ny: yes    n: no"))


class Help(ModalScreen[None]):
    """Lists the keys."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > Static { width: auto; max-width: 96%; height: auto; border: round $primary; padding: 0 1; }
    """
    BINDINGS = [("escape,q,question_mark,enter", "app.pop_screen", "back")]

    @override
    def compose(self) -> ComposeResult:
        width = max(map(len, KEYS))
        yield Static(Text("\n".join(f"{key.ljust(width)}  {what}" for key, what in KEYS.items())))


class Pane(Widget):
    """The part of a run's details that has room below the table."""

    _details: Details | None = None

    def show(self, details: Details | None) -> None:
        """Show the details, or nothing."""
        self._details = details
        self.refresh()

    @override
    def render(self) -> Text:
        return styled(self._details.fitted(*self.size)) if self._details else Text()


class DetailsView(Screen[None]):
    """Everything about one run; the app calls ``show`` after each reading."""

    DEFAULT_CSS = "DetailsView > Static { height: 1; text-style: reverse; }"
    BINDINGS = _BACK

    def __init__(self, paths: RunPaths, name: str) -> None:
        super().__init__()
        self.paths, self._run_name = paths, name

    @override
    def compose(self) -> ComposeResult:
        yield Static(Text(f"{one_line(self._run_name)}: details; q goes back"))
        with VerticalScroll():
            yield Static(id="everything")

    def show(self, details: Details) -> None:
        """Show the details; long lines are wrapped."""
        for everything in self.query("#everything").results(Static):  # none before the view is complete
            everything.update(styled(details.lines_wide()))


def styled(lines: Iterable[tuple[str, str]]) -> Text:
    """Return labels and texts as lines, labels in bold."""
    text = Text()
    for place, (label, line) in enumerate(lines):
        text.append("\n" if place else "").append(label, style="bold").append(line)
    return text


class LogView(Screen[None]):
    """The end of a run's log, followed: new lines scroll it unless the user has scrolled up."""

    DEFAULT_CSS = """
    LogView > Static { height: 1; text-style: reverse; }
    LogView > Log { height: 1fr; }
    """
    BINDINGS = _BACK

    def __init__(self, paths: RunPaths, name: str) -> None:
        super().__init__()
        self._paths, self._run_name = paths, name
        self._follower = _Follower(paths, self._deliver)

    @override
    def compose(self) -> ComposeResult:
        yield Static(Text(f"{one_line(self._run_name)}: log; up and down scroll, end follows, q goes back"))
        yield Log(max_lines=_MAX_LINES)

    def on_mount(self) -> None:
        """Start to read the log."""
        self.query_one(Log).focus()
        self._follower.start()

    def on_unmount(self) -> None:
        """Let the thread that reads the log end."""
        self._follower.stop()

    def _deliver(self, lines: list[str]) -> None:
        self.app.call_later(self._show, lines)

    def _show(self, lines: list[str]) -> None:
        for log in self.query(Log):  # none once the view is closed
            log.write_lines(lines)


class _Follower(threading.Thread):
    """Reads a log while the view is open; daemonic, like the thread that reads the runs."""

    def __init__(self, paths: RunPaths, deliver: Callable[[list[str]], None]) -> None:
        super().__init__(name="following a log", daemon=True)
        self._paths, self._deliver = paths, deliver
        self._is_stopped = threading.Event()
        self._tail: LogTail | None = None
        self._problem = ""

    def stop(self) -> None:
        self._is_stopped.set()

    def run(self) -> None:
        while not self._is_stopped.is_set():
            if lines := self._read():
                self._deliver(lines)
            self._is_stopped.wait(_FOLLOW_EVERY_S)

    def _read(self) -> list[str]:
        try:
            lines, problem = self._new_lines(), ""
        except Exception as error:  # an error of a plug-in or a disk: shown, and retried
            problem = problem_words(error)
            lines = [] if problem == self._problem else [f"--- {one_line(problem)}"]
        self._problem = problem
        return lines

    def _new_lines(self) -> list[str]:
        path = log_of(self._paths)
        if self._tail is not None and self._tail.path == path:
            return self._tail.new_lines()
        tail = LogTail(path)
        lines = [f"--- {one_line(str(path))}", *tail.new_lines()]
        self._tail = tail
        return lines
