"""The command line that commands register with, and the exit code of each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from hpc_train import __version__
from hpc_train.console import redirect_to_devnull, say_text
from hpc_train.errors import ExitCode, HpcTrainError, UserError

_P = ParamSpec("_P")

app = typer.Typer(
    name="hpc-train",
    help="Train PyTorch models from one YAML file, on a laptop or on a cluster.",
    epilog="RUN is a run's id, name/id, its folder, or an experiment's name (then all its runs).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(body: Callable[_P, int]) -> Callable[_P, None]:
    """Register a command whose body returns an exit code; a user error prints no traceback."""

    @functools.wraps(body)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        sys.exit(exit_code_of(lambda: body(*args, **kwargs)))

    return app.command()(run)


def exit_code_of(body: Callable[[], int]) -> int:
    """Run a command's body and return the exit code of the process; errors are printed."""
    try:
        return int(body())
    except UserError as error:
        say_text(str(error))
        return int(error.exit_code)
    except HpcTrainError as error:
        say_text(f"{type(error).__name__}: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        redirect_to_devnull(sys.stdout)  # the reader of the output is gone
        return int(ExitCode.IO)
    except OSError as error:
        say_text(_problem(error))
        return int(ExitCode.IO)
    except Exception as error:
        from hpc_train.run.refusals import refusal
        from hpc_train.run.tracebacks import users_traceback

        if limited := refusal(error):
            say_text(limited)
            return int(ExitCode.FAILED)
        shown = users_traceback(error)
        if shown is None:
            raise
        say_text(f"{shown}\na plug-in of yours raised this when hpc-train loaded or called it; fix it there")
        return int(ExitCode.FAILED)
    finally:
        _flush()


def _problem(error: OSError) -> str:
    if not error.filename:
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the current folder has been removed; change to one that exists"
    from hpc_train.run.storage_errors import error_words

    return error_words(error)


def _flush() -> None:
    """Discard output that Python would flush at exit, which fails if the terminal is gone."""
    try:
        sys.stdout.flush()
    except OSError:
        redirect_to_devnull(sys.stdout)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"hpc-train {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version."),
    ] = False,
) -> None:
    """Train PyTorch models from one YAML file, on a laptop or on a cluster."""
