"""The batch script of one submission: set-up and tear-down from ``slurm_templates``, and the ranks' command.

submitit writes the script around them and hands it to sbatch.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.errors import UsageError
from hpc_train.experiment.config.problems import is_clean, shown
from hpc_train.experiment.config.schema import Experiment, Job, SlurmConfig
from hpc_train.experiment.validate.slurm_rules import MEMORY_SHARES, min_nodes, ranks_on_each_node
from hpc_train.launchers.base import JobArray
from hpc_train.launchers.slurm import container, options, profiles
from hpc_train.launchers.slurm.profiles import TEMPLATES, Profile
from hpc_train.launchers.slurm.submission import ALONE, Batch, Sharing
from hpc_train.package_path import LATE_VARIABLE, path_variables
from hpc_train.paths import ExperimentPaths

#: The user's defaults of sbatch → submitit's name of the file's setting that replaces it. In sbatch its
#: variables override the script's lines, so all others are hidden from it.
_KEPT_VARIABLES = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_WCKEY": "wckey",
}
#: Slurm's address and the user's credentials for it.
_KEPT_IN_A_JOB = ("SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER")
#: Outside of a job a user may also choose the cluster.
_KEPT = (*_KEPT_IN_A_JOB, "SLURM_CLUSTERS")
#: Prefixes of variables that would mislead the ranks.
_NEVER_KEPT = (
    # The rendezvous of a shell's own torchrun; a profile may define a site's.
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_",
    "HPC_TRAIN_ATTEMPT",
    "HPC_TRAIN_TOKEN",
    "HPC_TRAIN_HOSTS",
    "HPC_TRAIN_ANY_NODE",
    "HPC_TRAIN_ANSWER",
    "HPC_TRAIN_JOB",
    "HPC_TRAIN_ALLOCATION",
    "HPC_TRAIN_GRACE_S",
    "HPC_TRAIN_SLOT",
    "HPC_TRAIN_NUM_NODES",
    "HPC_TRAIN_GPUS",
    "HPC_TRAIN_STANDBY",
    "HPC_TRAIN_EVALUATION_JOBS",
    # Processes of a run are found by it.
    "HPC_TRAIN_RUN_FOLDER",
)
#: The devices granted to the job in which the shell is; the new job gets its own.
_GRANTED = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")

#: The variables that identify the user's job; srun and the batch script read them. All others of Slurm
#: describe how that job, or a step of it, was requested.
_OF_THE_JOB = (
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT",
    "SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER", "SLURM_JOB_PARTITION", "SLURMD_NODENAME",
)  # fmt: skip


def batch(
    submission: Path,
    experiment: Job,
    *,
    snapshot: Path,
    search_path: Sequence[str],
    max_parallel: int | None = None,
    held: bool = True,
    exclude: Sequence[str] = (),
    problem: Callable[[str, str, str], str] | None = None,
    dependency: str | None = None,
    sharing: Sharing = ALONE,
) -> Batch:
    """Return the batch script for runs of one shape; nothing is written, Slurm is not queried.

    ``search_path``: the start of the ranks' path. ``exclude``: nodes, in addition to the file's. ``problem``:
    the experiment file's own text for ``file:line:col``. ``dependency``: in addition to the file's. Raises
    BadFileError for the profile, UsageError for paths that no script can contain.
    """
    slurm = experiment.slurm
    assert slurm is not None
    profile = profiles.find(slurm.profile, problem)
    experiment = profile.applied(experiment)
    folder = Path.cwd()
    has_container = experiment.environment.container is not None
    _refuse_paths(submission, snapshot, folder, search_path, in_container=has_container)
    folders = (submission.parents[2], folder)
    python = python_command(experiment, profile, folders)
    lead_s = options.lead_s(experiment, ExperimentPaths(submission.parents[1]))
    job = options.of_slots(experiment, sharing.slots)
    parameters = options.sbatch_parameters(
        job, profile, lead_s=lead_s, max_parallel=max_parallel, held=held, exclude=exclude
    )
    parameters["additional_parameters"]["chdir"] = str(folder)
    parameters["srun_args"] += container.srun_args(experiment, profile, folders)
    if dependency is not None:
        parameters["dependency"] = ",".join(filter(None, (dependency, slurm.dependency)))
    rank = snapshot / "package/hpc_train/launchers/slurm/rank.py"
    command = [*python, "-I", "-S", str(rank), python[-1]]
    setup = _setup(submission, experiment, profile, python, search_path) | {"slots": 0, "rank_script": rank}
    if sharing.runs_per_task > 1:
        setup |= {
            "slots": sharing.slots,
            "runs_per_gpu": slurm.runs_per_gpu,
            "ranks_per_node": ranks_on_each_node(experiment.slurm or slurm),
            "srun_args": [
                *options.slot_args(experiment, profile, sharing.slots),
                *parameters.pop("srun_args"),
            ],
            "rank_command": command,
        }
        # The slots call srun themselves; submitit's arguments are ignored by this function.
        command, parameters["use_srun"] = ["hpc_train_slots"], False
    parameters["setup"] = rendered("setup.sh.j2", setup)
    of_teardown = {key: setup[key] for key in ("submission", "slots", "standby")}
    parameters["teardown"] = rendered("teardown.sh.j2", of_teardown)
    evaluation = _evaluation_script(submission, experiment, profile, setup) if setup["evaluations"] else None
    return Batch(submission, shlex.join(command), parameters, sharing.runs_per_task, evaluation)


def _evaluation_script(submission: Path, experiment: Job, profile: Profile, setup: Mapping[str, Any]) -> str:
    """Return the batch script whose arguments are the run's folder and the step of the checkpoint."""
    assert isinstance(experiment, Experiment)
    return _command_script(submission, options.of_evaluation(experiment), profile, setup, "cli.evaluate")


