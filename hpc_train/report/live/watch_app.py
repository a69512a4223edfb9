"""``WatchApp``: the full-screen view of runs. Only ``cli.watch`` imports it, since importing textual is slow.

A thread reads (``details.ReadingThread``); this one shows the results and handles keys.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.message import Message
from textual.widgets import DataTable, Input, Static
from typing_extensions import override

from hpc_train.console import one_line
from hpc_train.errors import shortened
from hpc_train.package_path import with_package
from hpc_train.paths import RunPaths
from hpc_train.report.live import live_runs
from hpc_train.report.live.details import Reading, ReadingThread
from hpc_train.report.live.live_runs import COLUMNS, STYLES, Column, LiveRun, RunsReader
from hpc_train.report.live.screens import DetailsView, Help, LogView, Pane, Question
from hpc_train.run.processes import exit_code, start_in_own_session


class Command:
    """``hpc-train cancel RUN`` or ``hpc-train resume RUN``, started when it is made."""

    def __init__(self, command: str, paths: RunPaths, name: str) -> None:
        """``name``: the run's name in messages."""
        self.title = f"{command} {name}"
        # A file, not a pipe: the reader may have exited.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._read = 0
        self._last = ""
        self._process = start_in_own_session(  # the terminal's signals are for the screen
            [sys.executable, "-m", "hpc_train", command, str(paths.folder)],
            env=with_package(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
        )

    @property
    def pid(self) -> int:
        """Process id of the command, which may outlive the screen."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """Whether the process has ended; its last lines may not have been read."""
        return exit_code(self._process) is not None

    def new_lines(self) -> list[str]:
        """Return its output since the last call, safe for a terminal."""
        is_over = self.is_over
        data = os.pread(self._output.fileno(), 1 << 16, self._read)
        end = len(data) if is_over else data.rfind(b"\n") + 1
        self._read += end
        lines = data[:end].decode("utf-8", "replace").splitlines()
        printed = [one_line(line) for line in lines if line.strip()]
        self._last = printed[-1] if printed else self._last
        return printed

    def end(self) -> str:
        """Return how it ended and its last line; close its output."""
        self._output.close()
        code = exit_code(self._process, block=True)
        return f"{self.title}: {'done' if code == 0 else f'exit code {code}'}; {self._last}".rstrip("; ")


_HINT = "⏎ details  l log  c cancel  r resume  / filter  s sort  ? help  q quit"
_NO_RUNS = "no runs yet; `hpc-train submit FILE` starts some"
_COMMANDS_EVERY_S = 0.5
#: Columns of the scroll bar that a long table has, and of the gap before it.
_SCROLL_BAR = 3
#: Lines about a failed run below the table.
_FAILURE_LINES = 3
_QUESTIONS = {
    "cancel": "Cancel {} for good? What it saved is kept.",
    "resume": "Resume {} from its newest checkpoint?",
}


class HasRead(Message):
    """The thread has read the runs or the details of one."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading


class RunTable(DataTable[Text]):
    """A line per run; home and end go to the first and the last run."""

    BINDINGS = [("home", "scroll_top", "first"), ("end", "scroll_bottom", "last")]


class WatchApp(App[None]):
    """Shows the runs of a ``RunsReader``, read every ``interval_s`` seconds."""

    TITLE = "hpc-train watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #hint { height: 1; text-style: reverse; }
    #runs { height: auto; max-height: 45%; }
    #failures { height: auto; color: $error; display: none; }
    #runs > .datatable--cursor { background: $primary 50%; }
    App:nocolor #runs > .datatable--cursor { text-style: reverse; }
    #details { height: 1fr; min-height: 8; border-top: solid $primary; }
    #problem { height: auto; max-height: 2; color: $error; display: none; }
    #message { height: 1; display: none; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    """
    BINDINGS = [
        ("q", "quit", "quit"),
        ("l", "log", "log"),
        ("c", "ask('cancel')", "cancel"),
        ("r", "ask('resume')", "resume"),
        ("slash,f", "filter", "filter"),
        ("s", "sort", "sort"),
        ("u", "update", "update"),
        ("question_mark", "help", "help"),
        ("escape", "clear_filter", "no filter"),
        ("ctrl+c", "quit", "quit"),
    ]

    def __init__(self, reader: RunsReader, interval_s: float) -> None:
        # No colours of its own if colours are disabled: the terminal's two remain.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.animation_level = "none"
        self._thread = ReadingThread(reader, interval_s, lambda reading: self.post_message(HasRead(reading)))
        self._runs: list[LiveRun] = []
        self._listed: list[LiveRun] = []
        self._shown: dict[str, tuple[str, ...]] = {}
        self._columns: Mapping[Column, int] = {}
        self._selected: RunPaths | None = None
        #: Without a choice by the user, the newest run that runs is selected.
        self._is_chosen = False
        self._words, self._sort = "", "name"
        self._has_read = False
        self._said = self._message = ""
        self._commands: list[Command] = []

    @property
    def living_commands(self) -> list[Command]:
        """The commands that were started here and have not ended."""
        return [command for command in self._commands if not command.is_over]

    @override
    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield RunTable(id="runs", cursor_type="row", cell_padding=0, cursor_foreground_priority="renderable")
        yield Static(id="failures", markup=False)
        yield Pane(id="details")
        yield Static(id="problem", markup=False)
        yield Input(id="filter", placeholder="words or a state; enter keeps, escape clears", compact=True)
        yield Static(id="message", markup=False)
        yield Static(id="hint", markup=False)

    def on_mount(self) -> None:
        """Start to read runs; SIGTERM and SIGHUP leave the screen, so that the terminal is restored."""
        for number in (signal.SIGTERM, signal.SIGHUP):  # the terminal is restored anyway
            asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.begin_capture_print(self)  # messages of launchers
        self.query_one("#filter", Input).cursor_blink = False
        self.query_one(RunTable).focus()
        self._show_head()
        self._thread.start()

    def on_unmount(self) -> None:
        """Let the thread that reads runs end."""
        self._thread.stop()

    def on_resize(self, event: events.Resize) -> None:
        """Choose columns for the new width."""
        self._columns = {}
        self.call_after_refresh(self._show_runs)

    def on_print(self, event: events.Print) -> None:
        """Keep the output of launchers; it is shown as a problem after the next reading."""
        self._said += event.text

    def on_has_read(self, message: HasRead) -> None:
        """Show the result of a reading; a problem stays until the next reading of all runs."""
        if not self.query("#hint"):
            return  # the screen is being closed
        reading = message.reading
        if reading.runs is not self._runs or reading.problem:
            self._show_lines("#problem", " ".join((reading.problem or self._said).split()))
            self._said = ""
        if reading.runs is not self._runs:
            self._runs, self._has_read = reading.runs, True
            self._show_runs()
        if reading.details is not None and reading.details.paths == self._selected:
            self.query_one(Pane).show(reading.details)
            if isinstance(self.screen, DetailsView):
                self.screen.show(reading.details)

    def _show_lines(self, selector: str, *texts: str) -> None:
        """Show the texts as lines, or hide the widget if there are none."""
        for widget in self.query(selector).results(Static):
            widget.display = any(texts)
            widget.update(Text("\n".join(map(one_line, texts))))

    def _show_head(self) -> None:
        number_of_runs = live_runs.counts(self._listed) if self._has_read else "reading…"
        parts = [f"hpc-train watch  {number_of_runs}", f"sort: {self._sort}"]
        parts += [f"filter: {one_line(self._words)}"] if self._words else []
        parts += [time.strftime("%H:%M:%S")] if self._has_read else []
        for line, shown in (("#head", "  ".join(parts)), ("#hint", _HINT)):
            self.query_one(line, Static).update(Text(shown.ljust(self.size.width), no_wrap=True))

    def _say(self, text: str) -> None:
        self._message = text
        self._show_lines("#message", text)

    def _show_runs(self) -> None:
        """Bring the table up to date: changed cells only, unless rows or columns differ."""
        self._listed = live_runs.selected(self._runs, self._words, self._sort)
        self._show_head()
        table = self.query_one(RunTable)
        columns = live_runs.columns_for(self._listed, self.size.width - _SCROLL_BAR)
        lines = {str(run.paths.folder): live_runs.cells(run, columns) for run in self._listed}
        if columns != self._columns or list(lines) != list(self._shown):
            self._rebuild(columns, lines)
        else:
            for key, texts in lines.items():
                before = self._shown[key]
                if texts == before:
                    continue
                new = self._texts(self._columns, texts)
                for column, old, text, cell in zip(self._columns, before, texts, new, strict=True):
                    if old != text:
                        table.update_cell(key, column.head, cell)
        self._shown = lines
        self._move_cursor()
        self._show_failures(columns)
        if self._has_read:
            if not self._runs:
                self._say(_NO_RUNS)
            elif self._message == _NO_RUNS:
                self._say("")

    def _show_failures(self, columns: Mapping[Column, int]) -> None:
        """Show why runs failed below the table if it is too narrow for that."""
        texts = live_runs.failures(self._listed, columns)
        lines: list[str] = []
        room = max(_FAILURE_LINES, self.size.height // 6)
        while texts and len(lines) + _FAILURE_LINES <= room:
            lines += textwrap.wrap(texts.pop(0), self.size.width, max_lines=_FAILURE_LINES, placeholder="…")
        lines += [f"and {len(texts)} other reasons; the filter `failed` lists the runs"] if texts else []
        self._show_lines("#failures", *lines)

    def _rebuild(self, columns: Mapping[Column, int], lines: Mapping[str, Sequence[str]]) -> None:
        table = self.query_one(RunTable)
        with self.prevent(DataTable.RowHighlighted):
            table.clear(columns=True)
            for column, width in columns.items():
                table.add_column(Text(shortened(column.head, width)), key=column.head, width=width + 1)
            for key, texts in lines.items():
                table.add_row(*self._texts(columns, texts), key=key)
        self._columns = columns

    def _move_cursor(self) -> None:
        """Select the run that the user chose, else the newest one that runs."""
        places = [run.paths for run in self._listed]
        newest = live_runs.newest(self._listed)
        if newest and not (self._is_chosen and self._selected in places):
            self._select(newest.paths)
        elif not places:
            self._select(None)
        with self.prevent(DataTable.RowHighlighted):
            if self._selected in places:
                self.query_one(RunTable).move_cursor(row=places.index(self._selected), animate=False)

    def _texts(self, columns: Mapping[Column, int], texts: Sequence[str]) -> list[Text]:
        by_head = {column.head: text for column, text in zip(columns, texts, strict=True)}
        style = STYLES.get(by_head.get("state", ""), "")
        coloured = {"state": style, COLUMNS[-1].head: style if "failed" in by_head.values() else ""}
        return [Text(text, style=coloured.get(head, ""), no_wrap=True) for head, text in by_head.items()]

    def _select(self, paths: RunPaths | None) -> None:
        if paths != self._selected:
            self._selected = paths
            self.query_one(Pane).show(None)
        self._thread.select(paths, is_full=isinstance(self.screen, DetailsView))

    def _run(self) -> LiveRun | None:
        return next((run for run in self._listed if run.paths == self._selected), None)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Select the run under the cursor."""
        if 0 <= event.cursor_row < len(self._listed):
            paths = self._listed[event.cursor_row].paths
            self._is_chosen = self._is_chosen or paths != self._selected
            self._select(paths)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the details of the run on enter."""
        if run := self._run():
            self.push_screen(DetailsView(run.paths, run.name), lambda _: self._select(self._selected))
            self._thread.select(run.paths, is_full=True)

    def action_log(self) -> None:
        """Open the log of the selected run."""
        if run := self._run():
            self.push_screen(LogView(run.paths, run.name))

    def action_help(self) -> None:
        """List the keys."""
        self.push_screen(Help())

    def action_sort(self) -> None:
        """Sort by the next of the orders."""
        self._sort = live_runs.next_sort(self._sort)
        self._show_runs()

    def action_update(self) -> None:
        """Read all runs now."""
        self._thread.read_now()

    def action_filter(self) -> None:
        """Open the input line for words that select runs."""
        line = self.query_one("#filter", Input)
        line.display = True
        line.focus()

    def action_clear_filter(self) -> None:
        """Show all runs again; close the input line."""
        line = self.query_one("#filter", Input)
        line.value, line.display = "", False
        self.query_one(RunTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the runs that the words select, after every typed character."""
        self._words = event.value
        self._show_runs()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close the input line and keep its words."""
        event.input.display = False
        self.query_one(RunTable).focus()

    def action_ask(self, command: str) -> None:
        """``cancel`` or ``resume`` the selected run after confirmation."""
        run = self._run()
        if run is None:
            return

        def answered(is_wanted: bool | None) -> None:
            if is_wanted:
                self._start(command, run)

        self.push_screen(Question(_QUESTIONS[command].format(one_line(run.name))), answered)

    def _start(self, name: str, run: LiveRun) -> None:
        command = Command(name, run.paths, run.name)
        self._commands.append(command)
        self._say(f"{command.title} …")
        self.set_timer(_COMMANDS_EVERY_S, lambda: self._follow(command))

    def _follow(self, command: Command) -> None:
        is_over = command.is_over
        for line in command.new_lines()[-1:]:
            self._say(line)
        if is_over:
            self._say(command.end())
            self._thread.read_now()
        else:
            self.set_timer(_COMMANDS_EVERY_S, lambda: self._follow(command))
