"""What a shell offers on a Tab: in this process, and in a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli import completion
from hpc_train.paths import runs_root
from tests.calls import work_of
from tests.cli.commands import REPOSITORY, hpc_train
from tests.waiting import HANG_LIMIT_S


def _offers(line: str, shell: str = "fish") -> list[str]:
    """Return the candidates for the last word of a line; bash passes ``=`` as a word of its own."""
    variables = {"_HPC_TRAIN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    words = line.replace("=", " = ").split(" ")
    variables |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | {"_TYPER_COMPLETE_ARGS": line}).items():
            patch.setenv(name, value)
        done = hpc_train()
    assert done.code == 0, done.err
    return [candidate.partition("\t")[0] for candidate in done.out.splitlines() if candidate]


def _folders(*names: str) -> None:
    for name in names:
        (runs_root() / name).mkdir(parents=True)


def test_commands_options_and_their_values_are_offered() -> None:
    assert _offers("hpc-train su") == ["submit"]
    assert _offers("hpc-train plan --dev") == ["--devices"]
    assert _offers("hpc-train init --task seg") == ["segmentation"]
    assert _offers("hpc-train init --from dig") == ["digits", "digits-wandb"]
    assert _offers("hpc-train submit x.yaml --launcher lo") == ["local"]
    assert _offers("hpc-train compare a --over optimization.steps") == ["optimization.steps"]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_keys_and_their_values_are_offered_after_the_file(shell: str) -> None:
    found = _offers("hpc-train submit exp.yaml optimization.optimizer.", shell)
    assert {"optimization.optimizer.lr=", "optimization.optimizer.name="} <= set(found)
    start = "" if shell == "bash" else "precision="
    assert _offers("hpc-train submit exp.yaml seed=1 precision=bf", shell) == [f"{start}bf16"]
    assert f"{start}bf16" in _offers("hpc-train submit exp.yaml seed=1 precision=", shell)
    # The only key that begins so is offered with its values: a shell adds no space then.
    assert _offers("hpc-train plan exp.yaml determ", shell) == ["deterministic=true", "deterministic=false"]
    assert "parallel.strategy=fsdp" in _offers("hpc-train plan exp.yaml parallel.strat", shell)


def test_runs_experiments_and_keys_are_offered() -> None:
    _folders("small/0123456789", "small/0199999999", "sweep/abcdef0123", ".code/x", "small/.slurm")
    assert _offers("hpc-train logs 01") == ["0123456789", "0199999999"]
    assert _offers("hpc-train logs s") == ["small", "sweep"]
    assert _offers("hpc-train logs ") == ["small", "sweep"]
    assert _offers("hpc-train cancel small small/012") == ["small/0123456789"]
    assert {"small", "seed=", "slurm.nodes="} <= set(_offers("hpc-train resume s"))
    assert "data.root=" in _offers("hpc-train evaluate small data.")


def test_no_run_is_opened_and_candidates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_MAX_CANDIDATES", 5)
    monkeypatch.setattr(completion, "_MAX_ENTRIES", 20)
    _folders(*(f"big/{number:04}" for number in range(40)), "big2/x")
    work = work_of(lambda: _offers("hpc-train logs "), monkeypatch)
    assert not [path for path in work.opened if str(runs_root()) in path]
    assert len(_offers("hpc-train logs big/")) == 5


def test_names_that_would_act_on_a_terminal_are_not_offered() -> None:
    _folders("small/01\x1b[31m", "small/02\n03", "small/04", "small/05;id", "small/06 a", "small/07$(id)")
    assert _offers("hpc-train logs 0") == ["04"]


_ASK = """
eval "$(_HPC_TRAIN_COMPLETE=source_bash hpc-train)"
complete -p hpc-train
ask() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _hpc_train_completion hpc-train
    printf '%s|' "${COMPREPLY[@]}"; echo
}
ask hpc-train sub
ask hpc-train submit exp
ask hpc-train submit exp.yaml precision = bf
ask hpc-train logs 01
"""


@pytest.mark.slow
def test_a_real_bash_completes(tmp_path: Path) -> None:
    _folders("small/0123456789")
    Path("exp.yaml").touch()
    program = tmp_path / "bin" / "hpc-train"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom hpc_train.cli.app import main\n\nmain()\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "--norc", "-c", _ASK],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_LIMIT_S,
    )
    # Without candidates bash completes names of files.
    assert done.stdout.splitlines() == [
        "complete -o default -F _hpc_train_completion hpc-train", "submit|", "|", "bf16|", "0123456789|",
    ]  # fmt: skip
