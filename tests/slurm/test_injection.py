"""No value of a file and no path runs as a command: refused at its place, or submitted and harmless."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.validate.loading import load
from hpc_train.launchers.slurm import script
from hpc_train.launchers.slurm.submission import Batch
from tests.launchers.slurm.scripts import MINIMAL, fake_batch
from tests.slurm.cluster import Cluster
from tests.waiting import HANG_LIMIT_S

#: Every key whose text reaches the script, and what stands in the file around it.
KEYS: dict[str, dict[str, Any]] = {
    "name": {},
    "slurm.profile": {},
    "slurm.partition": {},
    "slurm.nodes": {},
    "slurm.gpu_type": {"gpus_per_node": 1},
    "slurm.time_limit": {},
    "slurm.account": {},
    "slurm.qos": {},
    "slurm.constraint": {},
    "slurm.exclude": {},
    "slurm.reservation": {},
    "slurm.dependency": {},
    "slurm.mail": {},
    "slurm.extra.comment": {},
    "slurm.extra.nice": {},
    "slurm.extra.wckey": {},
    "environment.python": {},
    "environment.modules": {},
    "environment.container.image": {},
    "environment.container.mounts": {},
    "environment.container.options": {},
}
#: {} is a command that leaves a file behind.
HOSTILE = [
    "a\n{}",
    "a\r{}",
    "a\n#SBATCH --wrap='{}'",
    "$({})",
    "`{}`",
    "${{IFS}}{}",
    "'; {} #",
    '"; {} #',
    "a'\"'\"'; {}",
    "; {}",
    "& {}",
    "| {}",
    "\\\n{}",
    "a\u2028{}",
    "a\u2029{}",
    "a\x85{}",
    "a\x0b{}",
    "a\x00{}",
    "a\x1b[2J{}",
    "\u202e{}",
    "\uff04({})",
    "--wrap={}",
    "-h",
    "!{}",
    ">{}",
    "a{{b,c}}",
    # Nothing in these is refused by its characters alone; they mean something to the shell or to Slurm.
    "~root",
    "*",
    "[a-z]",
    "%j",
    "%",
    "a=b",
    "#a",
    "(id)",
    "a|id",
    "a&id",
    "..",
    "/etc/passwd",
    "@x",
    "^a?",
]
LIMIT_S = HANG_LIMIT_S
#: Else the jobs of a key have every third value: each value is submitted with seven keys.
_SUBMITS_ALL = os.environ.get("HPC_TRAIN_ALL_PARALLEL") == "1"


def experiment_file(folder: Path, key: str, value: str) -> Path:
    """Write a file that holds ``value`` at ``key``, as JSON, which any YAML reader takes."""
    data: dict[str, Any] = json.loads(json.dumps(MINIMAL)) | {"slurm": {"partition": "low"} | KEYS[key]}
    *sections, last = key.split(".")
    node = data
    for section in sections:
        node = node.setdefault(section, {})
    if "container" in sections:
        node["image"] = "a.sif"
    node[last] = [value] if last in {"modules", "mounts", "options"} else value
    path = folder / "exp.yaml"
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return path


def accepted(folder: Path, key: str, value: str) -> Experiment | None:
    """Return the experiment, or None where the file is refused at the very place of the value."""
    path = experiment_file(folder, key, value)
    try:
        return load(path, check_names=False).experiment
    except BadFileError as error:
        (line,) = error.problems
        place = re.match(rf"{re.escape(str(path))}:(\d+):(\d+): {re.escape(key)}", line)
        assert place, line
        row, column = int(place[1]) - 1, int(place[2]) - 1
        assert path.read_text().split("\n")[row][column:].startswith((json.dumps(value), "["))
        return None


def script_of(folder: Path, asked: Experiment) -> Batch | None:
    """Return the batch script, or None where there is no such profile."""
    sections = asked.model_dump(include={"name", "slurm"}, exclude_defaults=True)
    environment = asked.environment.model_dump(exclude_defaults=True)
    try:
        return fake_batch(folder, **sections, environment={"python": sys.executable} | environment)
    except BadFileError as error:
        assert "no profile is called" in str(error)
        return None


@pytest.mark.fault(28, 29)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(KEYS)), value=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_is_refused_or_stays_one_line_of_the_script(tmp_path: Path, key: str, value: str) -> None:
    asked = accepted(tmp_path, key, value)
    if asked is None:
        return
    plain = accepted(
        tmp_path, key, {"slurm.nodes": "1-2", "slurm.time_limit": "1h", "slurm.mail": "a@b"}.get(key, "x")
    )
    assert plain is not None
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    batch, other = script_of(folder / "a", asked), script_of(folder / "b", plain)
    if batch is not None and other is not None:
        assert len(script.script_text(batch).split("\n")) == len(script.script_text(other).split("\n"))


@pytest.mark.fault(28, 29)
@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_the_file_runs(cluster: Cluster, tmp_path: Path, key: str) -> None:
    sentinel, own = tmp_path / "sentinel", list(KEYS).index(key)
    for number, hostile in enumerate(HOSTILE):
        asked = accepted(tmp_path, key, hostile.format(f"touch {sentinel}"))
        batch = asked and script_of(tmp_path / f"runs{number}", asked)
        if batch:
            path = batch.submission / "script.sh"
            path.write_text(script.script_text(batch, 2))
            assert subprocess.run(["bash", "-n", path], check=False, capture_output=True).stderr == b""
            if _SUBMITS_ALL or number % 3 == own % 3:
                cluster.run("sbatch", str(path), check=False)  # Slurm knows few such names
    cluster.wait(lambda: not cluster.run("squeue", "--noheader"), "end of all jobs", LIMIT_S)
    assert not sentinel.exists()


@pytest.mark.fault(28, 29)
@pytest.mark.slow
def test_no_folder_of_runs_runs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the job's commands would leave it
    sentinel = tmp_path / "sentinel"
    taken = []
    for number, hostile in enumerate([*HOSTILE, "a b", " a", "a ", "ñ中", "a'b\"c", "#a b", "a,b;c"]):
        name = hostile.format("touch sentinel").replace("/", "_")
        if "\x00" in name or name in {".", ".."}:
            continue
        try:
            batch = fake_batch(tmp_path / str(number) / name)
        except UserError as error:
            assert "HPC_TRAIN_RUNS" in str(error)
            continue
        taken.append(batch)
        path = tmp_path / f"{number}.sh"
        path.write_text(script.script_text(batch))
        cluster.run("sbatch", str(path))
    cluster.wait(lambda: not cluster.run("squeue", "--noheader"), "end of all jobs", LIMIT_S)
    assert not sentinel.exists()
    assert len(taken) > 20
    for batch in taken:
        assert (batch.submission / "ranks").read_text() == "0 0 -\n", batch.submission
        assert len(list(batch.submission.glob("*_0_log.out"))) == 1, batch.submission
