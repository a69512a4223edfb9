"""Experiments that ask Slurm for something, and a snapshot whose code only says what it was called with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.schema import Experiment
from hpc_train.launchers.slurm.script import batch
from hpc_train.launchers.slurm.submission import Batch

MINIMAL: dict[str, Any] = {
    "name": "exp",
    "task": "classification",
    "model": {"name": "acme.models:tiny"},
    "data": {"name": "digits"},
    "optimization": {
        "epochs": 1,
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "optimizer": {"name": "sgd", "lr": 0.1},
    },
}
#: Claims attempt 1, or does as the file `begin` beside the submission says: the answer, then an exit code.
BEGIN = """\
import os, pathlib, sys
asked = pathlib.Path(sys.argv[1], "begin")
text = asked.read_text() if asked.exists() else f"1\\tabc\\t{sys.argv[1]}/the run|0"
words, code = text.rsplit("|", 1)
pathlib.Path(os.environ["HPC_TRAIN_ANSWER"]).write_text(words + "\\n")
sys.exit(int(code))
"""
#: Writes down that it ran, and ends as the file `rank` says, line by line, one a start. Under srun, which
#: kills the others once one has failed, it ends after all have written.
RANK = """\
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["HPC_TRAIN_RUN_FOLDER"]).parent
with (folder / "ranks").open("a") as file:
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    file.write(os.environ["SLURM_PROCID"] + " " + restart + " " + os.environ.get("MARK", "-") + "\\n")
peers = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
while sum(line.split()[1] == restart for line in (folder / "ranks").open()) < peers:
    time.sleep(0.05)  # without a limit: the test has one
codes = (folder / "rank").read_text().split() if (folder / "rank").exists() else ["0"]
sys.exit(int(codes[min(int(restart), len(codes) - 1)]))
"""
#: Answers with the content of the file `after`, else: requeue after 75, stop with anything else.
AFTER = """\
import os, pathlib, sys
asked = pathlib.Path(sys.argv[1], "after")
pathlib.Path(sys.argv[1], "code").write_text(" ".join(sys.argv[2:]))
pathlib.Path(sys.argv[1], "shown").write_text(os.environ["HPC_TRAIN_JOB"])
if sys.argv[2] == "refused":
    sys.exit()
word = "requeue" if sys.argv[2] == "75" else "stop"
answer = asked.read_text() if asked.exists() else f"{word} {sys.argv[2]}"
pathlib.Path(os.environ["HPC_TRAIN_ANSWER"]).write_text(answer + "\\n")
"""
#: The end of `begin` and `after` of 0.2, whose batch script read the answer from stdout.
_TO_FILE = 'pathlib.Path(os.environ["HPC_TRAIN_ANSWER"]).write_text('


def experiment(**sections: Any) -> Experiment:
    return Experiment.model_validate(MINIMAL | {"slurm": {}} | sections)


def fake_snapshot(folder: Path) -> Path:
    """Write a snapshot whose `begin`, `rank` and `after` are the texts above."""
    package = folder / "package/hpc_train"
    (package / "launchers/slurm").mkdir(parents=True)
    for each in (package, package / "launchers", package / "launchers/slurm"):
        (each / "__init__.py").touch()
    for name, text in (("begin", BEGIN), ("rank", RANK), ("after", AFTER)):
        (package / f"launchers/slurm/{name}.py").write_text(text)
    return folder


def fake_batch(runs: Path, *, held: bool = False, **sections: Any) -> Batch:
    """Return the script of an experiment in a folder of runs, its submission's folder made."""
    submission = runs / "exp/.slurm/token"
    submission.mkdir(parents=True)
    snapshot = runs / ".code/content"
    if not snapshot.exists():
        fake_snapshot(snapshot)
    asked = experiment(**({"environment": {"python": sys.executable}} | sections))
    return batch(submission, asked, snapshot=snapshot, search_path=[str(snapshot / "package")], held=held)


def make_it_print(runs: Path) -> None:
    """Change the fake snapshot's `begin` and `after`: they print their answers as those of 0.2 did."""
    for name in ("begin", "after"):
        path = runs / f".code/content/package/hpc_train/launchers/slurm/{name}.py"
        text = path.read_text()
        assert _TO_FILE in text
        path.write_text(text.replace(_TO_FILE, "sys.stdout.write("))
