"""Executed by srun for each rank: blocks signals, opens the rank's log, executes Python.

``python -I -S …/rank.py PYTHON ARGUMENT…``. A separate file that uses only the standard library, so that
signals are blocked before the first one can arrive: a signal during Python's imports would end the job
unsaved. A failure here must not lose the rank.

With ``HPC_TRAIN_STANDBY`` the rank is of a later attempt: it waits for it (``launchers.entry``), and its log
is opened then.
"""

import os
import signal
import stat
import sys
import time

#: Inherited from the environment of the submission; they would override Slurm's variables.
STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def main(command: list[str]) -> None:
    """Become ``command``, with stop signals blocked; exit with code 127 if it can't start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
    os.environ["HPC_TRAIN_RANK_START"] = repr(time.time())
    for name in STALE:
        os.environ.pop(name, None)
    if "HPC_TRAIN_STANDBY" in os.environ:
        folder = os.environ["HPC_TRAIN_RUN_FOLDER"]
        command = [*command[:1], "-u", "-m", "hpc_train.launchers.entry", folder]
    else:
        try:
            redirect()
        except (OSError, KeyError) as error:
            sys.stderr.write(f"rank.py: no log of its own, continuing without: {error!r}\n")
    try:
        os.execvp(command[0], command)
    except (OSError, IndexError) as error:
        sys.stderr.write(f"rank.py: {' '.join(command)}: can't be started: {error}\n")
        sys.exit(127)


def redirect() -> None:
    """Redirect output to the rank's log, and input from /dev/null."""
    rank = int(os.environ["SLURM_PROCID"])
    folder = os.path.join(os.environ["HPC_TRAIN_RUN_FOLDER"], "attempts", os.environ["HPC_TRAIN_ATTEMPT"])  # noqa: PTH118
    path = os.path.join(folder, f"rank-{rank}.log")  # noqa: PTH118
    # As run.files does: a pipe in the log's place would wait for a reader.
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    if not stat.S_ISREG(os.fstat(log).st_mode):
        os.close(log)
        raise OSError(f"{path}: not a regular file")
    os.set_blocking(log, True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


if __name__ == "__main__":
    main(sys.argv[1:])
