"""Converts the section ``slurm`` to the options of one job, for submitit, and to what its ranks get; warns if
a save does not fit between Slurm's signal and the kill.

All values were checked when the file was read; values for ``#SBATCH`` lines are checked here again, since a
line break there would run as a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Any

from hpc_train.errors import BadFileError, NoSchedulerError
from hpc_train.experiment.config.fields import GPU_TYPE_PATTERN, MAIL_PATTERN, SLURM_WORD_PATTERN
from hpc_train.experiment.config.problems import is_clean, shown
from hpc_train.experiment.config.schema import Experiment, Job, SlurmConfig
from hpc_train.experiment.plan.devices import Device, gpu_memory_gib
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.experiment.validate import slurm_rules
from hpc_train.experiment.validate.slurm_rules import MEMORY_SHARES, ranks_on_each_node, sbatch_option
from hpc_train.experiment.workload import workload_of
from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.profiles import Profile
from hpc_train.paths import NAME_PATTERN, ExperimentPaths, RunPaths
from hpc_train.run.attempts import read_record

#: Seconds before the time limit, until the duration of a save is known.
FIRST_LEAD_S = 120
#: The longest time limit of a job that evaluates a checkpoint, unless the file has one. Assumed.
EVALUATION_LIMIT_MIN = 60
#: Maximum number of runs whose saves are read for the lead: reading thousands of records is too slow.
_RUNS_LOOKED_AT = 200
#: Above any array: submitit's own default would throttle to 256.
_NO_THROTTLE = 10**9
#: Rendered values that are not ``SLURM_WORD``s by nature; submitit quotes them.
_PATTERNS = {
    "job_name": NAME_PATTERN,
    "mail_user": MAIL_PATTERN,
    "gpu_type": GPU_TYPE_PATTERN,
    # A word of the file and names of nodes, which may be many.
    "exclude": SLURM_WORD_PATTERN.replace("{0,255}", "{0,16383}"),
}
_GIB = 2**30


def sbatch_parameters(
    experiment: Job,
    profile: Profile,
    *,
    lead_s: int,
    max_parallel: int | None,
    held: bool = True,
    exclude: Sequence[str] = (),
) -> dict[str, Any]:
    """Return submitit's parameters for runs of one ``shape``, without set-up and tear-down; all of it JSON.

    ``lead_s``: seconds between USR2 and the time limit. ``max_parallel``: runs of the array at a time.
    ``exclude``: nodes, in addition to the file's.
    """
    experiment = profile.applied(experiment)
    slurm = experiment.slurm
    assert slurm is not None
    cpus = cpus_per_rank(slurm)
    parameters = _without_none(
        {
            "job_name": experiment.name,
            "partition": slurm.partition,
            # submitit gets the lower end of a range, since it multiplies; sbatch gets the range below.
            "nodes": slurm_rules.requested_nodes(slurm),
            "ntasks_per_node": None if isinstance(slurm.nodes, str) else ranks_on_each_node(slurm),
            "cpus_per_task": cpus,
            "mem": None if slurm.mem_gb is None else f"{slurm.mem_gb}G",
            "account": slurm.account,
            "qos": slurm.qos,
            "constraint": slurm.constraint,
            "exclude": excluded(slurm, exclude),
            "dependency": slurm.dependency,
            "mail_user": slurm.mail,
            "mail_type": slurm.mail and "END,FAIL",
        }
        | _gpus(slurm, profile)
    )
    _refuse_unsafe(parameters)
    return parameters | {
        # None disables submitit's 5 minutes, so that the partition's default applies; and its wckey.
        "time": slurm.time_limit,
        "wckey": None,
        "signal_delay_s": lead_s,
        "stderr_to_stdout": True,
        "array_parallelism": max_parallel or _NO_THROTTLE,
        "additional_parameters": _additional(slurm, profile, lead_s, held),
        "srun_args": srun_args(profile, cpus),
    }


def of_slots(experiment: Job, slots: int) -> Job:
    """Return the experiment with the request of a job in which this many runs train at the same time."""
    slurm = experiment.slurm
    if slurm is None or slots == 1:
        return experiment
    more = {
        "ranks_per_node": slots * ranks_on_each_node(slurm),
        "gpus_per_node": -(-slots * slurm.gpus_per_node // slurm.runs_per_gpu),
        "mem_gb": slurm.mem_gb and slots * slurm.mem_gb,
    }
    return experiment.model_copy(update={"slurm": slurm.model_copy(update=more)})


def of_evaluation(experiment: Experiment) -> Experiment:
    """Return the experiment with the request of a job that evaluates one checkpoint: that of one rank."""
    job = of_one_node(experiment, 1)
    assert job.slurm is not None
    longest = min(EVALUATION_LIMIT_MIN, job.slurm.time_limit or EVALUATION_LIMIT_MIN)
    changed = {"time_limit": experiment.evaluation.job_time_limit or longest}
    return job.model_copy(update={"slurm": job.slurm.model_copy(update=changed)})


def of_one_node(experiment: Experiment, ranks: int) -> Experiment:
    """Return the experiment with the request of a job on one node that runs a command with these ranks.

    With GPUs at most those of a node of the run; without, their cores may be those of several.
    """
    slurm = experiment.slurm
    assert slurm is not None
    per_node = ranks_on_each_node(slurm)
    ranks = min(ranks, per_node) if slurm.gpus_per_node else ranks
    of_run = {"hold", "exclusive"}
    changed = {
        "nodes": 1,
        "spare_nodes": 0,
        "ranks_per_node": ranks,
        "gpus_per_node": -(-slurm.gpus_per_node * ranks // per_node),
        "cpus_per_gpu": cpus_per_rank(slurm),
        "mem_gb": slurm.mem_gb and -(-slurm.mem_gb * ranks // per_node),
        "signal_lead_s": None,
        "dependency": None,
        "mail": None,
        "extra": {key: value for key, value in slurm.extra.items() if sbatch_option(key) not in of_run},
    }
    return experiment.model_copy(update={"slurm": slurm.model_copy(update=changed)})


def slot_args(experiment: Job, profile: Profile, slots: int) -> list[str]:
    """Return srun's options for one run of a job that several share: its ranks, and only its cores and GPUs.

    The batch script divides the memory that the job has received. Steps can't share GPUs and have their own
    cores: for runs that share GPUs each step gets all of the job, and the script chooses from it.
    """
    slurm = profile.applied(experiment).slurm
    assert slurm is not None
    flags = ["--exact"]
    if slurm.runs_per_gpu > 1:
        of_job = of_slots(experiment, slots).slurm
        assert of_job is not None
        slurm = slurm.model_copy(update={"gpus_per_node": of_job.gpus_per_node, "ranks_per_node": 1})
        flags = ["--overlap"]
    gpus = [f"--{key.replace('_', '-')}={value}" for key, value in _gpus(slurm, profile).items()]
    return [*flags, "--nodes=1", f"--ntasks={ranks_on_each_node(slurm)}", *gpus]


def excluded(slurm: SlurmConfig, exclude: Sequence[str]) -> str | None:
    """Return sbatch's list of nodes: the file's and these; only the file's if it is a path."""
    if not exclude or (slurm.exclude and "/" in slurm.exclude):
        return slurm.exclude
    return ",".join(filter(None, (slurm.exclude, *exclude)))


