"""What a shell offers on a Tab: in this process, and in a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli import completion as completion_module
from hpc_train.cli.completion_scripts import SCRIPTS
from hpc_train.paths import runs_root
from tests.calls import work_of
from tests.cli.commands import REPOSITORY, hpc_train
from tests.waiting import HANG_LIMIT_S

_BREAKS = " \t\n\"'><=;|&(:"


def _offers(line: str, breaks: str = "") -> tuple[str, list[str]]:
    """Return how the candidates are inserted, and the candidates."""
    done = hpc_train("complete", line, "--breaks", breaks)
    assert done.code == 0, done.err
    how, *names = done.out.splitlines()
    return how, names


def _folders(*names: str) -> None:
    for name in names:
        (runs_root() / name).mkdir(parents=True)


def test_commands_and_options_are_offered() -> None:
    assert _offers("hpc-train su") == ("words", ["submit"])
    assert "watch" in _offers("hpc-train ")[1] and "complete" not in _offers("hpc-train c")[1]
    assert _offers("hpc-train plan --dev") == ("words", ["--devices"])
    assert "--local" not in _offers("hpc-train plan --local --")[1], "given already"
    assert _offers("hpc-train --ver") == ("words", ["--version"])
    assert _offers("hpc-train nothing x") == ("open", [])


def test_values_of_options_are_offered() -> None:
    assert _offers("hpc-train init --task seg") == ("words", ["segmentation"])
    assert _offers("hpc-train init --from dig") == ("words", ["digits"])
    assert _offers("hpc-train submit x.yaml --launcher=lo") == ("words", ["--launcher=local"])
    assert _offers("hpc-train compare a --over optimization.steps")[1] == ["optimization.steps"]
    assert _offers("hpc-train completion f") == ("words", ["fish"])


def test_experiment_files_and_folders_are_offered() -> None:
    for name in ("exp.yaml", "exp two.yml", "exp.txt", ".exp.yaml"):
        Path(name).touch()
    Path("exps").mkdir()
    Path("exps/a.yaml").touch()
    assert _offers("hpc-train submit ex") == ("files", ["exp two.yml", "exp.yaml", "exps/"])
    assert _offers("hpc-train submit --local --devices 2 exps/") == ("files", ["exps/a.yaml"])
    assert _offers("hpc-train submit exps") == ("folders", ["exps/"])
    assert _offers(r"hpc-train submit exp\ t") == ("files", ["exp two.yml"])
    assert _offers('hpc-train submit "exp t', _BREAKS) == ("files", ["exp two.yml"])
    assert _offers("hpc-train report a -o exp.t") == ("files", ["exp.txt"])


def test_keys_and_their_values_are_offered_after_the_file() -> None:
    how, names = _offers("hpc-train submit exp.yaml optimization.optimizer.")
    assert how == "open" and {"optimization.optimizer.lr=", "optimization.optimizer.name="} <= set(names)
    assert _offers("hpc-train submit exp.yaml precision=bf") == ("words", ["precision=bf16"])
    assert _offers("hpc-train submit exp.yaml precision=bf", _BREAKS) == ("words", ["bf16"])
    assert _offers("hpc-train submit exp.yaml determ", _BREAKS) == ("open", ["deterministic="])
    assert _offers("hpc-train submit exp.yaml deterministic=")[1] == [
        "deterministic=false", "deterministic=true",
    ]  # fmt: skip
    assert "parallel.strategy=fsdp" in _offers("hpc-train plan exp.yaml parallel.strategy=")[1]


def test_runs_experiments_and_keys_are_offered() -> None:
    _folders("small/0123456789", "small/0199999999", "sweep/abcdef0123", ".code/x", "small/.slurm")
    assert _offers("hpc-train logs 01") == ("words", ["0123456789", "0199999999"])
    assert _offers("hpc-train logs s") == ("words", ["small", "sweep"])
    assert _offers("hpc-train logs ") == ("words", ["small", "sweep"])
    assert _offers("hpc-train cancel small small/012") == ("words", ["small/0123456789"])
    assert _offers("hpc-train resume s")[1][0] == "seed="
    assert {"small", "slurm.nodes="} <= set(_offers("hpc-train resume s")[1])


def test_no_run_is_opened_and_candidates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_module, "_MAX_CANDIDATES", 5)
    monkeypatch.setattr(completion_module, "_MAX_ENTRIES", 20)
    _folders(*(f"big/{number:04}" for number in range(40)), "big2/x")
    work = work_of(lambda: _offers("hpc-train logs "), monkeypatch)
    assert not [path for path in work.opened if str(runs_root()) in path]
    assert len(_offers("hpc-train logs big/")[1]) == 5


def test_names_that_would_act_on_a_terminal_are_not_offered() -> None:
    _folders("small/01\x1b[31m", "small/02\n03", "small/04", "small/05;id", "small/06 a", "small/07$(id)")
    assert _offers("hpc-train logs 0") == ("words", ["04"])


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_each_shell_is_printed(shell: str) -> None:
    done = hpc_train("completion", shell)
    assert done.code == 0 and " complete " in done.out


def test_an_unknown_shell_is_an_error() -> None:
    done = hpc_train("completion", "csh")
    assert done.code == 2 and "bash, zsh, fish" in done.err


_ASK = """
hpc-train() { "$PYTHON" -m hpc_train "$@"; }
eval "$(hpc-train completion bash)"
complete -p hpc-train
ask() {
    COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDS=(hpc-train) COMP_CWORD=0
    _hpc_train
    printf '%s|' "${COMPREPLY[@]}"; echo
}
ask "hpc-train sub"
ask "hpc-train submit exp"
ask "hpc-train submit exp.yaml precision=bf"
ask "hpc-train logs 01"
"""


@pytest.mark.slow
def test_a_real_bash_completes() -> None:
    _folders("small/0123456789")
    Path("exp.yaml").touch()
    done = subprocess.run(
        ["bash", "--norc", "-c", _ASK],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_LIMIT_S,
    )
    assert done.stdout.splitlines() == [
        "complete -F _hpc_train hpc-train", "submit|", "exp.yaml|", "bf16|", "0123456789|",
    ]  # fmt: skip
