"""The ``hpc-train`` command. ``command_options`` declares its subcommands, imported when they run."""

from __future__ import annotations

import gc
import io
import os
import sys

from hpc_train.cli import command_options, replay_options  # noqa: F401
from hpc_train.cli.command_line import app
from hpc_train.errors import ExitCode
from hpc_train.run.processes import keep_exit_statuses

#: Number of new objects that triggers Python's garbage collector. The default of 700 makes `status` of
#: thousands of runs a fifth slower: they create many objects, which live until the command ends.
_GARBAGE_THRESHOLD = 100_000


def _open_closed_streams() -> None:
    """Redirect closed standard streams (``hpc-train status >&-``) to the null device.

    Otherwise the next file opened, here or in a rank, gets the stream's number and receives its output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode if the locale has another encoding.

    Otherwise file names and texts raise errors or change characters. Child processes inherit the mode.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if os.environ.pop("PYTHONIOENCODING", None) and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it remains only for this process's own output


def main() -> None:
    """Run the command line and exit."""
    _use_utf8()
    # Files that other users may write are not executed (run.trust), so no process here may create such files.
    os.umask(os.umask(0o077) | 0o022)
    _open_closed_streams()
    keep_exit_statuses()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    try:
        app()
    except KeyboardInterrupt:  # while modules were being imported
        sys.exit(ExitCode.INTERRUPTED)
    finally:
        gc.freeze()  # at its exit, Python would look through all objects for garbage, several times
