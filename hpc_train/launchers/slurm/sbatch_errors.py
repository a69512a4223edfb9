"""Maps Slurm's messages of refusal to the key of the file, with a remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.config.schema import Experiment
from hpc_train.config.synonyms import SBATCH_KEYS
from hpc_train.validate.slurm_rules import MEMORY_SHARES


@dataclass(frozen=True)
class Advice:
    """A key of the file, dotted, and the remedy."""

    key: str
    remedy: str


_MANY = "the site's limits count every run; wait until others have ended, or submit fewer at once"
#: Slurm's own messages (its slurm_errno.c, and sbatch's options; measured with 22.05 if it could be caused).
_BY_MESSAGE: tuple[tuple[str, str, str], ...] = (
    (r"max\w*submit|job submit limit", "slurm", _MANY),
    (
        r"\b(qos|assoc)min\w+",
        "slurm",
        "request the minimum that `sacctmgr show qos format=name,mintres` lists, or write another slurm.qos",
    ),
    (r"array specification", "sweep.grid", "submit fewer runs at once; the site bounds the size of an array"),
    (
        r"invalid account|account/partition combination",
        "slurm.account",
        "write one that `sacctmgr show associations user=$USER` lists",
    ),
    (
        r"invalid partition|requested partition|permitted to use this partition|partition name",
        "slurm.partition",
        "write one that `sinfo` lists and that you may use",
    ),
    (r"invalid qos|invalid quality of service", "slurm.qos", "write one that `sacctmgr show qos` lists"),
    (r"invalid feature", "slurm.constraint", "write features that `sinfo -o '%N %f'` lists"),
    (
        r"reservation (is )?(invalid|not usable|\S+ not)|invalid reservation|access denied to .*reservation",
        "slurm.reservation",
        "write one that `scontrol show reservation` lists",
    ),
    (r"job dependenc", "slurm.dependency", "write one like afterok:12345, of a job that Slurm still knows"),
    (r"invalid node name", "slurm.exclude", "write names that `sinfo -N` lists"),
    (
        r"invalid generic resource|invalid gres|invalid trespec",
        "slurm.gpu_type",
        "write GPUs that `sinfo -o '%N %G'` lists",
    ),
    (
        r"requested time limit is invalid|(max\w*wall|timelimit)\w*",
        "slurm.time_limit",
        "write less than `sinfo -o '%P %l'` allows",
    ),
    (
        r"memory specification can ?not be satisfied",
        "slurm.mem_gb",
        "write less than `sinfo -o '%N %m'` shows, in MB",
    ),
    (r"invalid mail|mail.type", "slurm.mail", "write another address, or take it out"),
    (
        r"cpu count per node|more processors requested",
        "slurm.cpus_per_gpu",
        "write less than `sinfo -o '%N %c'` shows",
    ),
    (r"node count specification|maximum node", "slurm.nodes", "write fewer"),
    (
        r"node configuration",
        "slurm",
        "ask for nodes like those that `sinfo -o '%P %D %c %m %G %f'` lists",
    ),
    (r"invalid licen[sc]e", "slurm.extra.licenses", "write one that `scontrol show licenses` lists"),
    (r"invalid wckey", "slurm.extra.wckey", "write one of yours, or take it out"),
)
_OPTION = re.compile(r"--([a-z][a-z-]+)")
#: Subject of a message by a site's plug-in that names no option → the option.
_SUBJECTS: tuple[tuple[str, str], ...] = (
    (r"(wall ?)?time[ -]?limit|wall ?time", "time"),
    (r"\baccount\b|\bproject\b", "account"),
    (r"\bqos\b", "qos"),
    (r"\bpartition\b", "partition"),
    (r"\breservation\b", "reservation"),
    (r"mem(ory)?[ -]per[ -](cpu|core)", "mem-per-cpu"),
    (r"\bmemory\b", "mem"),
)
_GENERAL = "change the request as these words require, or ask the cluster's administrators"

#: A limit of all of a user's or a group's jobs together.
_PER_USER = re.compile(r"(QOS|Assoc)\w*(Per(User|Account)|Grp)\w*")


def advice(message: str, experiment: Experiment) -> Advice:
    """Return the key of the file that the refusal is about, and the remedy.

    Slurm's own messages have a remedy. Messages of a site's plug-ins are free text: the option that they
    name, or their only subject, gives the key, and the remedy says at most that the key is missing.
    """
    options = [option.rstrip("-") for option in _OPTION.findall(message)]
    for option in options:
        for key in experiment.slurm.extra if experiment.slurm else {}:
            if key.replace("_", "-") == option:
                return Advice(f"slurm.extra.{key}", "write it as sbatch takes it, or take it out")
    for pattern, key, remedy in _BY_MESSAGE:
        if not options and re.search(pattern, message, re.IGNORECASE):
            missing = key == "slurm.time_limit" and _value(key, experiment) is None
            return Advice(key, "write one; the file has none" if missing else remedy)
    options = options or [
        option for pattern, option in _SUBJECTS if re.search(pattern, message, re.IGNORECASE)
    ]
    if not set(options).isdisjoint(MEMORY_SHARES):
        share = next(option for option in options if option in MEMORY_SHARES)
        return Advice(
            "slurm.mem_gb", f"take it out, and write slurm.extra.{share} instead if these words ask for it"
        )
    keys = {SBATCH_KEYS[option] for option in options if option in SBATCH_KEYS}
    key = keys.pop() if len(keys) == 1 else "slurm"
    if " " in key or key == "slurm":
        return Advice("slurm", _GENERAL)
    is_missing = _value(key, experiment) is None
    return Advice(key, "write one; the file has none" if is_missing else _GENERAL)


def _value(key: str, experiment: Experiment) -> object:
    return getattr(experiment.slurm, key.partition(".")[2], None) if key.startswith("slurm.") else None


def may_never_start(reason: str) -> bool:
    """Return True if the reason passes once other jobs have ended, unless the job alone requests too much."""
    return _PER_USER.fullmatch(reason) is not None
