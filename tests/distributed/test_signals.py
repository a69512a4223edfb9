"""Signals only set a flag; those that come too early are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from hpc_train.rank import signals
from tests.waiting import HANG_LIMIT_S


@pytest.fixture(autouse=True)
def _handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals, "_flags", {})
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(script: str) -> list[str]:
    """Return the words that the script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_LIMIT_S, check=True
    )
    return done.stdout.split()


@pytest.mark.fault(5)
def test_the_first_signal_is_remembered_and_all_are_counted() -> None:
    flag = signals.install()
    assert not flag
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert flag
    assert flag.first is signal.SIGUSR2
    assert flag.count == 3


def test_installing_again_returns_the_same_flag() -> None:
    flag = signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.install() is flag
    assert flag.count == 1


@pytest.mark.fault(3)
def test_a_blocked_signal_is_delivered_once_the_handler_stands() -> None:
    script = """
import os, signal
from hpc_train.rank import signals
signals.block()
os.kill(os.getpid(), signal.SIGTERM)
assert signal.SIGTERM in signal.sigpending()
print(signals.install().first.name)
"""
    assert run(script) == ["SIGTERM"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_of_processes_ends(method: str) -> None:
    script = f"""
import multiprocessing
from hpc_train.rank import signals
signals.block()
signals.install()
for _ in range({10 if method == "fork" else 1}):
    with multiprocessing.get_context({method!r}).Pool(4) as pool:
        squares = pool.map(abs, range(-9, 0))
print(sum(squares))
"""
    assert run(script) == ["45"]


def test_a_forked_child_leaves_the_flag_alone() -> None:
    script = """
import os, signal
from hpc_train.rank import signals
flag = signals.install()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    inherited = flag.count
    own = signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(10 * inherited + own.count)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, flag.count)
"""
    assert run(script) == ["1", "0"]


def test_a_warning_that_comes_too_early_is_sent_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[FakeTimer] = []

    class FakeTimer:
        def __init__(self, delay_s: float, act: Callable[..., None], args: tuple[int, int]) -> None:
            self.delay_s, self.act, self.args, self.daemon = delay_s, act, args, False
            timers.append(self)

        def start(self) -> None: ...

    now = 1_800_000_000.0
    monkeypatch.setattr(signals.threading, "Timer", FakeTimer)
    monkeypatch.setattr(signals.time, "time", lambda: now)
    flag = signals.install(no_warning_before=now + 60)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not flag and [timer.delay_s for timer in timers] == [60.0]
    now += 61
    timers[0].act(*timers[0].args)
    assert flag.first == signal.SIGUSR2


def test_preemption_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals.time, "time", lambda: 0.0)
    flag = signals.install(no_warning_before=60.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.first == signal.SIGTERM


#: Waits in C for a lock that is never released: a handler has no turn in the main thread.
_BLOCKED_IN_C = """
import ctypes, os, signal, sys
from hpc_train.rank import signals
signals._MAIN_THREAD_S = 0.1
flag = signals.install()
def act():
    print(flag.first.name, flush=True)
    os._exit(0)
flag.act_at_once(act)
if {is_over}:
    flag.act_at_once(None)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGINT)  # its own, which its parent does not act on
    os._exit(0)
os.waitpid(child, 0)
print("ready", flush=True)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("is_over", [False, True])
def test_a_main_thread_that_waits_in_c_is_stood_in_for_until_the_first_step(is_over: bool) -> None:
    script = _BLOCKED_IN_C.replace("{is_over}", str(is_over))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            if is_over:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(1.0)
            else:
                assert process.wait(HANG_LIMIT_S) == 0
                assert process.stdout.read() == "SIGTERM\n"
        finally:
            process.kill()
