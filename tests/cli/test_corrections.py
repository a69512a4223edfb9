"""Command lines of other tools: the answer has the command line here, which can be typed as it is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from hpc_train.cli import command_options  # noqa: F401
from hpc_train.cli.command_line import RUN_PARAMETERS, app
from hpc_train.experiment.config.synonyms import other_commands, other_options
from hpc_train.experiment.validate.loading import load
from tests.cli.commands import hpc_train, stderr_of

_GROUP: Any = get_command(app)
_EXPERIMENT = """\
name: digits
task: classification
model: {name: timm/test_resnet}
data: {name: digits}
optimization:
  epochs: 2
  global_batch_size: 64
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.1}
"""
#: What is typed → the remedy.
ANSWERS = {
    "train exp.yaml": "submit exp.yaml",
    "fit -c exp.yaml": "submit exp.yaml",
    "launch exp.yaml --local": "submit exp.yaml --local",
    "sbatch exp.yaml --time=90": "submit exp.yaml slurm.time_limit=90min",
    "run exp.yaml lr=0.1": "submit exp.yaml lr=0.1",
    "torchrun --nproc_per_node=2 exp.yaml": "submit exp.yaml --local --devices 2",
    "exp.yaml": "submit exp.yaml",
    "exp.yaml --local": "submit exp.yaml --local",
    "./exp.yaml seed=3": "submit ./exp.yaml seed=3",
    "rerun exp.yaml": "submit exp.yaml --new",
    "submit exp.yaml --local --devices 0": "submit exp.yaml --local device=cpu",
    "submit exp.yaml --local --devices=auto": "submit exp.yaml --local",
    "subnit exp.yaml": "submit exp.yaml",
    "--verbose submit exp.yaml": "submit exp.yaml",
    "ls": "status",
    "ps -a": "status",
    "list --sort-by lr": "status --sort lr",
    "squeue": "status",
    "stop abc": "cancel abc",
    "kill -9 abc": "cancel abc",
    "scancel abc def": "cancel abc def",
    "tail -f abc": "logs abc -f",
    "tail abc -n 20": "logs abc -n 20",
    "head -20 abc": "logs abc -n 20",
    "submit exp.yaml --report-to tensorboard": "submit exp.yaml logging.tensorboard=true",
    "delete abc --force": "rm abc --yes",
    "rm -rf abc": "rm abc --yes",
    "continue abc": "resume abc",
    "eval abc --ckpt-path best": "evaluate abc --best",
    "infer abc --input a.png": "predict abc --data a.png -o predictions.jsonl",
    "diff a b": "compare a b --diff",
    "tensorboard abc": "sync abc --to tensorboard",
    "dry-run exp.yaml": "submit exp.yaml --dry-run",
    "sweep exp.yaml": "search exp.yaml",
    "help submit": "submit --help",
    "version": "--version",
    "-V": "--version",
    "submit": "submit exp.yaml",
    "submit --config-name exp --multirun": "submit exp.yaml",
    "submit exp.yaml --gpus 2": "submit exp.yaml slurm.gpus_per_node=2",
    "submit exp.yaml --local --gpus 2": "submit exp.yaml --local --devices 2",
    "submit exp.yaml --local --gpus 0": "submit exp.yaml --local device=cpu",
    "submit exp.yaml --gres=gpu:a100:4": "submit exp.yaml slurm.gpus_per_node=4 slurm.gpu_type=a100",
    "submit exp.yaml --nproc 4": "submit exp.yaml --local --devices 4",
    "submit exp.yaml --num_nodes 2 --devices 2": "submit exp.yaml slurm.nodes=2 slurm.gpus_per_node=2",
    "submit exp.yaml --nodes 2 --local": "submit exp.yaml slurm.nodes=2",
    "submit exp.yaml -N2 -p gpu": "submit exp.yaml slurm.nodes=2 slurm.partition=gpu",
    "submit exp.yaml --mem 64000M -A lab": "submit exp.yaml slurm.mem_gb=63 slurm.account=lab",
    "submit exp.yaml -n": "submit exp.yaml --dry-run",
    "submit exp.yaml -n 4": "submit exp.yaml slurm.ranks_per_node=4",
    "submit exp.yaml --dry_run": "submit exp.yaml --dry-run",
    "submit exp.yaml --loca": "submit exp.yaml --local",
    "submit exp.yaml --overwrite": "submit exp.yaml --new",
    "submit exp.yaml --wait": "submit exp.yaml",
    "plan exp.yaml --epochs 5 --lr=0.2": "plan exp.yaml optimization.epochs=5 optimization.optimizer.lr=0.2",
    "submit exp.yaml --batch-size 32": "submit exp.yaml optimization.global_batch_size=32",
    "submit exp.yaml --optimization.optimizer.lr 0.2": "submit exp.yaml optimization.optimizer.lr=0.2",
    "submit exp.yaml --trainer.max_epochs=3": "submit exp.yaml optimization.epochs=3",
    "submit exp.yaml --set lr=0.2": "submit exp.yaml optimization.optimizer.lr=0.2",
    "submit exp.yaml --model timm/resnet18": "submit exp.yaml model.name=timm/resnet18",
    "submit exp.yaml --precision 16-mixed": "submit exp.yaml precision=fp16",
    "submit exp.yaml --amp --compile": "submit exp.yaml precision=bf16 compile=true",
    "submit exp.yaml --device gpu": "submit exp.yaml device=cuda",
    "submit exp.yaml --wandb": "submit exp.yaml logging.wandb.project=my-project",
    "submit -f exp.yaml": "submit exp.yaml",
    "accelerate launch --num_processes 2 exp.yaml": "submit exp.yaml --local --devices 2",
    "submit exp.yaml --mixed_precision bf16": "submit exp.yaml precision=bf16",
    "submit exp.yaml --output_dir out --num_train_epochs 3": "submit exp.yaml optimization.epochs=3",
    "submit exp.yaml --exclusive -w n1": "submit exp.yaml slurm.extra.exclusive=true slurm.extra.nodelist=n1",
    "submit exp.yaml --gpu 1": "submit exp.yaml --local --devices 1",
    "submit exp.yaml --array 1-4": "submit exp.yaml",
    "cancel -f abc": "cancel abc",
    "evaluate abc --split test": "evaluate abc",
    "predict abc a.png": "predict abc --data a.png -o predictions.jsonl",
    "export abc model.onnx": "export abc -o model.onnx",
    "init .": "init --root .",
    "resume abc --from-step 100": "resume abc",
    "plan exp.yaml --dry-run": "plan exp.yaml",
    "validate --config exp.yaml --strict": "validate exp.yaml",
    "resume": "resume latest",
    "resume abc --gpus 2": "resume abc --local --devices 2",
    "logs": "logs latest",
    "logs abc def": "logs abc",
    "logs abc --tail 5": "logs abc --lines 5",
    "logs abc --tail": "logs abc --follow",
    "status --watch abc": "watch abc",
    "status -o json": "status --json",
    "evaluate abc --gpus 2": "evaluate abc --devices 2",
    "evaluate abc --checkpoint 100": "evaluate abc --step 100",
    "export abc": "export abc -o weights.safetensors",
    "export abc --onnx": "export abc -o weights.onnx",
    "export abc --format onnx -o m.pt": "export abc -o m.onnx",
    "predict abc --format=csv": "predict abc -o predictions.csv",
    "report abc --html a.html": "report abc -o a.html",
    "compare --csv": "compare latest --csv",
    "init my.yaml": "init -o my.yaml",
    "init --dataset digits --partition gpu": "init --data digits --queue gpu",
    "prepare": "prepare exp.yaml",
}


@pytest.fixture(autouse=True)
def in_folder(_little_code: None) -> None:
    Path("exp.yaml").write_text(_EXPERIMENT, encoding="utf-8")


def _check(line: str) -> None:
    """Parse a command line without running it; the experiment with its ``KEY=VALUE`` must be valid."""
    words = shlex.split(line)
    assert words[0] == "hpc-train"
    if words[-1] in {"--help", "--version"}:
        assert hpc_train(*words[1:]).code == 0
        return
    command = _GROUP.commands[words[1]]
    context = command.make_context(words[1], words[2:], parent=_GROUP.make_context("hpc-train", words[1:2]))
    if "file" in context.params and "lr=0.1" not in words:
        load(context.params["file"], context.params["overrides"] or (), check_names=False)


@pytest.mark.parametrize(("typed", "remedy"), ANSWERS.items(), ids=list(ANSWERS))
def test_the_answer_is_a_command_line_that_leads_on(typed: str, remedy: str) -> None:
    done = hpc_train(*shlex.split(typed))
    lines = re.findall(r"`(hpc-train [^`]*)`", done.err)
    assert (done.code, done.out) == (2, "")
    assert f"hpc-train {remedy}" in lines, done.err
    for line in lines:
        _check(line)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("cancel", "RUN is missing; `hpc-train status` lists the runs"),
        ("frobnicate", "there is no command 'frobnicate'; `hpc-train --help` lists the commands"),
        ("submit exp.yaml --foo 3", "there is no option --foo; `hpc-train submit --help` lists the options"),
        ("submit exp.yaml --accumulate-grad-batches 4", "optimization.global_batch_size"),
        ("submit exp.yaml --devices two", "needs a whole number of at least 1, got 'two'; write --devices 1"),
        (
            "plan exp.yaml --throughput 1k",
            "--throughput needs a number of at least 1e-09, got '1k'; write --throughput 1000",
        ),
        ("logs abc --rank -1", "--rank needs a whole number of at least 0, got '-1'; write --rank 1"),
    ],
)
def test_without_an_equivalent_no_command_line_is_guessed(typed: str, answer: str) -> None:
    done = hpc_train(*shlex.split(typed))
    assert (done.code, done.out) == (2, "") and answer in done.err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train.py", "a Python script"),
        ("a.ipynb", "a notebook"),
        ("job.sbatch", "a batch script"),
        ("best.ckpt", "a file of weights"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "validate", "train", None])
def test_a_file_of_another_kind_is_named(name: str, kind: str, command: str | None) -> None:
    Path(name).write_text("import torch\nprint('x: y: z')\n", encoding="utf-8")
    done = hpc_train(*filter(None, [command, name]))
    assert done.code in {2, 65}
    assert f"{name}: is {kind}, not an experiment file; " in done.err


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("exp", "write exp.yaml"),
        (".", "write exp.yaml"),
        ("ex.yaml", "did you mean exp.yaml?"),
        ("new", "hpc-train init"),
        ("seed=3", "write the file before seed=3"),
    ],
)
def test_a_missing_file_is_answered_with_one_that_exists(word: str, answer: str) -> None:
    assert answer in stderr_of(65, "validate", word)


def test_a_run_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits" / "abc123").mkdir(parents=True)
    for word in ("digits", "abc123", "abc", "digits/abc123"):
        assert f"`hpc-train resume {word}` continues it" in hpc_train("submit", word).err


def test_every_verb_is_unknown_here_and_leads_to_a_command() -> None:
    assert not other_commands().keys() & _GROUP.commands.keys()
    assert {written.split()[0] for written in other_commands().values()} <= {*_GROUP.commands, "--version"}


def _options(command: str) -> set[str]:
    return {option for parameter in _GROUP.commands[command].params for option in parameter.opts}


def test_every_option_is_unknown_here_and_leads_to_an_option() -> None:
    for row in other_options():
        option = row.written.split()[0] if row.written.startswith("-") else None
        commands = row.commands.split() or [name for name in _GROUP.commands if option in _options(name)]
        assert set(commands) <= _GROUP.commands.keys(), row
        assert commands or option is None, row
        for command in commands:
            assert option is None or option in _options(command), (command, row)
            if row.commands:
                unreachable = {name for name in row.names.split() if "=" not in name} & _options(command)
                assert not unreachable, (command, row)


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        ("cancel -1 abc", ["latest-1", "abc"]),
        ("status -- -2", ["latest-2"]),
        ("rm -y -2", ["latest-2"]),
        ("cancel abc-2 digits/abc-2 ./abc-2", ["abc-2", "digits/abc-2", "./abc-2"]),
        ("resume abc-2 optimization.optimizer.lr=1e-3", ["abc-2", "optimization.optimizer.lr=1e-3"]),
    ],
)
def test_a_negative_number_is_a_run(typed: str, runs: list[str]) -> None:
    name, *words = typed.split()
    command, parent = _GROUP.commands[name], _GROUP.make_context("hpc-train", [name])
    params = command.make_context(name, words, parent=parent).params
    assert list(next(params[key] for key in RUN_PARAMETERS if key in params)) == runs
