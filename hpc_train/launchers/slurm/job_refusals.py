"""Explains why Slurm refuses a job or never starts it: the key of the file that is at fault, and the remedy.

Slurm decides, by ``sbatch --test-only`` before a submission and by a job's pending reason after it. Only the
partition's nodes and its time limit are read here: for them its messages do not name the request at fault.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hpc_train.errors import NoSchedulerError, UserError, counted, listed
from hpc_train.experiment.config.schema import Job, SlurmConfig
from hpc_train.experiment.config.synonyms import SBATCH_KEYS
from hpc_train.experiment.validate.slurm_rules import MEMORY_SHARES, max_nodes, min_nodes, requested_nodes
from hpc_train.launchers.base import KeyProblem
from hpc_train.launchers.slurm import commands, queue
from hpc_train.launchers.slurm.accounting import seconds
from hpc_train.launchers.slurm.options import cpus_per_node
from hpc_train.launchers.slurm.profiles import slurm_of
from hpc_train.launchers.slurm.submission import has_running_jobs


class Advice(NamedTuple):
    """A key of the file, dotted, and the remedy."""

    key: str
    remedy: str


_MANY = "the site's limits count every run; wait until others have ended, or submit fewer at once"
#: Slurm's own messages (its slurm_errno.c, and sbatch's options; measured with 22.05 if it could be caused).
_BY_MESSAGE: tuple[tuple[str, str, str], ...] = (
    (r"(max|grp)\w*submit", "slurm", _MANY),
    (r"array specification", "sweep.grid", "submit fewer runs at once; the site bounds the size of an array"),
    (
        r"invalid account|account/partition combination",
        "slurm.account",
        "write one that `sacctmgr show associations user=$USER` lists",
    ),
    (
        r"account not (in|permitted)",
        "slurm.account",
        "write one that the partition accepts: AllowAccounts and DenyAccounts of `scontrol show partition`",
    ),
    (
        r"qos not (in|permitted)",
        "slurm.qos",
        "write one that the partition accepts: AllowQos and DenyQos of `scontrol show partition`",
    ),
    (
        r"(requested|required) partition not available",
        "slurm.partition",
        "write another one, or wait until `sinfo` shows it as up",
    ),
    (
        r"invalid partition|(requested|required) partition|permitted to use this partition|partition name",
        "slurm.partition",
        "write one that `sinfo` lists and that you may use",
    ),
    (
        r"access/permission denied",
        "slurm.partition",
        "write one that you may use; with ReqResv=YES (`scontrol show partition`) it needs slurm.reservation",
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
        r"invalid generic resource|invalid gres|invalid trespec|invalid trackable resource",
        "slurm.gpu_type",
        "write GPUs that `sinfo -o '%N %G'` lists",
    ),
    (
        r"requested time limit is invalid|(max\w*wall|timelimit)\w*",
        "slurm.time_limit",
        "write less; `sinfo -o '%P %l'` lists the partitions' limits, and a QOS or the site may allow less",
    ),
    (
        r"memory specification can ?not be satisfied|memory required by task",
        "slurm.mem_gb",
        "write less than `sinfo -o '%N %m'` shows, in MB",
    ),
    (r"invalid mail|mail.type", "slurm.mail", "write another address, or take it out"),
    (
        r"cpu count per node|more processors requested",
        "slurm.cpus_per_gpu",
        "write less than `sinfo -o '%N %c'` shows",
    ),
    (
        r"node count specification|maximum node",
        "slurm.nodes",
        "write a number within the limits of `sinfo -o '%P %s'`",
    ),
    (
        r"i/o error writing|invalid user id|invalid group id",
        "slurm",
        "the file is not at fault: only the cluster's administrators can change this",
    ),
    (r"node configuration", "slurm", "request nodes like those that `sinfo -o '%P %D %c %m %G %f'` lists"),
    (r"invalid licen[sc]e", "slurm.extra.licenses", "write one that `scontrol show licenses` lists"),
    (r"invalid wckey", "slurm.extra.wckey", "write one of yours, or take it out"),
)
#: A limit of an account or a QOS by Slurm's name.
_LIMIT = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
#: Slurm's sentence after the name of a limit; some sites and versions print it alone.
_POLICY = re.compile(r"[^;]*job violates accounting/qos policy[^;]*", re.IGNORECASE)
_ANY_LIMIT = (
    "a limit of your account or QOS on jobs in the queue, their size or their time is exceeded; "
    f"`{queue.LIMITS_OF_QOS}` and `{queue.LIMITS_OF_ACCOUNTS}` list them"
)
#: Words of a site's plug-in with which it asks for what the request lacks.
_DEMAND = re.compile(
    r"\b(must|please|specify|provide|missing|mandatory|without|give|set|required?|"
    r"(not?|is) (given|set|specified))\b|\bno \w+ (was )?(given|set|specified)\b",
    re.IGNORECASE,
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
#: Parts of Slurm's messages: it has no such nodes, or only none that can be used now.
_NO_SUCH_NODES = re.compile(r"node configuration is not available|BadConstraints", re.IGNORECASE)
#: Messages that may be about the nodes' present state: sbatch may accept the job nevertheless.
_MAYBE_TEMPORARY = re.compile(
    r"configuration is not available|not available now|down, drained|busy", re.IGNORECASE
)
_PREFIX = re.compile(r"(sbatch: )?(error: |fatal: )?(allocation failure: )?")
#: Requests of the file per node.
_REQUESTS = ("nodes", "gpus_per_node", "gpu_type", "cpus_per_gpu", "mem_gb", "constraint", "exclude")
#: ``gpu:4``, ``gpu:a100:4(S:0-1)``
_GPUS = re.compile(r"gpu(?::(?P<kind>[\w.-]+))?:(?P<count>\d+)")
#: Between the names of a constraint like ``a100&nvme`` or ``[rack1*2|rack2]``.
_BETWEEN_FEATURES = re.compile(r"[&|,()\[\]]+")
_COUNT = re.compile(r"\*\d+$")
_FEATURE = re.compile(r"[\w.:+=/-]+")
_LISTED = 8


def refused(output: str, experiment: Job, runs: int = 1) -> list[KeyProblem]:
    """Return the problems for a message with which sbatch has refused the jobs of this number of runs."""
    text = without_prefix(output)
    if _NO_SUCH_NODES.search(text):
        return node_problems(experiment) or [_no_such_nodes(f"Slurm refuses it: {text}", experiment)]
    key, remedy = advice(output, experiment)
    if remedy == _MANY and runs > 1:
        remedy = _fewer_jobs(runs, experiment)
    return [KeyProblem(key, f"Slurm refuses it: {text}", remedy)]


def _fewer_jobs(runs: int, experiment: Job) -> str:
    """Return the remedy for more runs than jobs are permitted: the number per job with which they fit."""
    slurm = slurm_of(experiment)
    most = None if slurm is None else _max_jobs(slurm)
    if slurm is None or most is None or experiment.sweep.search is not None:
        return f"{_MANY}; or train several in one job: slurm.runs_per_job"
    queued = _num_queued()
    if most <= queued:
        return f"{queued} of your jobs are in the queue, and {most} may be; wait until others have ended"
    per_job = -(-runs // (most - queued))
    jobs = -(-runs // per_job)
    others = f", and {queued} are in the queue" if queued else ""
    return (
        f"you may have {most} jobs{others}; slurm.runs_per_job: {per_job} makes {counted(jobs, 'job')} of "
        f"{runs} runs"
    )


def _max_jobs(slurm: SlurmConfig) -> int | None:
    """Return the lowest limit on a user's jobs in the queue, of the account and the QOS; None if unknown."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # the service of user names does not answer
        return None
    queries = (
        (["associations", f"user={user}", "format=account,maxsubmitjobs"], slurm.account),
        (["qos", "format=name,maxsubmitjobspu"], slurm.qos),
    )
    limits = []
    for query, name in queries:
        try:
            output = commands.run(["sacctmgr", "--noheader", "--parsable2", "show", *query])
        except UserError:
            continue
        rows = [line.split("|") for line in output.splitlines() if line.count("|") == 1]
        # Without the key the site's default applies, which is one of a single row.
        rows = [row for row in rows if row[0] == name or (name is None and len(rows) == 1)]
        limits += [int(row[1]) for row in rows if row[1].isdecimal()]
    return min(limits, default=None)


