"""``doctor``: exit codes, JSON, and what it shows of a cluster that can be anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.experiment.validate.loading import load
from hpc_train.launchers import machine_checks
from hpc_train.launchers.base import Finding, Level
from tests.cli import launchers
from tests.cli.commands import hpc_train, succeeded
from tests.launchers.slurm.clusters import RECORDED
from tests.launchers.slurm.programs import Programs, put_programs_first

_ERROR = Finding(Level.ERROR, "machine.quota", "over quota", "here", "runs end", "remove files")
_OK = Finding(Level.OK, "machine.python", "Python 3.12")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What is found on this machine: its real report takes seconds."""
    found = [_OK]
    monkeypatch.setattr(machine_checks, "this_machine", lambda **_: found)
    return found


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return put_programs_first(tmp_path, monkeypatch)


def slurm(programs: Programs, partition: str = "low", node: str = "n1|low|idle|8|1|gpu:4|") -> None:
    """Put a Slurm 26.05 with one partition first on PATH."""
    config = "\n".join(RECORDED["26.05.3"]["config"])
    line = RECORDED["26.05.3"]["partition"].replace("PartitionName=low", f"PartitionName={partition}")
    (programs.folder / "config").write_text(config)
    (programs.folder / "partition").write_text(line + "\n")
    (programs.folder / "nodes").write_text(node + "\n")
    programs.put("scontrol", f'cat "{programs.folder}/${{@: -1}}"')
    programs.put("sinfo", f"cat {programs.folder}/nodes")
    programs.put("squeue", "true")
    programs.put("srun", "true")
    programs.put("sbatch", "grep -q partition=low $2 || { echo 'invalid partition specified' >&2; exit 1; }")


def test_errors_come_first_with_reason_and_remedy_and_exit_1(machine: list[Finding]) -> None:
    assert hpc_train("doctor", "--local").out == "ok       Python 3.12\n0 errors, 0 warnings\n"
    machine.append(_ERROR)
    done = hpc_train("doctor", "--local")
    assert done.code == 1
    assert done.out == (
        "error    over quota\n         why: runs end\n         remedy: remove files\n"
        "         read from: here\nok       Python 3.12\n1 error, 0 warnings\n"
    )
    done = hpc_train("doctor", "--local", "--json")
    told = json.loads(done.out)
    assert (done.code, told["version"], told["counts"]) == (1, 1, {"error": 1, "warning": 0, "ok": 1})
    assert told["findings"][0] == {
        "level": "error", "check": "machine.quota", "what": "over quota", "source": "here",
        "why": "runs end", "remedy": "remove files",
    }  # fmt: skip


def test_without_a_scheduler_runs_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = succeeded("doctor")
    assert "warning  scontrol: no such program here" in done.out and "with --local only" in done.out
    assert hpc_train("doctor", "--submit").code == 69


def test_a_scheduler_that_does_not_answer_is_an_error_unless_the_file_needs_none(
    file: Path, programs: Programs
) -> None:
    programs.put("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    done = hpc_train("doctor")
    assert done.code == 1 and "error    Slurm does not answer" in done.out
    assert len(programs.calls("scontrol")) == 1, "asked once"
    done = hpc_train("doctor", file)  # without a section slurm
    assert done.code == 0 and "warning  Slurm does not answer" in done.out


@pytest.mark.parametrize(("override", "wants_gpu"), [("device=auto", True), ("device=cpu", False)])
def test_cpu_needs_no_gpu(
    override: str, wants_gpu: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(machine_checks, "this_machine", lambda **keys: asked.append(keys["wants_gpu"]) or [])
    assert hpc_train("doctor", "--local", file, override).code == 0
    assert asked == [wants_gpu]


def test_a_launcher_without_checks_is_named() -> None:
    done = hpc_train("doctor", "--launcher", launchers.QUEUE)
    assert done.code == 0 and "not checked" in done.out


def test_the_file_is_checked_and_its_place_is_shown(file: Path, programs: Programs) -> None:
    slurm(programs)
    text = "slurm:\n  partition: hihg\nlogging: {wandb: {project: digits}}\n"
    file.write_text(file.read_text() + text)
    done = hpc_train("doctor", file)
    assert done.code == 1
    assert "slurm.partition: Slurm refuses it: invalid partition specified" in done.out
    assert "exp.yaml:" in done.out
    assert "warning  wandb: no API key is set" in done.out
    assert hpc_train("doctor", file, "slurm.partition=low").code == 0
    assert hpc_train("doctor", file, "data.nme=x").code == 65


def test_what_submit_would_refuse_is_an_error_of_the_file(file: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "val").mkdir(parents=True)
    root = f"data={{name: imagefolder, root: {tmp_path / 'data'}, image_size: 32}}"
    done = hpc_train("doctor", "--local", file, root, "model.name=timm/resnet18", "--json")
    told = json.loads(done.out)
    assert (done.code, told["counts"]["error"]) == (1, 1)
    assert told["findings"][0]["check"] == "file.start"
    assert f"data.root: {tmp_path / 'data'} has no folder train" in told["findings"][0]["what"]


def test_no_hostile_name_reaches_the_terminal_or_the_file(programs: Programs, tmp_path: Path) -> None:
    """Of a partition, a node's state, its GPUs and features; in messages, JSON, and a new file's comments."""
    name = "\x1b]0;owned\x07\u202egpu\x9b31m"
    slurm(programs, name, f"n1|{name}|idle{name}|8|1|gpu:{name}:4|{name}")
    shown = [hpc_train("doctor"), hpc_train("doctor", "--json"), hpc_train("init", "--queue", "other")]
    shown.append(hpc_train("init", "-y", "-o", tmp_path / "new.yaml"))
    written = (tmp_path / "new.yaml").read_text()
    assert "\\x1b]0;owned" in shown[0].out and "\\x1b]0;owned" in written, "the name is shown"
    for text in (*(part for done in shown for part in (done.out, done.err)), written):
        assert not [char for char in text if char in "\x1b\x07\u202e\x9b"]
    assert load(tmp_path / "new.yaml", check_names=False).experiment.slurm is not None


@pytest.mark.parametrize("options", [["--local", "--submit"], ["--local", "--nodes", "n1"]])
def test_options_that_exclude_each_other(options: list[str]) -> None:
    assert hpc_train("doctor", *options).code == 2
