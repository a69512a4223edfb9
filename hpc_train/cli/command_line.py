"""The command line that commands register with, and the exit code of each."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from hpc_train import __version__
from hpc_train.console import redirect_to_devnull, say_text
from hpc_train.errors import ExitCode, HpcTrainError, UserError, printable

_O = TypeVar("_O", bound="Options")

#: A command's options → imports its function.
FUNCTIONS: dict[type[Any], Callable[[], Callable[[Any], int]]] = {}

#: Command → its options.
OPTIONS: dict[str, type[Any]] = {}

#: click's errors about the words of a command line, and those about an option's value.
_UNPARSED, _INVALID = {"UsageError", "NoSuchOption", "MissingParameter"}, "BadParameter"
_NEWEST = re.compile(r"\A-([1-9]\d*)\Z")


#: Names of the positional parameters that are runs.
RUN_PARAMETERS = ("run", "runs", "runs_and_overrides")


class _Group(TyperGroup):
    """All commands; ``corrections`` answers a word that is not one of them, or an option before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the options before the command off."""
        with _answering(ctx, self, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Look up the command."""
        with _answering(ctx, self, args):
            return super().resolve_command(ctx, args)


class _Command(TyperCommand):
    """A command; ``-1`` may be a run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments and options."""
        with _answering(ctx, ctx.parent.command, [str(self.name), *args]):
            return super().parse_args(ctx, self._with_newest(args))

    def _with_newest(self, args: Sequence[str]) -> list[str]:
        """Replace ``-1``, which the parser takes for an option, by ``latest-1``."""
        options = [option for option in self.params if option.param_type_name == "option"]
        with_value = {
            name for option in options if not getattr(option, "is_flag", False) for name in option.opts
        }
        if not any(parameter.name in RUN_PARAMETERS for parameter in self.params):
            return list(args)
        return [
            word if before in with_value else _NEWEST.sub(r"latest-\1", word)
            for before, word in zip(["", *args], args, strict=False)
        ]


@contextmanager
def _answering(ctx: Any, group: Any, words: Sequence[str]) -> Iterator[None]:
    """Replace click's message on a command line that can't be parsed by the command line that was meant."""
    words = list(words)  # the parser empties it
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if ctx.resilient_parsing or kind not in {*_UNPARSED, _INVALID}:
            raise
        from hpc_train.cli import corrections

        if kind == _INVALID:
            text = corrections.bad_value(getattr(error, "param", None), words)
        else:
            text = corrections.answer(group.commands, words)
        if text:
            ctx.fail(printable(text))
        raise


app = typer.Typer(
    name="hpc-train",
    cls=_Group,
    help="Train PyTorch models from one YAML file, on a laptop or on a cluster.",
    epilog="RUN is a run's id or the start of it, name/id, its folder, latest (or -1; -2 is the one before), "
    "or an experiment's name (then all its runs).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Parameter(NamedTuple):
    """An argument or option of a command line."""

    #: ``...``: required; ``list``: an empty list.
    default: Any
    #: An option's spellings, if it is not called like its attribute; None for a positional argument.
    names: Sequence[str] | None
    #: Further arguments of ``typer.Argument`` or ``typer.Option``.
    settings: dict[str, Any]


class Options:
    """The arguments and options of a command: a subclass's attributes that are ``Parameter`` objects."""

    def __init__(self, **values: Any) -> None:
        for name, parameter in self.parameters().items():
            if name not in values and parameter.default is ...:
                raise TypeError(f"{type(self).__name__}: {name} is missing")
            default = [] if parameter.default is list else parameter.default
            setattr(self, name, values.pop(name, default))
        if values:
            raise TypeError(f"{type(self).__name__}: unknown {', '.join(values)}")

    @classmethod
    def parameters(cls) -> dict[str, Parameter]:
        """Return the parameters by name, those of base classes first."""
        attributes = [item for base in reversed(cls.__mro__) for item in vars(base).items()]
        return {name: value for name, value in attributes if isinstance(value, Parameter)}


def command(name: str, *, module: str | None = None) -> Callable[[type[_O]], type[_O]]:
    """Register a command with the decorated class of options, whose docstring is its help.

    Its function is called with the options and returns an exit code: the one called like the command, in the
    module of this package called like it or ``module``, which is imported when the command runs.
    """

    def register(options: type[_O]) -> type[_O]:
        FUNCTIONS[options] = partial(_function, module or name, name)
        OPTIONS[name] = options

        def run(**values: Any) -> None:
            values = {key: value for key, value in values.items() if value is not None}  # else: the default
            sys.exit(exit_code_of(lambda: FUNCTIONS[options]()(options(**values))))

        run.__doc__ = options.__doc__
        run.__signature__ = _signature(options)  # type: ignore[attr-defined]
        app.command(name, cls=_Command)(run)
        return options

    return register


def _function(module: str, name: str) -> Callable[[Any], int]:
    function: Callable[[Any], int] = getattr(import_module(f"hpc_train.cli.{module}"), name)
    return function


def _signature(options: type[Options]) -> inspect.Signature:
    kinds = {
        name: kind
        for base in reversed(options.__mro__)
        for name, kind in inspect.get_annotations(base).items()
    }
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_declaration(name, parameter),
            annotation=kinds[name],
        )
        for name, parameter in options.parameters().items()
    ]
    return inspect.Signature(parameters)


def _declaration(name: str, parameter: Parameter) -> Any:
    default = None if parameter.default is list else parameter.default
    if parameter.names is None:
        return typer.Argument(default, **parameter.settings)
    return typer.Option(default, *(parameter.names or [f"--{name.replace('_', '-')}"]), **parameter.settings)


def exit_code_of(body: Callable[[], int]) -> int:
    """Run a command's body and return the exit code of the process; errors are printed."""
    try:
        return int(body())
    except HpcTrainError as error:
        say_text(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
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
        from hpc_train.run.tracebacks import refusal, users_traceback

        if limited := refusal(error):
            say_text(limited)
            return int(ExitCode.FAILED)
        shown = users_traceback(error)
        if shown is None:
            raise
        say_text(f"{shown}\na plug-in of yours raised this when hpc-train loaded or called it; fix it there")
        return int(ExitCode.FAILED)
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            redirect_to_devnull(sys.stdout)


def _problem(error: OSError) -> str:
    if not error.filename:
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the current folder has been removed; change to one that exists"
    from hpc_train.run.storage_errors import error_words

    return error_words(error)


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
