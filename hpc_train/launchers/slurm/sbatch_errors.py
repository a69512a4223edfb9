"""What Slurm says no with → the key of the file that it is about, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.config.schema import Experiment


@dataclass(frozen=True)
class Advice:
    """Where in the file, dotted, and what to write there."""

    key: str
    remedy: str


_MANY = "the site's limits count every run; wait until others have ended, or submit fewer at once"
#: Slurm's words (its slurm_errno.c, and sbatch's options; measured with 22.05 where it could be caused).
_BY_WORDS: tuple[tuple[str, str, str], ...] = (
    (r"max\w*submit|job submit limit", "slurm", _MANY),
    (r"array specification", "sweep.grid", "submit fewer runs at once; the site bounds the size of an array"),
    (r"account", "slurm.account", "write one that `sacctmgr show associations user=$USER` lists"),
    (r"partition", "slurm.partition", "write one that `sinfo` lists and that you may use"),
    (r"\bqos\b|quality of service", "slurm.qos", "write one that `sacctmgr show qos` lists"),
    (r"feature", "slurm.constraint", "write features that `sinfo -o '%N %f'` lists"),
    (r"reservation", "slurm.reservation", "write one that `scontrol show reservation` lists"),
    (r"dependenc", "slurm.dependency", "write one like afterok:12345, of a job that Slurm still knows"),
    (r"node name", "slurm.exclude", "write names that `sinfo -N` lists"),
    (r"\bgres\b|generic resource|\bgpu", "slurm.gpu_type", "write GPUs that `sinfo -o '%N %G'` lists"),
    (r"time limit|--time\b", "slurm.time_limit", "write less than `sinfo -o '%P %l'` allows"),
    (r"memory|--mem", "slurm.mem_gb", "write less than `sinfo -o '%N %m'` shows, in MB"),
    (r"mail", "slurm.mail", "write another address, or take it out"),
    (r"cpu count|processors|--cpus", "slurm.cpus_per_gpu", "write less than `sinfo -o '%N %c'` shows"),
    (r"node count|maximum node", "slurm.nodes", "write fewer"),
    (r"node configuration", "slurm", "ask for nodes like those that `sinfo -o '%P %D %c %m %G %f'` lists"),
    (r"licen[sc]e", "slurm.extra.licenses", "write one that `scontrol show licenses` lists"),
    (r"wckey", "slurm.extra.wckey", "write one of yours, or take it out"),
)
_OPTION = re.compile(r"--([a-z][a-z-]+)")
_GENERAL = "fix the request, or ask the cluster's administrators"

#: A limit of all of a user's or a group's jobs together.
_PER_USER = re.compile(r"(QOS|Assoc)\w*(Per(User|Account)|Grp)\w*")


def advice(words: str, experiment: Experiment) -> Advice:
    """Return where the refusal belongs in the file and what to write; the section where that is unknown."""
    for option in _OPTION.findall(words):
        for key in experiment.slurm.extra if experiment.slurm else {}:
            if key.replace("_", "-") == option:
                return Advice(f"slurm.extra.{key}", "write it as sbatch takes it, or take it out")
    for pattern, key, remedy in _BY_WORDS:
        if re.search(pattern, words, re.IGNORECASE):
            return Advice(key, remedy)
    return Advice("slurm", _GENERAL)


def may_never_start(reason: str) -> bool:
    """Tell whether the reason passes once other jobs have ended, unless the job alone asks for too much."""
    return _PER_USER.fullmatch(reason) is not None
