"""The keys of ``watch``, and that nothing from a run acts on the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.widgets import DataTable

from hpc_train.console import say
from hpc_train.launchers.following import FollowingLauncher
from hpc_train.paths import RunPaths, runs_root
from hpc_train.report.live import screens as screens_module
from hpc_train.report.live import watch_app as app_module
from hpc_train.report.live.details import Details, DetailsReader
from hpc_train.report.live.live_runs import LiveRun, cells, columns_for
from hpc_train.report.live.screens import DetailsView, LogView, Question, styled
from hpc_train.run.run_status import RunStatus, write_status
from tests.report.live.runs import add_rows, made_run
from tests.report.live.screens import in_a_loop, lines_of, screen, shows, text_of, until

_HOSTILE = (
    "[bold red]x[/bold red]", "[/]", "[link=file:///etc/passwd]y[/link]", "[@click=app.quit]z[/]", "[", "]",
    "\x1b[31m", "\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\u202e", "\u2066", "\x00", "\x7f", "\r", "\ufeff",
    "\ud800", "\\[", "😀", "é", "漢字", ":smile:", "%s", "{0}", "$x", "&lt;",
)  # fmt: skip
#: Characters that act on a terminal or on the order of text.
_ACTING = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_TEXTS = st.lists(st.one_of(st.sampled_from(_HOSTILE), st.text(max_size=5)), max_size=5).map("".join)
_NUMBERS = st.one_of(st.floats(), st.integers(), st.just(2**2000), st.booleans(), st.none(), _TEXTS)
_WORDS = st.tuples(_TEXTS, _TEXTS, _TEXTS, _TEXTS)


def _three() -> list[RunPaths]:
    return [
        made_run(runs_root(), run_id, state, step)
        for run_id, state, step in (("a1", "running", 50), ("b2", "failed", 20), ("c3", "completed", 100))
    ]


@in_a_loop
async def test_runs_and_details_fit_80_columns_and_keys_select_a_run() -> None:
    _three()
    async with screen() as (app, pilot):
        await shows(pilot, "3 runs: 1 failed, 1 running, 1 completed", "████░░░░ 50/100", "a1 of small")
        lines = lines_of(app)
        assert len(lines) == 24 and all(len(line) <= 80 for line in lines)
        assert re.search(r"^a1 +running +\S+ 50/100 +\d+s +\S{10} 0.04 +\S", lines[2]), lines[2]
        assert "q quit" in lines[-1]
        await pilot.press("down")
        await shows(pilot, "b2 of small, failed", "reason     rank 0: ValueError: no")
        await pilot.press("enter")
        await shows(pilot, "b2: details", "folder")
        await pilot.press("escape", "up")
        await shows(pilot, "a1 of small, running", "accuracy 0.5")


_REASON = (
    "rank 3: torch.OutOfMemoryError: CUDA out of memory: 76.2 of 79.1 GiB are in use at batch size 512; "
    "lower optimization.micro_batch_size to 256, or set checkpoint_activations"
)
_SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 30), (160, 45)], ids="{0[0]}x{0[1]}".format)


def _sweep() -> list[RunPaths]:
    """Four runs of which the third runs, in the order of the table."""
    return [
        made_run(
            runs_root(), run_id, state, step, _REASON, {"optimization.optimizer.lr": lr, "seed": 1}
        )
        for run_id, state, step, lr in (
            ("a1", "completed", 100, 0.01), ("b2", "failed", 20, 10.0), ("c3", "running", 50, 0.1),
            ("d4", "pending", 0, 1.0),
        )
    ]  # fmt: skip


@_SIZES
@in_a_loop
async def test_a_sweep_can_be_read_without_a_key(size: tuple[int, int]) -> None:
    """The running run is selected; values, why a run failed, and the curves are on the screen."""
    _sweep()[2].attempt(1).log(0).write_text("".join(f"line {number} of the log\n" for number in range(200)))
    async with screen(size) as (app, pilot):
        await shows(
            pilot, "c3 of small, lr=0.1 seed=1, running on n1", "line 199", "train/loss: 0.04 at step 50"
        )
        await shows(pilot, *(f" lr={lr} seed=1 " for lr in ("0.01", "10.0", "0.1", "1.0")))
        lines = lines_of(app)
        text = " ".join(text_of(app).split())
        assert len(lines) == size[1] and all(len(line) <= size[0] for line in lines)
        assert _REASON in text
        assert "val/accuracy: 0.5 at step 50" in text
        assert [line for line in lines if not line.strip()] == [], "no blank line"
        assert sum(any("⠀" <= character <= "⣿" for character in line) for line in lines) >= 3


@in_a_loop
async def test_the_selection_follows_what_runs_until_the_user_chooses() -> None:
    paths = _sweep()
    async with screen() as (app, pilot):
        await shows(pilot, "c3 of small")
        write_status(paths[2], RunStatus("completed", 100, 100, 1.0, 1))
        write_status(paths[3], RunStatus("running", 1, 100, 1.0, 1))
        await pilot.press("u")
        await shows(pilot, "d4 of small")
        assert app.query_one(DataTable).cursor_row == 3
        await pilot.press("up")
        await shows(pilot, "c3 of small, lr=0.1 seed=1, completed")
        write_status(paths[2], RunStatus("cancelled", 100, 100, 1.0, 1))
        await pilot.press("u")
        await shows(pilot, "c3 of small, lr=0.1 seed=1, cancelled")


@pytest.mark.slow
@in_a_loop
async def test_a_selected_failure_is_explained_in_full_among_many_runs() -> None:
    for number in range(20):
        made_run(runs_root(), f"r{number:02}", "failed" if number % 2 else "completed", 5, _REASON)
    async with screen() as (app, pilot):
        await shows(pilot, "20 runs")
        await pilot.press("home", "down")
        await shows(pilot, "r01 of small, failed")
        _, pane = text_of(app).split("r01 of small, failed")
        assert _REASON in " ".join(pane.split())
        assert " and 9 more: rank 3" in text_of(app)
        assert not app.query_one(DataTable).show_horizontal_scrollbar


@in_a_loop
async def test_a_wide_screen_has_all_columns() -> None:
    _three()
    async with screen(size=(200, 40)) as (app, pilot):
        await shows(pilot, "1.23k samples/s", "25%", "41%", "n1", "rank 0: ValueError: no", "tries")
        await pilot.resize_terminal(60, 20)
        await until(pilot, lambda: "tries" not in text_of(app), "fewer columns")
        assert "a1" in text_of(app) and all(len(line) <= 60 for line in lines_of(app))


@in_a_loop
async def test_new_rows_are_shown_and_the_selection_stays() -> None:
    paths = _three()
    async with screen() as (app, pilot):
        await shows(pilot, "a1 of small")
        await pilot.press("down")
        await shows(pilot, "b2 of small")
        add_rows(paths[0], 51, since=51)
        write_status(paths[0], RunStatus("running", 51, 100, 1.0, 1))
        made_run(runs_root(), "a0", "pending", 0)
        await pilot.press("u")
        await shows(pilot, "51/100", "4 runs")
        table = app.query_one(DataTable)
        assert table.cursor_row == 2, "still that of b2"
        await shows(pilot, "b2 of small")


@pytest.mark.slow
@in_a_loop
async def test_the_filter_takes_words_and_escape_clears_it() -> None:
    _three()
    async with screen() as (app, pilot):
        await shows(pilot, "3 runs")
        await pilot.press("slash", *"failed", "enter")
        await shows(pilot, "1 run: 1 failed", "filter: failed", "b2 of small")
        await pilot.press("s")  # a key again, not a letter
        await shows(pilot, "sort: state")
        await pilot.press("escape")
        await shows(pilot, "3 runs")
        assert "filter:" not in text_of(app)
        await pilot.press("f", *"zzz")
        await shows(pilot, "0 runs")
        await pilot.press("c", "l", "escape", "l", "escape")
        await shows(pilot, "3 runs")


class FakeCommand:
    """Ends at once."""

    started: list[tuple[str, str]] = []
    is_over, pid, title = True, 1, "that"

    def __init__(self, words: str, paths: RunPaths, name: str) -> None:
        self.started.append((words, paths.folder.name))

    def new_lines(self) -> list[str]:
        return []

    def end(self) -> str:
        return "ended so"


@pytest.mark.parametrize(("key", "words"), [("c", "cancel"), ("r", "resume")])
@in_a_loop
async def test_cancel_and_resume_ask_first(monkeypatch: pytest.MonkeyPatch, key: str, words: str) -> None:
    monkeypatch.setattr(app_module, "Command", FakeCommand)
    monkeypatch.setattr(app_module, "_COMMANDS_EVERY_S", 0.01)
    FakeCommand.started = []
    _three()
    async with screen() as (app, pilot):
        await shows(pilot, "a1 of small")
        for answer in ("n", "escape", "enter"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, Question), "the question")
            await pilot.press(answer)
        assert isinstance(app.screen, Question), "enter is no answer"
        assert FakeCommand.started == []
        assert f"{words.capitalize()} a1" in text_of(app)
        await pilot.press("y")
        await shows(pilot, "ended so")
        assert FakeCommand.started == [(words, "a1")]


@pytest.mark.slow
@in_a_loop
async def test_the_log_is_followed_until_one_goes_back() -> None:
    paths = _three()[0]
    log = paths.attempt(1).log(0)
    log.write_text("first [red]line[/red]\n")
    async with screen() as (_, pilot):
        await shows(pilot, "a1 of small")
        await pilot.press("l")
        await shows(pilot, "first [red]line[/red]")
        with log.open("a") as file:
            file.write("second line\n")
        await shows(pilot, "second line")
        await pilot.press("q")
        await shows(pilot, "a1 of small")


def test_a_log_is_followed_again_after_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``log_of`` asks launchers, plug-ins among them, and file servers."""
    log = tmp_path / "log"
    log.write_text("first line\n")
    error = RuntimeError("raised \x1b[so]")
    answers: list[Path | Exception] = [error, error, log, OSError(116, "Stale file handle", "/runs"), log]

    def answer(paths: RunPaths) -> Path:
        found = answers.pop(0)
        if not answers:
            follower.stop()
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(screens_module, "log_of", answer)
    monkeypatch.setattr(screens_module, "_FOLLOW_EVERY_S", 0.0)
    delivered: list[str] = []
    follower = screens_module._Follower(RunPaths(tmp_path), delivered.extend)
    follower.run()
    assert delivered == [
        "--- RuntimeError: raised \\x1b[so]", f"--- {log}", "first line",
        "--- /runs: the file server has forgotten the file (stale file handle)",
    ]  # fmt: skip


