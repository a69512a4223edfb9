"""A task of Slurm whose rank is forked (tests/warm.py): ``python -I -S warm_task.py PYTHON ARGUMENT…``.

It imports little: each rank of the tests' jobs has one.
"""

from __future__ import annotations

import _socket
import os
import signal
import sys

_DOOR = "HPC_TRAIN_TEST_WARM"


def be_task(command: list[str]) -> None:
    """Be a task of Slurm whose rank is forked, where that makes no difference to it; else become Python."""
    import array
    import json
    import resource

    environment = {name: value for name, value in os.environ.items() if name != _DOOR}
    umask = os.umask(0)
    os.umask(umask)
    order = {
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": umask,
        "max_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "role": "module",
        "command": command,
        "environment": environment,
        "folder": os.getcwd(),  # noqa: PTH109  (pathlib takes as long as all else here)
        "new_session": True,
        "is_rank": True,
    }
    message, files = json.dumps(order).encode(), array.array("i", (0, 1, 2))
    try:
        end = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        end.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 2 * len(message))
        end.connect(os.environ[_DOOR])
        end.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
        pid = int(end.recv(100))  # ValueError: it declined
        os.set_inheritable(end.fileno(), True)
        # Nothing that looks for ranks is to find this process; the test's cluster does, by these.
        kept = {name: environment[name] for name in ("SLURM_CONF", "SLURMD_NODENAME") if name in environment}
        words = ["wait", str(end.fileno()), str(pid)]
        os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, *words], kept)
    except (OSError, ValueError):
        os.execve(command[0], command, environment)


def wait(supervisor: _socket.socket, pid: int) -> None:
    """Pass signals on to the rank, and end as it ends."""

    def pass_on(number: int, _: object) -> None:
        try:  # noqa: SIM105  (contextlib is not imported)
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE}:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # some may have come before there was a rank
    status = int(supervisor.recv(100))
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        wait(_socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    be_task(sys.argv[1:])