def _num_queued() -> int:
    """Return the number of this user's jobs in the queue, each task of an array counted; 0 if unknown."""
    try:
        output = commands.run(["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"])
    except UserError:
        return 0
    return len(output.split())


def without_prefix(output: str) -> str:
    """Return sbatch's message without the names of the program and of its level."""
    return _PREFIX.sub("", output)


def refused_in_test(output: str, experiment: Job, runs: int = 1) -> list[KeyProblem]:
    """Return the problems for a message of ``sbatch --test-only``; empty if it may be temporary."""
    if _MAYBE_TEMPORARY.search(output):
        return node_problems(experiment)
    return refused(output, experiment, runs)


def never_starts(reason: str, experiment: Job) -> list[KeyProblem]:
    """Return the problems for a pending reason; empty if the job may start later."""
    key = queue.key_at_fault(reason)
    if key is None and queue.is_shared_limit(reason) and not has_running_jobs():
        key = queue.key_at_fault(reason, is_alone=True)
    if key is None:
        return []
    message = f"Slurm accepts the job, but never starts it: {reason}"
    if _NO_SUCH_NODES.search(reason):
        return node_problems(experiment) or [_no_such_nodes(message, experiment)]
    return [KeyProblem(key, message, queue.remedy(reason))]


def _no_such_nodes(message: str, experiment: Job) -> KeyProblem:
    slurm = slurm_of(experiment)
    requests = [(key, getattr(slurm, key)) for key in _REQUESTS]
    if slurm is not None:
        requests += [(f"extra.{key}", value) for key, value in slurm.extra.items()]
    shown = ", ".join(f"slurm.{key}: {value}" for key, value in requests if value not in {None, 0})
    remedy = "request less; `sinfo -N -o '%N %c %m %G %f'` lists what nodes have"
    return KeyProblem("slurm", f"{message}; no node satisfies all of: {shown}", remedy)