def cpus_per_rank(slurm: SlurmConfig) -> int | None:
    """Return the cores per rank, None for the site's default."""
    if slurm.cpus_per_gpu is None or slurm.gpus_per_node == 0 or slurm.runs_per_gpu > 1:
        return slurm.cpus_per_gpu
    cores, ranks = slurm.cpus_per_gpu * slurm.gpus_per_node, ranks_on_each_node(slurm)
    if cores % ranks:  # a profile's default, which was not validated with the file
        message = f"{cores} cores of a node can't be shared evenly by {ranks} ranks"
        raise BadFileError(f"slurm.cpus_per_gpu: {message}; write a number that makes a multiple of {ranks}")
    return cores // ranks


def srun_args(profile: Profile, cpus: int | None) -> list[str]:
    """Return srun's options; the last of a kind applies, so these go before submitit's."""
    return [
        "--kill-on-bad-exit=1",
        # Whatever sbatch's --export was.
        "--export=ALL",
        # Each rank has a log of its own; other output (if Python could not start) goes to the batch script's.
        "--output=all",
        "--label",
        # Not inherited from sbatch since 22.05.
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *profile.srun_args,
    ]


def lead_s(experiment: Job, folder: ExperimentPaths) -> int:
    """Return how many seconds before its time limit a job is signalled to save and stop.

    The file's value; else by the longest save so far, at most half the time limit, so that a job always gets
    some work done. Slurm checks the time about every 30 s and may signal up to 60 s earlier.
    """
    assert experiment.slurm is not None
    return lead_of(experiment.slurm, lambda: saves_s(folder))


