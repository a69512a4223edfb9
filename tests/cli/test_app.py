"""What holds for every command: exit codes, streams, and what may be imported."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer.main
from PIL import Image

from hpc_train import __version__
from hpc_train.cli import status as status_module
from hpc_train.cli.app import app
from hpc_train.cli.command_line import FUNCTIONS, exit_code_of
from hpc_train.cli.command_options import SubmitOptions
from hpc_train.paths import runs_root
from tests.cli.commands import REPOSITORY, hpc_train, python, succeeded
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import begin, queued_run
from tests.waiting import HANG_LIMIT_S

_NEVER = {"torch", "torchvision", "timm", "wandb", "numpy", "safetensors", "submitit"}


def _imported(*arguments: str | Path) -> set[str]:
    """Return the top-level packages that a command imports in its own process."""
    done = python("-X", "importtime", "-m", "hpc_train", *arguments)
    assert done.code == 0, done.err
    return {name.partition(".")[0] for name in _modules(done.err)}


def _modules(listing: str) -> set[str]:
    """Return the modules that ``-X importtime`` lists."""
    lines = [line for line in listing.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_help_imports_nothing_but_typer_and_the_standard_library() -> None:
    assert not _imported("--help") & (_NEVER | {"pydantic", "yaml", "rich", "platformdirs"})


@pytest.mark.parametrize("command", [["validate"], ["plan", "--json"], ["submit", "--local", "--dry-run"]])
def test_what_a_login_node_runs_imports_no_torch(file: Path, command: list[str]) -> None:
    imported = _imported(command[0], file, *command[1:])
    assert "pydantic" in imported, "the listing works"
    assert not imported & _NEVER


def test_status_imports_no_schema_and_no_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what a person waits for most often, and reads small JSON files only."""
    programs = put_programs_first(tmp_path, monkeypatch)
    jobs = (("12", "PENDING", "JobHeldUser"), ("13", "RUNNING", "None"))
    rows = ("\x1f".join([*job, "0", "N/A", "N/A", "0", "", "small", "x", "\n"]) for job in jobs)
    programs.put("squeue", f"printf '%s' '{''.join(rows)}'")
    queued_run(runs_root(), "12")
    begin(queued_run(runs_root(), "13", "other"), "13")
    done = python("-X", "importtime", "-m", "hpc_train", "status")
    assert "held" in done.out and "running" in done.out
    modules = _modules(done.err)
    packages = {name.partition(".")[0] for name in modules}
    assert not packages & (_NEVER | {"yaml", "rich", "stamina"})
    ours = {name for name in modules if name.startswith("hpc_train.")}
    assert "hpc_train.launchers.slurm.queue_status" in ours, "the listing works"
    starting = {"run.create", "launchers.slurm.job_arrays"}
    starting |= {f"experiment.{name}" for name in ("config.schema", "plan", "validate", "data_facts")}
    assert not ours & {f"hpc_train.{name}" for name in starting}


def test_each_command_has_a_function_that_takes_its_options() -> None:
    assert len(FUNCTIONS) == len(app.registered_commands)
    for options, function in FUNCTIONS.items():
        parameters = list(inspect.signature(function(), eval_str=True).parameters.values())
        assert parameters[0].annotation is options
        assert all(other.default is not inspect.Parameter.empty for other in parameters[1:])


def test_options_have_defaults_and_no_other_names() -> None:
    options = SubmitOptions(file=Path("exp.yaml"), new=True)
    assert (options.new, options.jobs, options.launcher, options.overrides) == (True, 1, None, [])
    assert options.overrides is not SubmitOptions(file=Path("exp.yaml")).overrides
    with pytest.raises(TypeError, match="file is missing"):
        SubmitOptions(new=True)
    with pytest.raises(TypeError, match="unknown job"):
        SubmitOptions(file=Path("exp.yaml"), job=1)


def test_the_version_is_printed() -> None:
    done = hpc_train("--version")
    assert (done.code, done.out) == (0, f"hpc-train {__version__}\n")


def test_a_users_mistake_prints_its_message_alone() -> None:
    done = hpc_train("validate", "no-such-file.yaml")
    assert done.code == 65
    assert done.out == ""
    assert done.err.startswith("no-such-file.yaml: can't be read")
    assert len(done.err.splitlines()) == 1


def test_escape_sequences_of_a_name_do_not_reach_the_terminal() -> None:
    done = hpc_train("status", "\x1b[31mred")
    assert done.code == 2
    assert "\x1b" not in done.err
    assert r"\x1b[31mred" in done.err