@dataclass(frozen=True)
class Node:
    """Resources of one node of a partition."""

    cpus: int
    memory_mb: int
    features: frozenset[str]
    #: Kind, in lower case, of its GPUs (empty if Slurm names none) → number.
    gpus: dict[str, int]

    @classmethod
    def parse(cls, line: str) -> Node | None:
        """Read a line of ``sinfo --format=%c|%m|%G|%f``; None for any other line."""
        cpus, memory, gres, features = [*line.strip().split("|"), "", "", ""][:4]
        if not (cpus.isdecimal() and memory.isdecimal()):
            return None
        gpus: dict[str, int] = {}
        for match in _GPUS.finditer(gres):
            kind = (match["kind"] or "").lower()
            gpus[kind] = gpus.get(kind, 0) + int(match["count"])
        return cls(int(cpus), int(memory), frozenset(features.split(",")), gpus)


def node_problems(experiment: Job) -> list[KeyProblem]:
    """Return the requests that exceed every node of the partition, or its number of nodes.

    Empty if the nodes can't be queried or not all are listed, or if only the combination is too much.
    """
    slurm = slurm_of(experiment)
    if slurm is None:
        return []
    name = _partition(slurm)
    try:
        where = [f"--partition={name}"] if name else []
        output = commands.run(["sinfo", "--noheader", "--Node", "--format=%c|%m|%G|%f", *where])
        limits = {} if "," in name else commands.partition(name)
    except UserError:  # no answer, or a refusal
        return []
    nodes = [node for line in output.splitlines() if (node := Node.parse(line))]
    total = limits.get("TotalNodes", "")
    if not nodes or (total.isdecimal() and len(nodes) < int(total)):  # powered-down nodes may be hidden
        return []
    return [*_too_much(slurm, nodes), *too_many_slots(slurm, nodes), *_node_counts(slurm, limits)]


def _partition(slurm: SlurmConfig) -> str:
    return slurm.partition or os.environ.get("SBATCH_PARTITION", "")