@in_a_loop
async def test_help_lists_the_keys() -> None:
    async with screen() as (app, pilot):
        await shows(pilot, "0 runs", "no runs yet")
        made_run(runs_root())
        await pilot.press("u")
        await until(pilot, lambda: "no runs yet" not in text_of(app), "a run")
        await pilot.press("question_mark")
        await shows(pilot, "cancel the run for good; asks first")
        await pilot.press("q")
        await until(pilot, lambda: "asks first" not in text_of(app), "the table")
        await pilot.press("s")
        await shows(pilot, "sort: state")


@in_a_loop
async def test_what_a_launcher_says_or_raises_is_a_line_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _three()
    trouble = "squeue does not [answer]"
    real = FollowingLauncher.status

    def status(self: FollowingLauncher, runs: list[RunPaths], **kwargs: bool) -> list[RunStatus]:
        if trouble == "raised":
            raise RuntimeError("raised [so]")
        if trouble:
            say(trouble, "  what follows is what the run folders say")
        return real(self, runs, **kwargs)

    monkeypatch.setattr(FollowingLauncher, "status", status)
    async with screen() as (app, pilot):
        await shows(pilot, "squeue does not [answer] what follows", "50/100")
        trouble = "raised"
        await pilot.press("u")
        await shows(pilot, "RuntimeError: raised [so]", "50/100")
        trouble = ""
        await pilot.press("u")
        await until(pilot, lambda: "raised" not in text_of(app), "no problem any more")