def lead_of(slurm: SlurmConfig, saves: Callable[[], Sequence[float]] = list) -> int:
    """Return ``lead_s`` of a job whose runs have taken ``saves`` seconds for their checkpoints."""
    limit_s = None if slurm.time_limit is None else slurm.time_limit * 60
    if slurm.signal_lead_s is not None and (limit_s is None or slurm.signal_lead_s < limit_s):
        return slurm.signal_lead_s
    longest_s = max(saves(), default=None)
    lead = FIRST_LEAD_S if longest_s is None else min(round(3 * longest_s) + 60, 65535)
    return lead if limit_s is None else min(lead, limit_s // 2)


def shape(experiment: Job, profile: Profile) -> Hashable:
    """Return the common part of an array's runs: the content of their batch script except the run."""
    experiment = profile.applied(experiment)
    slurm, environment = experiment.slurm, experiment.environment
    assert slurm is not None
    bound = workload_of(experiment).data_paths(experiment) if environment.container else []
    parts = [experiment.name, slurm.model_dump(), environment.model_dump(), profile.model_dump(), bound]
    evaluation = experiment.evaluation if isinstance(experiment, Experiment) else None
    by_job = [evaluation.as_job, evaluation.job_time_limit] if evaluation else []
    return json.dumps([*parts, experiment.recovery.standby, *by_job], sort_keys=True)


def _gpus(slurm: SlurmConfig, profile: Profile) -> dict[str, Any]:
    if slurm.gpus_per_node == 0:
        return {}
    if slurm.gpu_type is not None:
        _refuse_unsafe({"gpu_type": slurm.gpu_type})
    request = ":".join(filter(None, (slurm.gpu_type, str(slurm.gpus_per_node))))
    return {"gres": f"gpu:{request}"} if profile.gpus == "gres" else {"gpus_per_node": request}


def _additional(slurm: SlurmConfig, profile: Profile, lead_s: int, held: bool) -> dict[str, Any]:
    """Return the options that submitit does not support, or not as needed."""
    fixed = _without_none({"reservation": slurm.reservation})
    cores = {}
    if isinstance(slurm.nodes, str):
        fixed["nodes"] = slurm.nodes
        # With tasks per node a job has the tasks of the minimum nodes, and no more nodes than tasks (22.05).
        cores["mincpus"] = ranks_on_each_node(slurm) * (cpus_per_rank(slurm) or 1)
    # Limits of the login shell, such as minutes of CPU time, are not meant for jobs: the node's own apply.
    more = {"propagate": "NONE"} | cores
    more |= {
        key.replace("_", "-"): value
        for options in (profile.sbatch, slurm.extra)
        for key, value in options.items()
        if value is not False and not (slurm.mem_gb is not None and sbatch_option(key) in MEMORY_SHARES)
    }
    if slurm.gpus_per_node and profile.gpus == "gres" and "gres" in more:
        more["gres"] = f"{_gpus(slurm, profile)['gres']},{more['gres']}"
    _refuse_unsafe(fixed | more)
    if taken := [key for key in more if sbatch_option(key) in slurm_rules.OWNED]:
        raise BadFileError(f"slurm.extra.{taken[0]}: belongs to hpc-train; take it out")
    # submitit's own signal line follows an environment variable.
    fixed |= {"requeue": True, "signal": f"USR2@{lead_s}"}
    if slurm.spare_nodes:
        fixed["no-kill"] = True  # the job outlives its nodes, except the first
    return more | fixed | ({"hold": True} if held else {})


def _refuse_unsafe(parameters: Mapping[str, Any]) -> None:
    for key, value in parameters.items():
        pattern = _PATTERNS.get(key, SLURM_WORD_PATTERN)
        if isinstance(value, str) and not (re.fullmatch(pattern, value) and is_clean(value)):
            message = f"{shown(value)} is not allowed in a batch script"
            raise BadFileError(f"slurm.{key.replace('-', '_')}: {message}; write one word")


def saves_s(folder: ExperimentPaths) -> list[float]:
    """Return how long saves took in newest attempts of the experiment's runs, the longest of each."""
    if not folder.folder.is_dir():
        return []
    runs = (RunPaths(path) for path in folder.folder.iterdir() if path.name[:1] != "." and path.is_dir())
    folders = (folder for run in islice(runs, _RUNS_LOOKED_AT) for folder in run.attempt_folders()[-3:])
    records = map(read_record, folders)
    return [record.save_s for record in records if record is not None and record.save_s is not None]


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def ranks(slurm: SlurmConfig) -> Ranks:
    """Return the ranks of a run with this section."""
    per_node, nodes = ranks_on_each_node(slurm), slurm_rules.max_nodes(slurm)
    limit_s = None if slurm.time_limit is None else slurm.time_limit * 60
    occupied = nodes + slurm.spare_nodes
    gpus = occupied * slurm.gpus_per_node / slurm.runs_per_gpu
    gpu_hours = None if limit_s is None else gpus * limit_s / 3600
    return Ranks(
        most=nodes * per_node,
        per_node=per_node,
        fewest=slurm_rules.min_nodes(slurm) * per_node,
        gpu_hours=gpu_hours if gpus else 0.0,
        gpus=gpus,
        cores=occupied * cpus_per_node(slurm),
        attempt_s=None if limit_s is None else limit_s - lead_of(slurm),
    )


def cpus_per_node(slurm: SlurmConfig) -> int:
    """Return the minimum number of cores that the job needs on each node."""
    per_node = ranks_on_each_node(slurm)
    if slurm.runs_per_gpu > 1:
        return per_node * (slurm.cpus_per_gpu or 1)
    return max(per_node, (slurm.gpus_per_node or per_node) * (slurm.cpus_per_gpu or 1))


def device_of_job(slurm: SlurmConfig, device: str, size: Ranks) -> Device:
    """Return the job's GPU, or the rank's part of a node's memory. ``device``: the file's key."""
    if slurm.gpus_per_node == 0 or device == "cpu":
        share = None if slurm.mem_gb is None else slurm.mem_gb * _GIB // (size.per_node or 1)
        remedy = "the file does not request memory; write slurm.mem_gb"
        return Device("a rank's share of a node", is_gpu=False, memory_bytes=share, remedy=remedy)
    items = [item.strip() for item in str(slurm.extra.get("gres") or "").split(",")]
    gres = ",".join(item for item in items if item.removeprefix("gres/").startswith("gpu"))
    names = (slurm.gpu_type, gres, slurm.constraint)
    for name in (text for text in names if isinstance(text, str)):
        if (gib := gpu_memory_gib(name)) is not None:
            count = slurm.runs_per_gpu
            shown = name if count == 1 else f"1/{count} of {name}"
            return Device(shown, is_gpu=True, memory_bytes=int(gib * _GIB) // count)
    why = f"no GPU of type {slurm.gpu_type} is known" if slurm.gpu_type else "the file names no type of GPU"
    remedy = f"{why}; write slurm.gpu_type, like a100_80gb"
    return Device(slurm.gpu_type or "a GPU", is_gpu=True, memory_bytes=None, remedy=remedy)


#: From the signal to the end of the current step. Assumed; longer steps need more.
STEP_RESERVE_S = 5
SAVES = 3


def save_warnings(experiment: Job, folder: ExperimentPaths) -> list[str]:
    """Return warnings about saves that took longer than the available time; needs the profile's settings."""
    saves = saves_s(folder)
    if experiment.slurm is None or not saves:
        return []
    longest_s = max(saves)
    by_partition = [_preemption(name, longest_s) for name in (experiment.slurm.partition or "").split(",")]
    return [warning for warning in (*by_partition, _time_limit(experiment, folder, longest_s)) if warning]


def _preemption(partition: str, longest_s: float) -> str | None:
    try:
        name, grace_s = preemption_grace(partition)
    except (NoSchedulerError, commands.RefusedError):
        return None  # the job is submitted nevertheless
    if grace_s is None or grace_s >= needed_s(longest_s):
        return None
    return (
        f"a job of partition {name} that is preempted has {grace_s} s, but the longest save so far took "
        f"{longest_s:.1f} s; a step, and maybe another save, must end before. Else the last checkpoint is "
        "what counts: write a smaller checkpoint.every_min"
    )


def needed_s(longest_s: float) -> float:
    """Return how long a job needs from preemption's signal to its end, by its longest save."""
    # A save under way is finished before the last one begins.
    return 2 * longest_s + STEP_RESERVE_S


def preemption_grace(partition: str) -> tuple[str, int | None]:
    """Return the partition's name (empty: the default's) and the seconds from preemption to the kill.

    None if its jobs are not preempted, or the partition does not determine the time.
    """
    values = commands.partition(partition)
    return values.get("PartitionName", partition), grace_s_of(values, commands.config())


def grace_s_of(partition: Mapping[str, str], config: Mapping[str, str]) -> int | None:
    """Return ``preemption_grace``'s seconds from the settings of the partition and of Slurm."""
    mode = partition.get("PreemptMode") or config.get("PreemptMode", "OFF")
    if config.get("PreemptType", "preempt/none") != "preempt/partition_prio" or mode.startswith("OFF"):
        return None
    # Without a grace SIGTERM is followed by SIGKILL as at scancel.
    return _seconds(partition.get("GraceTime")) or _seconds(config.get("KillWait"))


def _seconds(text: str | None) -> int | None:
    number = (text or "").split()[:1]
    return int(number[0]) if number and number[0].isdecimal() else None


def _time_limit(experiment: Job, folder: ExperimentPaths, longest_s: float) -> str | None:
    slurm, lead = experiment.slurm, lead_s(experiment, folder)
    assert slurm is not None
    if lead >= SAVES * longest_s:
        return None
    key = "slurm.time_limit" if slurm.signal_lead_s is None else "slurm.signal_lead_s"
    return (
        f"the last save begins {lead} s before the time limit, but the longest so far took "
        f"{longest_s:.1f} s; raise {key}, so that three fit in"
    )