def _too_much(slurm: SlurmConfig, nodes: list[Node]) -> Iterator[KeyProblem]:
    remedy = "write what a node has, or another partition"
    features = {feature for node in nodes for feature in node.features} - {"", "(null)"}
    for feature in features_of(slurm.constraint or ""):
        if feature not in features:
            message = f"{feature}, but no node has this feature ({_listed(features)})"
            yield KeyProblem("slurm.constraint", message, remedy)
    kinds = {kind for node in nodes for kind in node.gpus} - {""}
    kind = (slurm.gpu_type or "").lower()
    if kind and kind not in kinds:
        message = f"{slurm.gpu_type}, but no node has such GPUs ({_listed(kinds)})"
        yield KeyProblem("slurm.gpu_type", message, remedy)
    most_gpus = max(node.gpus.get(kind, 0) if kind in kinds else sum(node.gpus.values()) for node in nodes)
    if slurm.gpus_per_node > most_gpus:
        message = f"{slurm.gpus_per_node}, but a node has at most {most_gpus}"
        yield KeyProblem("slurm.gpus_per_node", message, remedy)
    most_gb = max(node.memory_mb for node in nodes) / 1024
    if slurm.mem_gb is not None and slurm.mem_gb > most_gb:
        yield KeyProblem("slurm.mem_gb", f"{slurm.mem_gb}, but a node has at most {most_gb:.0f}", remedy)
    cpus, most_cpus = cpus_per_node(slurm), max(node.cpus for node in nodes)
    if cpus > most_cpus and slurm.cpus_per_gpu is not None:
        message = f"{slurm.cpus_per_gpu} is {cpus} per node, a node has at most {most_cpus}"
        yield KeyProblem("slurm.cpus_per_gpu", message, remedy)
    elif cpus > most_cpus:
        message = f"{cpus} ranks need a core each, a node has at most {most_cpus}"
        yield KeyProblem("slurm.ranks_per_node", message, remedy)
    if min_nodes(slurm) > len(nodes):
        yield KeyProblem("slurm.nodes", f"{slurm.nodes}, but the partition has {len(nodes)}", remedy)
    elif requested_nodes(slurm) > len(nodes):
        message = f"{requested_nodes(slurm)} nodes with the spare ones, but the partition has {len(nodes)}"
        yield KeyProblem("slurm.spare_nodes", message, f"write at most {len(nodes) - min_nodes(slurm)}")


def too_many_slots(slurm: SlurmConfig, nodes: list[Node]) -> Iterator[KeyProblem]:
    """Yield a problem if no node has room for as many runs as are to share a job."""
    room = max(_room(slurm, node) for node in nodes)
    if slurm.runs_per_job > 1 and 0 < room < slurm.runs_per_job:
        needs = [f"{slurm.runs_per_job * cpus_per_node(slurm)} cores"]
        gpus = slurm.runs_per_job * slurm.gpus_per_node // slurm.runs_per_gpu
        needs += [f"{gpus} GPUs"] if gpus else []
        needs += [f"{slurm.runs_per_job * slurm.mem_gb} GB"] if slurm.mem_gb else []
        message = f"{slurm.runs_per_job} runs need {', '.join(needs)}; a node has room for {room} of them"
        yield KeyProblem("slurm.runs_per_job", message, f"write at most {room}, or request less for a run")