@in_a_loop
async def test_lines_and_details_that_come_too_late_are_dropped() -> None:
    paths = _three()[0]
    paths.attempt(1).log(0).write_text("late line\n")
    async with screen() as (app, pilot):
        await shows(pilot, "a1 of small")
        log, details = LogView(paths, "a1"), DetailsView(paths, "a1")
        log._show(["before it is complete"])
        details.show(Details(paths, (("label", "text"),)))
        await pilot.press("l")
        await shows(pilot, "late line")
        view = app.screen
        await pilot.press("q")
        await until(pilot, lambda: not view.is_attached, "its end")
        assert isinstance(view, LogView)
        view._show(["after its end"])
        await shows(pilot, "a1 of small")


@in_a_loop
async def test_no_color_leaves_the_terminals_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _three()

    async def colors() -> set[str]:
        async with screen() as (app, pilot):
            await shows(pilot, "b2")
            styles = [part.style for strip in app.screen._compositor.render_strips() for part in strip]
        pairs = [(style.color, style.bgcolor) for style in styles if style]
        return {str(color.name) for pair in pairs for color in pair if color}

    assert len(await colors()) > 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert await colors() <= {"default"}


@settings(max_examples=25)
@given(texts=_WORDS, values=st.lists(_NUMBERS, min_size=4, max_size=4), width=st.integers(10, 250))
def test_run_texts_are_escaped(texts: tuple[str, str, str, str], values: list[object], width: int) -> None:
    name, experiment, reason, metric = texts
    row = {"split": "train", "step": values[0], "loss": values[1], "step_s": values[2], metric: values[3]}
    row |= dict.fromkeys(("mfu", "data_wait_s", "samples_per_s"), values[3])
    run = LiveRun(
        RunPaths(Path("/nowhere/x")), name, experiment, RunStatus("failed", 1, 9, reason=reason or None),
        job=metric, nodes=(name, reason), losses=(1.0, float("nan")), train=row, evaluation=row,
    )  # fmt: skip
    columns = columns_for([run], width)
    details = DetailsReader(run.paths).read(run, is_full=True)
    fitted = details.fitted(width, 20)
    shown = [*cells(run, columns), *(text for _, text in [*details.lines, *fitted])]
    assert not [text for text in shown if _ACTING.search(text)]
    again = Details(run.paths, details.lines, details.log).fitted(width, 20)
    assert styled(fitted).spans == styled(again).spans


