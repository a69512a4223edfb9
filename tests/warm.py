"""Ranks forked from a process that has imported their modules, for tests where starting is not the point.

A rank needs more CPU time to import torch than most tests need for training, and a command more to import
typer, pydantic and hpc_train than for its work. ``start`` forks a process for the real command, whose
``subprocess.Popen`` hands Python modules that import torch (``_WARM``) to a fork server::

    pytest ── fork server              has imported torch and hpc_train
      │          └ forks ─▶ launcher   becomes pytest's child, has a fork server of its own
      └ launcher ── fork server
           └ rank                      forked by that server, becomes the launcher's child

    pytest -n 4 ── fork server
      └ worker of pytest-xdist ── fork server     both forked, as launchers are

    slurmstepd ── task                 Python as srun starts it; its first import (tests/warm_site) orders a
                                       rank of pytest's server, passes signals on, and ends as the rank does
                                       (tests/warm_task.py)
    pytest ── fork server
           └ supervisor ── rank        killed by the supervisor where its task is killed

A rank is like a fresh process in all that tests and hpc-train look at (tests/test_warm.py): parent, session,
signal mask, death with its launcher, exit code, open files, arguments and environment (in /proc too),
``sys.path``, ``__main__``. It is not in what the dynamic linker, Python and torch read as they start: where
the environment differs in such a variable (``_READ_AT_START``) a process starts as usual; where ``FRESH`` is
set, all do. The warm ranks of one session of pytest share Python's hash seed. What Slurm itself does to a
rank is tested with fresh ranks. hpc_train is that of the run's snapshot (tests/warm_imports.py), but nearly
all its modules are imported: circular imports show in fresh processes only (tests/test_warm.py).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import io
import json
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

#: Set where each rank starts as usual: by tests of the start itself, and by ``make test-full``.
FRESH = "HPC_TRAIN_TEST_FRESH_RANKS"
#: Set in a job whose ranks start as usual until it is requeued.
FRESH_FIRST_ATTEMPT = "HPC_TRAIN_TEST_FRESH_FIRST_ATTEMPT"
#: In the environment of jobs: the socket at which pytest's fork server listens.
DOOR = "HPC_TRAIN_TEST_WARM"
#: In a forked worker's environment until it imports this module: process and ``DOOR`` of its fork server.
_OWN_SERVER = "HPC_TRAIN_TEST_WARM_SERVER"
#: For a fork server: the modules that it imports besides the usual ones, with commas.
_LIBRARIES = "HPC_TRAIN_TEST_LIBRARIES"
#: For a fork server: numpy's library and pyarrow's allocator start no threads, which forks would lack.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_HOOK = Path(__file__).parent / "warm_site"
_TASK = Path(__file__).with_name("warm_task.py")
#: Modules that a launcher starts with ``python -m`` and that import torch.
_WARM = {
    "hpc_train.launchers.entry", "hpc_train.experiment.validate.child_process", "hpc_train.training.prepare",
    "hpc_train.training.checkpoint.export",
}  # fmt: skip
#: Where processes that have a fork server of their own find it.
_SERVER_FILE = 3
#: One that starts ranks itself.
_PARALLEL_RUNS = "hpc_train.cli.parallel_runs"
#: How variables begin that change a process before its first line. One of them more in a job's script, and
#: ranks would start as usual there: tests/slurm/test_nodes.py looks.
_READ_AT_START = (
    "LD_", "GLIBC_", "MALLOC_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "TRITON",
    "CUDA", "CUBLAS_", "NCCL_", "GLOO_", "LANG", "LC_", "TZ", "TMPDIR", "HOME", "XDG_",
)  # fmt: skip
#: Of these, what ``_take_over`` or hpc-train itself sets as well.
_SET_AFTERWARDS = {
    "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR", "TMPDIR", "CUDA_VISIBLE_DEVICES", "PYTHONFAULTHANDLER",
    # torchrun sets these for its ranks.
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # fmt: skip
#: Set in each job; no difference where the encoding is UTF-8 already, but for a stream's errors.
_UTF8_MODE = ("PYTHONUTF8", "1")
_LARGE_PAGE, _MADV_COLLAPSE = 2 << 20, 25
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Room for a process's arguments and environment in the memory that /proc shows.
_ROOM = 60_000
_MOST_BYTES = 2 * _ROOM
#: This process's interpreter and environment, which no test has changed yet.
_PYTHON, _AT_IMPORT = sys.executable, dict(os.environ)
_libc = ctypes.CDLL(None, use_errno=True)
_adoption = threading.Lock()
#: Threads that call ``_server`` at the same time must get one server.
_starting = threading.RLock()


class ForkServer:
    """One end of a socket whose other end ``_serve`` reads; ``pid`` is this process's child."""

    def __init__(
        self, end: socket.socket, pid: int, door: str = "", environment: Mapping[str, str] = os.environ
    ) -> None:
        self._end = end
        self.pid = pid
        self._door = door
        self._environment = dict(environment)

    def can_change_to(self, environment: Mapping[str, str]) -> bool:
        """Return True if a fork that takes over this environment is like a process that started with it."""
        return _can_change(self._environment, environment)

    def for_jobs(self) -> dict[str, str]:
        """Return the variables with which a job is submitted whose ranks are to be forked."""
        path = os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH"))))
        return {DOOR: self._door, "PYTHONPATH": path}

    def fork(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        """Return a new child of this process that carries out the order; ``files`` become its 0, 1, 2."""
        message = json.dumps({**order, "parent": os.getpid()}).encode()
        # Each order has a pipe of its own: after Ctrl-C here, the next one must not read this answer.
        answer, written = os.pipe()
        try:
            with _adopting():
                try:
                    socket.send_fds(self._end, [message], [written, *files])
                finally:
                    os.close(written)
                pid = int(os.read(answer, 100))
        finally:
            os.close(answer)
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError as error:
            error.add_note(f"the fork server {self.pid} forked {pid}: {_status(pid)}")
            raise
        return pid

    def close(self) -> int:
        """End the server, what it forked lives on; return its wait status."""
        self._end.close()
        status = os.waitpid(self.pid, 0)[1]
        if self._door:
            shutil.rmtree(Path(self._door).parent)
        return status


def _status(pid: int) -> str:
    """Return the state and the parent of a process, as far as they can be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        return str(error)
    return ", ".join(line for line in lines if line.startswith(("State", "PPid")))


#: Of ``server_with``; the last one is asked.
_chosen: list[ForkServer] = []


def _can_change(own: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    names = {name for name in environment.keys() | own.keys() if name.startswith(_READ_AT_START)}
    differing = {name for name in names if environment.get(name) != own.get(name)}
    if sys.getfilesystemencoding() == "utf-8" and _UTF8_MODE in environment.items():
        differing.discard(_UTF8_MODE[0])
    size = sum(len(os.fsencode(name + value)) + 2 for name, value in environment.items())
    return FRESH not in environment and differing <= _SET_AFTERWARDS and size < _ROOM


def _own_state() -> dict[str, Any]:
    """Return what a child of this process inherits."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": int(status["Umask"], 8),
        "max_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


@contextmanager
def _adopting() -> Iterator[None]:
    """Make this process adopt grandchildren that lose their parent; one thread of the process at a time."""
    with _adoption:  # the attribute belongs to the process: one thread's end would stop another's adoption
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


class _Sockets(NamedTuple):
    """How a fork server is asked."""

    ours: socket.socket
    theirs: socket.socket
    #: For tasks of jobs, at ``path``.
    door: socket.socket | None = None
    path: str = ""


def _make_sockets(*, with_door: bool) -> _Sockets:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
    if not with_door:
        return _Sockets(ours, theirs)
    path = f"{tempfile.mkdtemp(prefix='hpc-train-warm-')}/socket"  # entered by this user alone
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(path)
    door.listen()
    return _Sockets(ours, theirs, door, path)


def _server() -> ForkServer:
    """Return this process's fork server, started at the first call; it ends with this process or before."""
    with _starting:
        return _chosen[-1] if _chosen else _started_server()


@functools.cache
def _started_server() -> ForkServer:
    if own := os.environ.pop(_OWN_SERVER, None):
        pid, _, path = own.partition(" ")
        return ForkServer(socket.socket(fileno=_SERVER_FILE), int(pid), path)
    return _start_server()


def _start_server(*libraries: str, **more: str) -> ForkServer:
    ours, theirs, door, path = _make_sockets(with_door=True)
    assert door is not None
    environment = _AT_IMPORT | more
    variables = {name: value for name, value in environment.items() if name not in _SET_AFTERWARDS}
    process = subprocess.Popen(  # it ends with the socket
        [sys.executable, __file__, "serve", str(theirs.fileno()), str(door.fileno()), "-" * _ROOM],
        env=variables | _ONE_THREAD | {_LIBRARIES: ",".join(libraries), "ROOM": "-" * _ROOM},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), door.fileno()],
        start_new_session=True,
    )
    theirs.close()
    door.close()
    process.returncode = 0  # ``ForkServer`` waits for it
    return ForkServer(ours, process.pid, path, environment)