def test_a_mistake_of_ours_keeps_its_whole_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "status", Mock(side_effect=KeyError("ours")))
    with pytest.raises(KeyError, match="ours"):
        exit_code_of(status_module.status)


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (
            OSError(28, "No space left on device", "runs"),
            r"runs: the disk is full \(No space left on device\); free some space there\n",
        ),
        (OSError(5, "Input/output error"), r"input/output: Input/output error \(mock\.py:\d+\)\n"),
    ],
)
def test_an_error_of_the_disk_exits_74_without_traceback(
    error: OSError, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file, it has the line that raised it."""
    monkeypatch.setattr(status_module, "status", Mock(side_effect=error))
    done = hpc_train("status")
    assert done.code == 74 and re.fullmatch(pattern, done.err), done.err


def test_a_removed_current_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.delenv("HPC_TRAIN_RUNS")
    (tmp_path / "gone").rmdir()
    done = hpc_train("status")
    assert done.code == 74
    assert done.err == "the current folder has been removed; change to one that exists\n"


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(status_module, "status", interrupted)
    # A shell's background job, as a CI may be, ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = hpc_train("status")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.code, done.out, done.err) == (130, "", "")


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_train", "schema"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (74, b"")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_changes_nothing_but_what_is_shown(file: Path, closed: str) -> None:
    command = f"{sys.executable} -m hpc_train"
    done = subprocess.run(
        ["bash", "-c", f"{command} status {closed}; {command} validate {file} {closed}"],
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert ("fine" in done.stdout + done.stderr) == ("2>&-" not in closed)


def test_names_of_files_are_utf_8_in_a_locale_without_it(file: Path, tmp_path: Path) -> None:
    """C without UTF-8 mode, and languages of ISO 8859: the command starts again in UTF-8 mode."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = tmp_path / "dé" / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / "ñ.png")
    data = f"data={{name: imagefolder, root: {tmp_path / 'dé'}, image_size: 8}}"
    sizes = ("optimization.global_batch_size=2", "optimization.micro_batch_size=1")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_train", "plan", file, data, *sizes, "--local", "--json"],
        env=os.environ
        | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"Error" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_submit_names_the_folders_owner(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "shared"
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(runs))
    done = succeeded("plan", file, "--local", "--json")
    name = json.loads(done.out)["name"]
    (runs / name).mkdir(mode=0o700, parents=True)
    os.chown(runs / name, 12345, -1)
    loads = Mock(side_effect=AssertionError("a file in it was opened"))
    monkeypatch.setattr("hpc_train.cli.submit.is_run", loads)
    done = hpc_train("submit", file, "--local")
    assert done.code != 0
    assert f"{runs / name}: belongs to another user (uid 12345)" in done.err
    assert "give the experiment another name" in done.err


# Commands that messages and docs tell people to run.


_COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
_REPOSITORY = Path(__file__).parents[2]
#: In backticks, a line of a code block, or a substitution in one; it ends where the shell begins another.
_COMMAND = re.compile(r"(?:`|^\$ |\$\()hpc-train ([a-z]+)((?: [^`\n&|;$]*)?)", re.MULTILINE)
_OPTION = re.compile(r"(?<= )--?[a-z][a-z-]*")


def _texts() -> Iterator[Path]:
    yield from (_REPOSITORY / "hpc_train").rglob("*.py")
    yield from (_REPOSITORY / "slurm_templates").rglob("*.j2")
    # One lists what is still missing, the other draws ``hpc-train submit ─ sbatch --hold``.
    skipped = {"reliability.md", "architecture.md"}
    yield from (page for page in (_REPOSITORY / "docs").glob("*.md") if page.name not in skipped)
    yield from _REPOSITORY.glob("*.md")


def _unknown(text: str) -> list[str]:
    """Return the commands and options in ``text`` that can't be typed."""
    found = []
    for command, rest in _COMMAND.findall(text):
        if command not in _COMMANDS:
            found.append(command)
            continue
        options = {option for each in _COMMANDS[command].params for option in each.opts} | {"--help"}
        found += [f"{command} {option}" for option in _OPTION.findall(rest) if option not in options]
    return found


def test_every_command_that_is_named_can_be_typed() -> None:
    unknown = {path.name: _unknown(path.read_text(encoding="utf-8")) for path in _texts()}
    assert {name: commands for name, commands in unknown.items() if commands} == {}


def test_a_command_or_option_that_cannot_be_typed_is_seen() -> None:
    assert _unknown("see `hpc-train begin` or `hpc-train submit FILE --fast`") == ["begin", "submit --fast"]
    assert _unknown("$ hpc-train submit exp.yaml --local -x") == ["submit -x"]
    assert _unknown('$ hpc-train logs -n 1 "$(hpc-train compare a -z | sed -n 1p)"') == ["compare -z"]