def array_script(array: JobArray) -> str:
    """Return the batch script of the array, whose first argument is the run's folder."""
    folder, slurm = Path.cwd(), array.experiment.slurm
    assert slurm is not None
    profile = profiles.find(slurm.profile)
    experiment = profile.applied(array.experiment)
    assert isinstance(experiment, Experiment)
    _refuse_paths(
        array.folder,
        array.folder,
        folder,
        array.search_path,
        in_container=bool(experiment.environment.container),
    )
    python = python_command(experiment, profile, (array.run.folder.parents[1], folder))
    setup = _setup(array.folder, experiment, profile, python, array.search_path)
    job = options.of_one_node(experiment, array.ranks)
    return _command_script(array.folder, job, profile, setup, array.module)


def _command_script(
    folder: Path, job: Experiment, profile: Profile, setup: Mapping[str, Any], module: str
) -> str:
    """Return the batch script of jobs that run a command of ours, with the script's arguments."""
    assert job.slurm is not None
    parameters = options.sbatch_parameters(
        job, profile, lead_s=options.lead_of(job.slurm), max_parallel=None, held=False
    )
    parameters["additional_parameters"]["chdir"] = str(Path.cwd())
    lines = rendered("command.sh.j2", {**setup, "module": f"hpc_train.{module}"})
    parameters |= {"setup": lines, "use_srun": False}
    return script_text(Batch(folder, "hpc_train_command", parameters))


def script_text(batch: Batch, runs: int = 1) -> str:
    """Return the batch script that submitit writes for this number of runs; works without Slurm."""
    from submitit import SlurmExecutor

    class Executor(SlurmExecutor):  # type: ignore[misc]
        @classmethod
        def affinity(cls) -> int:
            return 2

    executor = Executor(batch.submission, python=batch.command)
    executor.update_parameters(**batch.parameters)
    if (tasks := batch.num_tasks(runs)) > 1:
        executor.parameters["map_count"] = tasks
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text + "\n"


def python_command(experiment: Job, profile: Profile, folders: Sequence[Path]) -> list[str]:
    """Return the command of Python on a node; a container gets access to ``folders`` and the data."""
    environment = experiment.environment
    if environment.container is None:
        return [_expanded(environment.python or sys.executable)]
    return container.python_in(experiment, profile, folders)