@contextmanager
def server_with(*libraries: str, **variables: str) -> Iterator[None]:
    """A while in which commands, ranks and those of jobs are forked from a server of their own.

    It has imported these modules, too, and was started with these variables, such as LD_PRELOAD: processes
    with others start as usual meanwhile.
    """
    if FRESH in os.environ:
        yield
        return
    server = _start_server(*libraries, **variables)
    _chosen.append(server)
    try:
        yield
    finally:
        _chosen.remove(server)
        status = server.close()
    assert status == 0, "all processes were started as usual: the server could not import what it should"


@contextmanager
def door_with(*libraries: str) -> Iterator[str | None]:
    """A while in which another fork server listens at the ``DOOR`` that it yields; None: no rank is forked.

    It has imported these modules, too: for scripts that would take seconds for that at each start.
    """
    if FRESH in os.environ:
        yield None
        return
    server = _start_server(*libraries)
    try:
        yield server.for_jobs()[DOOR]
    finally:
        status = server.close()
    assert status == 0, "scripts were started as usual: the server could not import what it should"


def server_pid() -> int | None:
    """Return the process of this process's fork server, if there is one."""
    return _server().pid if _started_server.cache_info().currsize else None


def close() -> None:
    """End this process's fork server, if there is one."""
    if _started_server.cache_info().currsize:
        _server().close()
        _started_server.cache_clear()