@pytest.mark.slow
@in_a_loop
async def test_hostile_names_rows_and_logs_are_shown_as_they_are() -> None:
    groups = ["".join(_HOSTILE[place::4]) for place in range(4)]
    for number, text in enumerate(groups):
        name = text.replace("/", "").replace("\0", "").encode("utf-8", "replace").decode()
        paths = made_run(runs_root(), f"{number:02}{name}", "completed", 10)
        write_status(paths, RunStatus("failed", 10, 100, 1.0, 1, text))
        paths.attempt(1).log(0).write_text(f"log {text}\n", errors="surrogatepass")
        paths.metrics.write_text(json.dumps({"split": "train", "step": 10, "loss": 1.0, text: 3.5}) + "\n")
    async with screen(size=(200, 50)) as (app, pilot):
        seen = ""
        await until(pilot, lambda: "run        0" in text_of(app), "a selected run")
        await pilot.press("home")
        for number in range(len(groups)):
            await until(pilot, lambda n=number: f"run        {n:02}" in text_of(app), f"run {number}")
            seen += text_of(app)
            await pilot.press("c")
            await until(pilot, lambda: isinstance(app.screen, Question), "the question")
            seen += text_of(app)
            await pilot.press("n", "down")
        await pilot.press("home", "l")
        await shows(pilot, "log [bold red]x[/bold red]")
        seen += text_of(app)
        await pilot.press("q", "enter")
        await shows(pilot, ": details")
        seen += text_of(app)
        assert not _ACTING.search(seen.replace("\n", ""))
        for text in ("[bold red]x[/bold red]", "[@click=app.quit]z[/]", ":smile:", "\\x1b[2J", "\\u202e"):
            assert text in seen, text
