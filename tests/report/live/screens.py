"""The app of ``watch`` in this process, without a terminal, and what is on its screen."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot

from hpc_train.report.live.live_runs import RunsReader
from hpc_train.report.live.watch_app import WatchApp
from tests.waiting import HANG_LIMIT_S

_LIMIT_S = HANG_LIMIT_S


def lines_of(app: WatchApp) -> list[str]:
    """Return the screen's lines as they are drawn."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


def text_of(app: WatchApp) -> str:
    return "\n".join(lines_of(app))


async def until(pilot: Pilot[None], condition: Callable[[], object], what: str) -> None:
    """Let the app work until the condition holds."""
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not seen: {what}\n{text_of(_app(pilot))}"
        await pilot.pause(0.02)


async def shows(pilot: Pilot[None], *words: str) -> None:
    """Wait until all of it is on the screen."""
    for each in words:
        await until(pilot, lambda each=each: each in text_of(_app(pilot)), each)


def _app(pilot: Pilot[None]) -> WatchApp:
    assert isinstance(pilot.app, WatchApp)
    return pilot.app


@asynccontextmanager
async def screen(size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[WatchApp, Pilot[None]]]:
    """Run the app within this context."""
    app = WatchApp(RunsReader([]), 60.0)
    async with app.run_test(size=size) as pilot:
        yield app, pilot


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a test that pytest can run."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        asyncio.run(test(*arguments, **keywords))

    return run