class _WarmPopen(subprocess.Popen[Any]):
    """A process that a fork server forks where that makes no difference to it, else one as usual."""

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Raises ChildProcessError if the status is lost; ``subprocess`` itself would report exit code 0."""
        return os.waitpid(self.pid, wait_flags)

    def poll(self) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    #: What a launcher asks; None: ``_server()``.
    server: ForkServer | None = None
    role = "module"

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        _, _, shell, *pipes, _, gid, gids, uid, umask, new_session, group = rest
        command = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        environment = dict(os.environ if env is None else env)
        is_plain = close_fds and not (shell or pass_fds or executable)
        has_our_ids = (gid, gids, uid, umask, group) == (None, None, None, -1, -1)
        is_rank = getattr(preexec_fn, "__module__", None) == "hpc_train.launchers.rank_processes"
        if not (
            is_plain
            and has_our_ids
            and (is_rank or preexec_fn is None)
            and self._is_warm(command)
            and (server := self.server or _server()).can_change_to(environment)
        ):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        files = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        order = _own_state() | {
            "role": "launcher" if _PARALLEL_RUNS in command else self.role,
            "command": command,
            "environment": environment,
            "folder": os.path.abspath(cwd or "."),  # noqa: PTH100  (follows no link)
            "new_session": new_session,
            "is_rank": is_rank,
        }
        self.pid = server.fork(order, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _is_warm(self, command: Sequence[str]) -> bool:
        return command[:2] == [_PYTHON, "-m"] and command[2] in {*_WARM, _PARALLEL_RUNS}


class _Worker(_WarmPopen):
    """A worker of pytest-xdist, as execnet starts it."""

    role = "worker"

    def _is_warm(self, command: Sequence[str]) -> bool:
        return command[:3] == [_PYTHON, "-u", "-c"]


class _Launcher(_WarmPopen):
    """``hpc-train …``, whose ranks are forked."""

    role = "launcher"

    def _is_warm(self, command: Sequence[str]) -> bool:
        return command[:3] == [_PYTHON, "-m", "hpc_train"]


class _Script(_WarmPopen):
    """A process of ``start_script`` or ``start_module``."""

    def _is_warm(self, command: Sequence[str]) -> bool:
        return True


def start_script(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``python -c SCRIPT …``, forked; ``options`` as of ``subprocess.Popen``."""
    return _start_forked(["-c", script, *arguments], options)


