"""A program's command line, with names in braces replaced and arguments in their style; its environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_train.experiment.config.program_section import ProgramConfig
from hpc_train.experiment.config.schema import Program
from hpc_train.paths import RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.run.files import read_json
from hpc_train.run.processes import ATTEMPT_VARIABLE, FOLDER_VARIABLE, PROGRAM_VARIABLE

#: Variables of the supervisor's own Python.
_OWN_VARIABLES = ("PYTHONSAFEPATH", "PYTHONUNBUFFERED", "HPC_TRAIN_TOKEN", "HPC_TRAIN_THREADS_BY_SHARE")


class Rendezvous(NamedTuple):
    """The rendezvous of the programs of an attempt, and the folder in which they start."""

    address: str
    port: int
    folder: str


def executable(name: str) -> str:
    """Return the program of that name: ``python`` and what is installed beside it come first, as torchrun."""
    if name == "python":
        return sys.executable
    if "/" in name:
        return name
    beside = Path(sys.executable).with_name(name)
    return str(beside) if os.access(beside, os.X_OK) else name


def command_of(program: ProgramConfig, values: Mapping[str, str], *, resumes: bool) -> list[str]:
    """Return the command with its arguments; ``values`` replace the names in braces."""
    command = [word.format_map(values) for word in program.command]
    command[0] = executable(command[0])
    for name, value in program.args.items():
        text = value.format_map(values) if isinstance(value, str) else value
        command += rendered(name, text, program.style)
    if resumes and program.resume is not None:
        command += [word.format_map(values) for word in program.resume.args]
    return command


def rendered(name: str, value: Any, style: str) -> list[str]:
    """Return one argument as words of a command line."""
    if style == "key=value":
        return [f"{name}={_as_hydra(value)}"]
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    items = [_as_text(item) for item in (value if isinstance(value, list) else [value])]
    if style == "--key=value" and not isinstance(value, list):
        return [f"--{name}={items[0]}"]
    return [f"--{name}", *items]


def _as_hydra(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_as_hydra, value))}]"
    return _as_text(value)


def _as_text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
    return str(value)


@dataclass(frozen=True)
class ProgramStart:
    """The start of a program on one rank of an attempt. ``resumes``: ``resume.if_exists`` exists."""

    job: Program
    paths: RunPaths
    attempt: int
    facts: RankFacts
    meeting: Rendezvous
    resumes: bool

    def command(self) -> list[str]:
        """Return the words of the command line."""
        return command_of(self.job.program, self._values(), resumes=self.resumes)

    def environment(self) -> dict[str, str]:
        """Return this process's environment, torchrun's variables, the run's facts and ``program.env``."""
        facts, program = self.facts, self.job.program
        environment = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        ranks: dict[str, Any] = {
            "RANK": facts.rank,
            "LOCAL_RANK": facts.local_rank,
            "WORLD_SIZE": facts.world_size,
            "LOCAL_WORLD_SIZE": facts.local_world_size,
        }
        for name in ranks:
            environment.pop(name, None)
        nodes: dict[str, Any] = {
            "GROUP_RANK": facts.node,
            "NODE_RANK": facts.node,
            "GROUP_WORLD_SIZE": facts.num_nodes,
            "MASTER_ADDR": self.meeting.address,
            "MASTER_PORT": self.meeting.port,
        }
        if program.per != "rank":  # torchrun's own port would be the same for all runs on a node
            nodes |= {"PET_MASTER_ADDR": self.meeting.address, "PET_MASTER_PORT": self.meeting.port}
        facts_of_run = read_json(self.paths.run) or {}
        wandb_id = facts_of_run.get("wandb_id")
        if wandb_id and self.job.logging.wandb is None:  # else the supervisor writes that run
            environment |= {"WANDB_RUN_ID": str(wandb_id), "WANDB_RESUME": "allow"}
        session = {
            FOLDER_VARIABLE: self.paths.folder.absolute(),
            ATTEMPT_VARIABLE: self.attempt,
            PROGRAM_VARIABLE: self.paths.folder.absolute(),
            "HPC_TRAIN_RESUME": int(self.resumes),
            "HPC_TRAIN_SESSION": json.dumps(_session_settings(self.job)),
            "PYTHONFAULTHANDLER": 1,  # SIGABRT prints the stacks
        }
        shared = session | nodes | (ranks if program.per == "rank" else {})
        environment |= {name: str(value) for name, value in shared.items()}
        environment.setdefault("PYTHONUNBUFFERED", "1")
        if places := environment.get("PYTHONPATH"):  # relative to the folder of `submit`, and not to `work`
            origin = (facts_of_run.get("code") or {}).get("folder") or Path.cwd()
            entries = [str(Path(origin, place)) for place in places.split(os.pathsep) if place]
            environment["PYTHONPATH"] = os.pathsep.join(entries)
        if sys.prefix != sys.base_prefix:  # in a shell script python is that of a virtual environment, too
            folders = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
            environment["PATH"] = os.pathsep.join(folders)
        values = self._values()
        return environment | {name: text.format_map(values) for name, text in program.env.items()}

    def _values(self) -> dict[str, str]:
        """Return the values of the names in braces."""
        values = {
            "run": str(self.paths.folder.absolute()),
            "name": self.job.name,
            "seed": self.job.seed,
            "attempt": self.attempt,
            "nodes": self.facts.num_nodes,
            "node_rank": self.facts.node,
            "ranks": self.facts.world_size,
            "ranks_per_node": self.facts.local_world_size,
            "master_addr": self.meeting.address,
            "master_port": self.meeting.port,
        }
        return {name: str(value) for name, value in values.items()}


def _session_settings(job: Program) -> dict[str, Any]:
    """Return the keys of the file that ``hpc_train.session`` applies."""
    checkpoint, stopping = job.checkpoint, job.early_stopping
    every_s = None if checkpoint.every_min is None else checkpoint.every_min * 60
    settings = {
        "keep": checkpoint.keep,
        "every_steps": checkpoint.every_steps,
        "every_s": every_s,
        "best": checkpoint.best and checkpoint.best.model_dump(),
        "early_stopping": stopping and stopping.model_dump(),
    }
    return {name: value for name, value in settings.items() if value is not None}
