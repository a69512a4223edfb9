"""The command line that commands register with, and the exit code of each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from hpc_train import __version__
from hpc_train.console import redirect_to_devnull, say
from hpc_train.errors import ExitCode, HpcTrainError, UserError

_O = TypeVar("_O")

#: The key of a field's metadata that has its settings on the command line, see ``command_options``.
SETTINGS = "command line"
#: A command's options → imports its function.
FUNCTIONS: dict[type[Any], Callable[[], Callable[[Any], int]]] = {}

app = typer.Typer(
    name="hpc-train",
    help="Train PyTorch models from one YAML file, on a laptop or on a cluster.",
    epilog="RUN is a run's id, name/id, its folder, or an experiment's name (then all its runs).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str, *, module: str | None = None) -> Callable[[type[_O]], type[_O]]:
    """Register a command with the options of the decorated dataclass, whose docstring is its help.

    Its function is called with them and returns an exit code: the one called like the command, in the
    module of this package called like it or ``module``, which is imported when the command runs.
    """

    def register(options: type[_O]) -> type[_O]:
        FUNCTIONS[options] = partial(_function, module or name, name)

        def run(**values: Any) -> None:
            values = {key: value for key, value in values.items() if value is not None}  # else: the default
            sys.exit(exit_code_of(lambda: FUNCTIONS[options]()(options(**values))))

        run.__doc__ = options.__doc__
        run.__signature__ = _signature(options)  # type: ignore[attr-defined]
        app.command(name)(run)
        return options

    return register


def _function(module: str, name: str) -> Callable[[Any], int]:
    function: Callable[[Any], int] = getattr(import_module(f"hpc_train.cli.{module}"), name)
    return function


def _signature(options: type[Any]) -> inspect.Signature:
    """Return a function's signature from which typer builds the options of a command."""
    hints, kind = get_type_hints(options), inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(part.name, kind, default=_parameter(part), annotation=hints[part.name])
        for part in fields(options)
    ]
    return inspect.Signature(parameters)


def _parameter(part: Field[Any]) -> Any:
    """Return typer's declaration of a field: an option if its settings have ``names``, else an argument."""
    settings = dict(part.metadata[SETTINGS])
    default = ... if part.default is MISSING else part.default
    if part.default_factory is not MISSING:
        default = None
    names = settings.pop("names", None)
    if names is None:
        return typer.Argument(default, **settings)
    return typer.Option(default, *(names or [f"--{part.name.replace('_', '-')}"]), **settings)


def exit_code_of(body: Callable[[], int]) -> int:
    """Run a command's body and return the exit code of the process; errors are printed."""
    try:
        return int(body())
    except UserError as error:
        say(str(error))
        return int(error.exit_code)
    except HpcTrainError as error:
        say(f"{type(error).__name__}: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        redirect_to_devnull(sys.stdout)  # the reader of the output is gone
        return int(ExitCode.IO)
    except OSError as error:
        say(_problem(error))
        return int(ExitCode.IO)
    except Exception as error:
        from hpc_train.run.refusals import refusal
        from hpc_train.run.tracebacks import users_traceback

        if limited := refusal(error):
            say(limited)
            return int(ExitCode.FAILED)
        shown = users_traceback(error)
        if shown is None:
            raise
        say(f"{shown}\na plug-in of yours raised this when hpc-train loaded or called it; fix it there")
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