def start_module(name: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``python -m NAME …``, forked; ``options`` as of ``subprocess.Popen``."""
    return _start_forked(["-m", name, *arguments], options)


def _start_forked(words: Sequence[str], options: Mapping[str, Any]) -> subprocess.Popen[str]:
    kind = subprocess.Popen if FRESH in os.environ else _Script
    return kind([sys.executable, *words], **options)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start ``python -m hpc_train …``; ``options`` as of ``subprocess.Popen``."""
    if FRESH in os.environ:
        return subprocess.Popen(command, **options)
    return _Launcher(command, **options)


@contextmanager
def forking_workers() -> Iterator[None]:
    """A while in which pytest-xdist's workers are forked as well: each would import what the others do."""
    if FRESH in os.environ:
        yield
        return
    usual = subprocess.Popen
    subprocess.Popen = _Worker  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = usual  # type: ignore[misc]


def fork_children() -> None:
    """From now on fork what a command starts that is called in this process, as a launcher does."""
    if FRESH not in os.environ:
        subprocess.Popen = _WarmPopen  # type: ignore[misc]


def for_jobs() -> dict[str, str]:
    """Return the variables with which a job is submitted whose ranks are to be forked."""
    return {} if FRESH in os.environ else _server().for_jobs()


def is_forked(pid: int) -> bool:
    """Return True for a process that a fork server has forked: its arguments have room for any others."""
    return len(Path(f"/proc/{pid}/cmdline").read_bytes()) > _ROOM


def task(script: str, *arguments: str) -> list[str]:
    """Return the command of a program's rank that is forked, too, by ``python SCRIPT …``, with ``DOOR`` set.

    The script sets what a Python reads as it starts, and unblocks the signals of a rank.
    """
    command = [sys.executable, script, *arguments]
    if FRESH in os.environ:
        return command
    run = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return forking_task([sys.executable, "-c", run, script, *arguments])


def forking_task(command: Sequence[str]) -> list[str]:
    """Return the command of a task of Slurm that is to fork ``command``, a Python, with ``DOOR`` set."""
    return [sys.executable, "-I", "-S", str(_TASK), *command]


def _serve(end: socket.socket, door: socket.socket | None) -> tuple[dict[str, Any], list[int]]:
    """Fork for each order that comes. Returns in forks only: what to do."""
    own = dict(os.environ)
    while True:
        # No selectors: garbage with a file's number would close another file of a fork's.
        is_task = door is not None and door in select.select([end, door], [], [])[0]
        asking = door.accept()[0] if is_task and door is not None else end
        message, files, _, _ = socket.recv_fds(asking, _MOST_BYTES, 4)
        if is_task:
            order = json.loads(message) if message else None
            if order and _can_change(own, order["environment"]) and os.fork() == 0:
                _supervise(order, asking, files)
                return order, files
            asking.close()
            with suppress(ChildProcessError):  # supervisors that have ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        else:
            if not message:
                os._exit(0)
            ready, written = os.pipe()
            helper = os.fork()
            if helper == 0:
                if pid := os.fork():
                    os.write(written, str(pid).encode())
                    os._exit(0)
                os.close(files[0])
                return json.loads(message), files[1:]
            # With the helper gone, the fork's parent is the subreaper, which waits for this answer.
            os.waitpid(helper, 0)
            with suppress(BrokenPipeError):  # the one who ordered was interrupted
                os.write(files[0], os.read(ready, 100))
            os.close(ready)
            os.close(written)
        for number in files:
            os.close(number)


def _supervise(order: dict[str, Any], task: socket.socket, files: Sequence[int]) -> None:
    """Fork a rank, tell its task the process and how it ended; returns in the rank only."""
    order["parent"] = os.getpid()
    pid = os.fork()
    if pid == 0:
        task.close()
        return
    for number in files:
        os.close(number)
    with suppress(OSError):  # the task was killed
        task.send(str(pid).encode())
        rank = os.pidfd_open(pid)
        if task in select.select([task, rank], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with suppress(OSError):
        task.send(str(status).encode())
    os._exit(0)


def _become(
    order: Mapping[str, Any], files: Sequence[int], end: socket.socket, door: socket.socket | None
) -> _Sockets | None:
    """Become the process that was ordered. Returns sockets in a fork server that it has of its own."""
    if order["new_session"]:
        os.setsid()
    while os.getppid() != order["parent"]:  # until the helper is gone
        if os.getppid() == 1:
            os._exit(1)
        time.sleep(0.0005)
    own: _Sockets | None = None
    server = 0
    if order["role"] in {"launcher", "worker"}:
        own, owner = _make_sockets(with_door=order["role"] == "worker"), os.getpid()
        server = os.fork()
        if server == 0:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner:
                os._exit(1)
            for number in (own.ours.detach(), *files):
                os.close(number)
            end.close()
            if door is not None:
                door.close()
            return own
        own.theirs.close()
        if own.door is not None:
            own.door.close()
    mask = {*order["mask"]}
    if order["is_rank"]:  # as rank_processes does between fork and exec
        mask |= {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != order["parent"]:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.chdir(order["folder"])
    os.umask(order["umask"])
    resource.setrlimit(resource.RLIMIT_NOFILE, order["max_files"])
    for number, file in enumerate(files):
        os.dup2(file, number)
    if own is not None and (number := own.ours.detach()) != _SERVER_FILE:
        os.dup2(number, _SERVER_FILE, inheritable=False)
    os.closerange(_SERVER_FILE + (own is not None), 256)
    end.detach()
    if door is not None:
        door.detach()
    _take_over(order["command"], order["environment"])
    if order["role"] == "launcher":
        _WarmPopen.server = ForkServer(socket.socket(fileno=_SERVER_FILE), server)
        subprocess.Popen = _WarmPopen  # type: ignore[misc]
    elif own is not None:
        os.environ[_OWN_SERVER] = f"{server} {own.path}"
    return None


def _main_option(command: Sequence[str]) -> int:
    """Return where ``-m`` or ``-c`` is."""
    return next(number for number, word in enumerate(command) if word in {"-m", "-c"})


def _take_over(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make arguments, environment and streams those of a Python that was started so."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # Slurm sets TMPDIR for its jobs
    if inductor := sys.modules.get("torch._inductor.config"):  # which reads the variable at its import
        inductor.cpp.cxx = (None, environment.get("CXX", "g++"))
    if "submitit.core.logger" in sys.modules:  # the same
        logging.getLogger("submitit").setLevel(environment.get("SUBMITIT_LOG_LEVEL", "INFO").upper())
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, end_of_arguments, variables, end_of_variables = map(int, fields[45:49])
    for begin, end, words in (
        (arguments, end_of_arguments, command),
        (variables, end_of_variables, [f"{name}={value}" for name, value in environment.items()]),
    ):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
    sys.orig_argv = list(command)
    at = _main_option(command)
    sys.argv = [command[at], *command[at + 2 :]]
    folder = "" if command[at] == "-c" else str(Path.cwd())
    own = [] if environment.get("PYTHONSAFEPATH") else [folder]
    sys.path[:0] = own + [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    importlib.import_module(
        "hpc_train.package_path"
    ).add_late_places()  # as the package's import does, which is done here
    is_unbuffered = bool(environment.get("PYTHONUNBUFFERED")) or "-u" in command[:at]
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        ours = getattr(sys, name)
        errors = "surrogateescape" if number < 2 and _UTF8_MODE in environment.items() else ours.errors
        setattr(sys, name, _stream(number, ours, mode, errors, is_unbuffered))
        setattr(sys, f"__{name}__", getattr(sys, name))


def _stream(
    number: int, ours: io.TextIOWrapper, mode: str, errors: str, is_unbuffered: bool
) -> io.TextIOWrapper:
    """Return what Python makes of a standard stream as it starts; ``ours`` is this process's own."""
    raw = io.FileIO(number, mode, closefd=False)
    raw.name = ours.name
    buffered = io.BufferedReader(raw) if mode == "r" else raw if is_unbuffered else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        buffered,  # type: ignore[arg-type]
        ours.encoding,
        errors,
        line_buffering=not is_unbuffered and (number == 2 or raw.isatty()),
        write_through=is_unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def _run_as_main(command: Sequence[str], imports: Any) -> NoReturn:
    """``imports``: tests/warm_imports.py."""
    option, text = command[_main_option(command) :][:2]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__annotations__ = {}
    code: object = 0
    is_interrupted = False
    try:
        if option == "-m":
            imports.run_as_main(text)
        else:
            exec(compile(text, "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        is_interrupted = isinstance(error, KeyboardInterrupt)
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)  # Python's own end takes a second where torch is imported


def _use_large_pages() -> None:
    """Put this process's memory into pages of 2 MiB where Linux can: a fork copies the list of its pages."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        region, rights, *_, name = f"{line} ".split(" ", 5)
        begin, end = (int(address, 16) for address in region.split("-"))
        begin, end = -(-begin // _LARGE_PAGE) * _LARGE_PAGE, end // _LARGE_PAGE * _LARGE_PAGE
        if rights == "rw-p" and name.strip() in {"", "[heap]"} and begin < end:
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def main() -> None:
    gc.disable()
    # By this name: forks import the package ``tests`` from a snapshot. Python has put this folder first; with
    # its option -P, forks would have that option too.
    imports: Any = importlib.import_module("warm_imports")
    sys.path.remove(str(Path(__file__).parent))
    imports.import_all()
    environment = dict(os.environ)
    for name in filter(None, os.environ[_LIBRARIES].split(",")):
        importlib.import_module(name)
    os.environ.clear()  # Lightning sets variables
    os.environ.update(environment)
    gc.freeze()  # else each fork's collections write to all objects, which copies their pages
    gc.enable()
    _use_large_pages()
    for name in (*_ONE_THREAD, "ROOM", _LIBRARIES):
        del os.environ[name]
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork loses other threads"
    end: socket.socket = socket.socket(fileno=int(sys.argv[2]))
    door: socket.socket | None = socket.socket(fileno=int(sys.argv[3]))
    while True:
        order, files = _serve(end, door)
        own = _become(order, files, end, door)
        if own is None:
            break
        end, door = own.theirs, own.door
    imports.match_sys_path()
    _run_as_main(order["command"], imports)


if __name__ == "__main__":
    main()
elif _OWN_SERVER in os.environ:
    _server()