def _room(slurm: SlurmConfig, node: Node) -> int:
    room = [node.cpus // cpus_per_node(slurm)]
    if slurm.gpus_per_node:
        gpus = node.gpus.get((slurm.gpu_type or "").lower()) or sum(node.gpus.values())
        room.append(gpus // slurm.gpus_per_node * slurm.runs_per_gpu)
    if slurm.mem_gb:
        room.append(node.memory_mb // (1024 * slurm.mem_gb))
    return min(room)


def _node_counts(slurm: SlurmConfig, limits: dict[str, str]) -> Iterator[KeyProblem]:
    name, most, fewest = (limits.get(key, "") for key in ("PartitionName", "MaxNodes", "MinNodes"))
    if most.isdecimal() and min_nodes(slurm) > int(most):
        message = f"{slurm.nodes}, but a job in partition {name} gets at most {most} (MaxNodes)"
        yield KeyProblem("slurm.nodes", message, f"write at most {most}, or another partition")
    elif most.isdecimal() and requested_nodes(slurm) > int(most):
        label = f"{requested_nodes(slurm)} nodes with the spare ones"
        message = f"{label}, but a job in partition {name} gets at most {most} (MaxNodes)"
        yield KeyProblem("slurm.spare_nodes", message, f"write at most {int(most) - min_nodes(slurm)}")
    if fewest.isdecimal() and max_nodes(slurm) + slurm.spare_nodes < int(fewest):
        message = f"{slurm.nodes}, but a job in partition {name} needs at least {fewest} (MinNodes)"
        yield KeyProblem("slurm.nodes", message, f"write at least {fewest}, or another partition")


def features_of(constraint: str) -> list[str]:
    """Return the features that a constraint names; empty if it contains more than names and counts."""
    parts = [_COUNT.sub("", word).strip() for word in _BETWEEN_FEATURES.split(constraint)]
    names = list(dict.fromkeys(word for word in parts if word))
    return names if all(map(_FEATURE.fullmatch, names)) else []


def time_limit_problems(experiment: Job) -> list[KeyProblem]:
    """Return a problem if the job's time exceeds its only partition's: ``sbatch --test-only`` accepts it.

    Empty if a QOS of this cluster may lift the limit.
    """
    slurm = slurm_of(experiment)
    if slurm is None or slurm.time_limit is None or "," in (name := _partition(slurm)):
        return []
    try:
        limits = commands.partition(name)
        most_s = seconds(limits.get("MaxTime", ""))
        if not most_s or slurm.time_limit * 60 <= most_s or _a_qos_lifts_time_limits():
            return []
    except (NoSchedulerError, commands.RefusedError):
        return []
    most = f"{most_s // 60:.0f}"
    message = f"{slurm.time_limit} min exceed the {most} min of partition {limits.get('PartitionName', name)}"
    remedy = f"write at most {most}min, or submit to another partition"
    return [KeyProblem("slurm.time_limit", message, remedy)]


def _a_qos_lifts_time_limits() -> bool:
    if commands.config().get("AccountingStorageType", "(null)").endswith(("/none", "(null)")):
        return False
    output = commands.run(["sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=flags"])
    return "partitiontimelimit" in output.lower()


def _listed(names: set[str]) -> str:
    return f"there are {listed(sorted(names), _LISTED)}" if names else "there are none"


def advice(message: str, experiment: Job) -> Advice:
    """Return the key of the file that the refusal is about, and the remedy.

    Slurm's own messages have a remedy. Messages of a site's plug-ins are free text: the option that they
    name, or their only subject, gives the key, and the remedy says at most that the key is missing.
    """
    options = [option.rstrip("-") for option in _OPTION.findall(message)]
    for option in options:
        for key in experiment.slurm.extra if experiment.slurm else {}:
            if key.replace("_", "-") == option:
                return Advice(f"slurm.extra.{key}", "write it as sbatch takes it, or take it out")
    if not (text := _POLICY.sub("", message).strip(" ;")):
        return Advice("slurm", _ANY_LIMIT)
    if (limit := _LIMIT.search(text)) and "Submit" not in limit[0]:
        return Advice(queue.requested_key(limit[0]), queue.remedy(limit[0]))
    for pattern, key, remedy in _BY_MESSAGE:
        if not options and re.search(pattern, text, re.IGNORECASE):
            missing = key == "slurm.time_limit" and _value(key, experiment) is None
            return Advice(key, "write one; the file has none" if missing else remedy)
    is_demand = bool(options) or _DEMAND.search(text) is not None
    subjects = (option for pattern, option in _SUBJECTS if re.search(pattern, text, re.IGNORECASE))
    options = options or list(subjects)
    if not set(options).isdisjoint(MEMORY_SHARES):
        share = next(option for option in options if option in MEMORY_SHARES)
        return Advice(
            "slurm.mem_gb", f"take it out, and write slurm.extra.{share} instead if these words ask for it"
        )
    keys = {SBATCH_KEYS[option].partition(" ")[0] for option in options if option in SBATCH_KEYS}
    key = keys.pop() if len(keys) == 1 else "slurm"
    if key == "slurm":
        return Advice("slurm", _GENERAL)
    is_missing = is_demand and _value(key, experiment) is None
    return Advice(key, "write one; the file has none" if is_missing else _GENERAL)


def _value(key: str, experiment: Job) -> object:
    return getattr(experiment.slurm, key.partition(".")[2], None) if key.startswith("slurm.") else None