def _setup(
    submission: Path, experiment: Job, profile: Profile, python: list[str], search_path: Sequence[str]
) -> dict[str, Any]:
    slurm = experiment.slurm
    assert slurm is not None
    variables = path_variables(search_path)
    return {
        "submission": submission,
        "python": python,
        "exclude": slurm.exclude or "",  # nodes that a run excludes are temporary
        "ranks_per_node": ranks_on_each_node(slurm),
        "has_node_range": isinstance(slurm.nodes, str),
        "num_nodes": min_nodes(slurm) if slurm.spare_nodes else None,
        "standby": experiment.recovery.standby,
        "evaluations": isinstance(experiment, Experiment) and experiment.evaluation.as_job,
        "search_path": variables["PYTHONPATH"],
        "late_path": variables[LATE_VARIABLE],
        "modules": experiment.environment.modules,
        "container": container.needs(experiment, profile),
        "outside": sys.executable,
        "variables": profile.variables(),
        "is_program": experiment.workload == "program",
        "site": site(slurm, profile),
    }


def site(slurm: SlurmConfig, profile: Profile) -> dict[str, Any]:
    """Return the profile's values for the templates."""
    init = _expanded(profile.module_init or "")
    return {"name": slurm.profile, "lines": profile.setup, "module_init": init}


def rendered(template: str, values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a template; whatever it inserts is quoted for the shell."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        finalize=quoted,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["as_it_stands"] = _Shell
    # Not splitlines, which splits at characters that do not end a line in a shell.
    return environment.get_template(template).render(values).strip("\n").split("\n")


class _Shell(str):
    """Lines of the shell, trusted."""


def quoted(value: object) -> str:
    """Return a value as one word of the shell, a list as one word each."""
    if isinstance(value, list):
        return " ".join(map(quoted, value))
    if isinstance(value, _Shell):
        return str(value)
    if not isinstance(value, str | int | Path):
        raise TypeError(f"{value!r} has no place in a script")
    return shlex.quote(str(value))


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _refuse_paths(
    submission: Path, snapshot: Path, folder: Path, search_path: Sequence[str], *, in_container: bool
) -> None:
    """Refuse characters that sbatch, submitit or a list of paths would interpret, seen on 22.05."""
    remedy = "set HPC_TRAIN_RUNS to another folder"
    # sbatch drops a backslash even between quotes; % starts a pattern of sbatch or submitit.
    _refuse_characters(submission, "\\%" + (",:" if in_container else ""), remedy)
    _refuse_characters(snapshot, "\\", remedy)
    for path in search_path:
        _refuse_characters(path, os.pathsep, remedy)
    _refuse_characters(folder, "\\" + (",:" if in_container else ""), "start it in another folder")


def _refuse_characters(path: Path | str, bad: str, remedy: str) -> None:
    for char in str(path):
        if char in bad or not is_clean(char):
            label = f"character U+{ord(char):04X}" if not is_clean(char) else f"'{char}'"
            raise UsageError(
                f"{shown(str(path))}: {label} is not allowed in a batch script's paths; {remedy}"
            )


def job_environment(parameters: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, which passes it on to the job.

    It lacks the variables with which sbatch, srun or the ranks would override the file: Slurm's in any shell,
    and in a shell inside a job also the variables that the job received.
    """
    in_job = "SLURM_JOB_ID" in environ
    return {name: value for name, value in environ.items() if not _is_hidden(name, parameters, in_job=in_job)}


def environment_within_job(parameters: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a batch script that uses the job of this process itself."""
    job = {name: environ[name] for name in _OF_THE_JOB if name in environ}
    return job_environment(parameters, environ) | job


def _is_hidden(name: str, parameters: Mapping[str, Any], in_job: bool) -> bool:
    if name.startswith("SBATCH_"):
        options = parameters | parameters["additional_parameters"]
        if name == "SBATCH_MEM_PER_NODE" and any(key.replace("_", "-") in MEMORY_SHARES for key in options):
            return True
        return name not in _KEPT_VARIABLES or options.get(_KEPT_VARIABLES[name]) is not None
    if name.startswith(("SLURM_", "SRUN_", "SLURMD_")):
        return name not in (_KEPT_IN_A_JOB if in_job else _KEPT)
    return name.startswith(_NEVER_KEPT) or (in_job and name in _GRANTED)
