"""Rules on ``slurm:`` and on the number of ranks that it requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

from hpc_train.errors import counted
from hpc_train.experiment.config.fields import SLURM_WORD_PATTERN
from hpc_train.experiment.config.problems import KeyPath, Problem, shown
from hpc_train.experiment.config.schema import Experiment, Job, SlurmConfig
from hpc_train.experiment.config.synonyms import SBATCH_KEYS
from hpc_train.experiment.topology.degrees import find_degrees
from hpc_train.experiment.validate.base import rule

#: Options of sbatch that the launcher sets itself.
OWNED = (
    "wrap", "array", "output", "error", "input", "signal", "requeue", "no-requeue", "export", "export-file",
    "job-name", "open-mode", "chdir", "parsable", "test-only", "wait", "wait-all-nodes",
    # They change sbatch's output, or the cluster that it talks to.
    "clusters", "help", "quiet", "usage", "verbose", "version",
    # For root, on behalf of other users.
    "uid", "gid",
)  # fmt: skip
#: Options that request memory by the core or the GPU, for sites that refuse it by the node (``mem_gb``).
MEMORY_SHARES = ("mem-per-cpu", "mem-per-gpu")
_WORD = re.compile(SLURM_WORD_PATTERN)


def min_nodes(slurm: SlurmConfig) -> int:
    """Return the minimum number of nodes."""
    return slurm.nodes if isinstance(slurm.nodes, int) else int(slurm.nodes.partition("-")[0])


def max_nodes(slurm: SlurmConfig) -> int:
    """Return ``nodes``, or the upper end of a range."""
    return slurm.nodes if isinstance(slurm.nodes, int) else int(slurm.nodes.partition("-")[2])


def requested_nodes(slurm: SlurmConfig) -> int:
    """Return the minimum number of nodes of the job, with its spare nodes."""
    return min_nodes(slurm) + slurm.spare_nodes


def ranks_on_each_node(slurm: SlurmConfig) -> int:
    """Return the number of ranks per node: ``ranks_per_node``, else one per GPU, else one."""
    return slurm.ranks_per_node or slurm.gpus_per_node or 1


@rule("slurm.node-range", "slurm.nodes")
def node_range_goes_up(experiment: Experiment) -> Iterator[Problem]:
    """The lower end of a range of nodes comes first."""
    if experiment.slurm is None or isinstance(experiment.slurm.nodes, int):
        return
    low, high = experiment.slurm.nodes.split("-")
    if int(low) > int(high):
        message = f"{experiment.slurm.nodes} starts with the larger number"
        yield Problem(("slurm", "nodes"), message, f"write {high}-{low}")


@rule("slurm.spare-nodes", "slurm.spare_nodes slurm.nodes slurm.runs_per_job recovery.restart")
def spare_nodes_can_be_used(experiment: Job) -> Iterator[Problem]:
    """``spare_nodes`` needs a number of nodes, a restart in place, and a job for each run."""
    slurm = experiment.slurm
    if slurm is None or not slurm.spare_nodes:
        return
    key = ("slurm", "spare_nodes")
    if isinstance(slurm.nodes, str):
        message = f"slurm.nodes is the range {slurm.nodes}, so each attempt uses all nodes of its allocation"
        yield Problem(key, message, f"write slurm.nodes: {min_nodes(slurm)}, or take it out")
    if slurm.runs_per_job > 1:
        message = f"{slurm.runs_per_job} runs share the job, and all of them need its one node"
        yield Problem(key, message, "take slurm.spare_nodes or slurm.runs_per_job out")
    if experiment.recovery.restart == "requeue":
        message = "recovery.restart: requeue gives all nodes back after each failure, spare ones included"
        yield Problem(key, message, "write recovery.restart: auto, or take it out")


@rule(
    "slurm.too-many-ranks",
    "slurm.nodes slurm.gpus_per_node slurm.ranks_per_node parallel optimization.global_batch_size "
    "optimization.micro_batch_size",
)
def every_rank_has_a_micro_batch(experiment: Experiment) -> Iterator[Problem]:
    """Slurm must not start more ranks than a step has micro-batches."""
    slurm, optimization, parallel = experiment.slurm, experiment.optimization, experiment.parallel
    if slurm is None or optimization.micro_batch_size == "auto":
        return
    micro_batches = max(1, experiment.micro_batches)
    nodes = max_nodes(slurm)
    ranks = nodes * ranks_on_each_node(slurm)
    degrees = find_degrees(parallel, ranks, ranks_on_each_node(slurm))
    if isinstance(degrees, Problem):
        return  # ``check_start`` reports it
    degree = degrees.tensor * degrees.pipeline
    if ranks // degree <= micro_batches:
        return
    batch, micro = optimization.global_batch_size, optimization.micro_batch_size
    places = f"{nodes} node{'s' * (nodes > 1)} of {ranks_on_each_node(slurm)} ranks"
    yield Problem(
        ("slurm", "nodes"),
        f"{places} make {ranks} ranks, but a step has {counted(micro_batches, 'micro-batch')} "
        f"(global_batch_size {batch} / micro_batch_size {micro})",
        f"ask for at most {counted(micro_batches * degree, 'rank')}, or write a smaller micro_batch_size",
    )


@rule("slurm.degrees", "slurm.nodes", "slurm.gpus_per_node", "slurm.ranks_per_node", "parallel")
def degrees_divide_the_ranks(experiment: Experiment) -> Iterator[Problem]:
    """The product of the degrees must divide the number of ranks."""
    slurm, parallel = experiment.slurm, experiment.parallel
    keys = ("shard", "replicate", "tensor", "pipeline")
    product = prod(getattr(parallel, key) or 1 for key in keys)
    if slurm is None or (min_nodes(slurm) * ranks_on_each_node(slurm)) % product == 0:
        return
    ranks = min_nodes(slurm) * ranks_on_each_node(slurm)
    key = next(key for key in keys if (getattr(parallel, key) or 1) > 1)
    message = f"the degrees make groups of {product} ranks, which don't divide {ranks} ranks"
    yield Problem(("parallel", key), message, f"write degrees whose product divides {ranks}")


@rule("slurm.gpu-type", "slurm.gpu_type", "slurm.gpus_per_node")
def a_kind_of_gpu_needs_gpus(experiment: Experiment) -> Iterator[Problem]:
    """``gpu_type`` needs ``gpus_per_node``."""
    slurm = experiment.slurm
    if slurm is not None and slurm.gpu_type is not None and slurm.gpus_per_node == 0:
        message = "is given, but no GPUs are asked for"
        yield Problem(("slurm", "gpu_type"), message, "write slurm.gpus_per_node, or take it out")


@rule("slurm.shared-gpus", "slurm.gpus_per_node", "slurm.ranks_per_node", "device")
def every_rank_has_a_gpu(experiment: Experiment) -> Iterator[Problem]:
    """A GPU can't be shared by several ranks."""
    slurm = experiment.slurm
    if slurm is None or slurm.ranks_per_node is None or experiment.device == "cpu":
        return
    if 0 < slurm.gpus_per_node < slurm.ranks_per_node:
        message = f"{slurm.ranks_per_node} ranks would share {slurm.gpus_per_node} GPUs, which NCCL refuses"
        yield Problem(("slurm", "ranks_per_node"), message, f"write {slurm.gpus_per_node}, or take it out")


@rule("slurm.uneven-cores", "slurm.cpus_per_gpu", "slurm.gpus_per_node", "slurm.ranks_per_node")
def ranks_share_the_cores_evenly(experiment: Experiment) -> Iterator[Problem]:
    """The cores per GPU must divide evenly among the ranks of a node."""
    slurm = experiment.slurm
    if slurm is None or slurm.cpus_per_gpu is None or slurm.gpus_per_node == 0:
        return
    cores, ranks = slurm.cpus_per_gpu * slurm.gpus_per_node, ranks_on_each_node(slurm)
    if cores % ranks:
        yield Problem(
            ("slurm", "cpus_per_gpu"),
            f"{slurm.gpus_per_node} GPUs of {slurm.cpus_per_gpu} cores have {cores}, which {ranks} ranks "
            "can't share evenly",
            f"write a number that makes a multiple of {ranks}",
        )


@rule("slurm.signal-lead", "slurm.signal_lead_s", "slurm.time_limit")
def the_warning_comes_within_the_time(experiment: Experiment) -> Iterator[Problem]:
    """``signal_lead_s`` must be less than ``time_limit``."""
    slurm = experiment.slurm
    if slurm is None or slurm.signal_lead_s is None or slurm.time_limit is None:
        return
    limit_s = slurm.time_limit * 60
    if slurm.signal_lead_s >= limit_s:
        message = f"{slurm.signal_lead_s} s is not below slurm.time_limit of {limit_s} s"
        yield Problem(("slurm", "signal_lead_s"), message, f"write less than {limit_s}")


@rule("slurm.shared-job", "slurm.runs_per_job", "slurm.nodes", "sweep.search")
def runs_can_share_a_job(experiment: Experiment) -> Iterator[Problem]:
    """Runs that share a job have one node and no search, whose trials start at other times."""
    slurm = experiment.slurm
    if slurm is None or slurm.runs_per_job == 1:
        return
    path, remedy = ("slurm", "runs_per_job"), "take runs_per_job out, or write slurm.nodes: 1"
    if max_nodes(slurm) > 1:
        yield Problem(path, f"runs that share a job have one node each, not {slurm.nodes}", remedy)
    if experiment.sweep.search is not None:
        message = "trials of a search start one after the other, so they can't share a job (sweep.search)"
        yield Problem(path, message, "take it out, or write a sweep.grid, list or random")


@rule(
    "slurm.runs-per-gpu",
    "slurm.runs_per_gpu",
    "slurm.runs_per_job",
    "slurm.gpus_per_node",
    "environment.container",
)
def runs_can_share_a_gpu(job: Job) -> Iterator[Problem]:
    """Runs that share a GPU share a job, use one GPU each, and run outside of containers."""
    slurm = job.slurm
    if slurm is None or slurm.runs_per_gpu == 1:
        return
    path, count = ("slurm", "runs_per_gpu"), slurm.runs_per_gpu
    if slurm.runs_per_job % count:
        message = f"{count} runs share each GPU of a job, but slurm.runs_per_job: {slurm.runs_per_job} is not"
        multiple = count * -(-slurm.runs_per_job // count)
        remedy = f"write slurm.runs_per_job: {multiple}, or take runs_per_gpu out"
        yield Problem(path, f"{message} a multiple of {count}", remedy)
    if slurm.gpus_per_node != 1:
        message = f"a run shares one GPU, but slurm.gpus_per_node is {slurm.gpus_per_node}"
        yield Problem(path, message, "write slurm.gpus_per_node: 1, or take runs_per_gpu out")
    if job.environment.container is not None:
        message = "runs in a container can't share a GPU, since they do not see the folder of MPS on the node"
        yield Problem(path, message, "take runs_per_gpu or environment.container out")


@rule("slurm.shared-gpu-use", "slurm.runs_per_gpu", "device", "optimization.micro_batch_size")
def training_can_share_a_gpu(experiment: Experiment) -> Iterator[Problem]:
    """Runs that share a GPU use it, and do not search for the micro-batch size that fills it."""
    if experiment.slurm is None or experiment.slurm.runs_per_gpu == 1:
        return
    if experiment.device == "cpu":
        yield Problem(("slurm", "runs_per_gpu"), "device: cpu uses no GPU", "take one of the two out")
    if experiment.optimization.micro_batch_size == "auto":
        message = "auto fills the free memory of a GPU, which the other runs on it change meanwhile"
        remedy = "write a number, or take slurm.runs_per_gpu out"
        yield Problem(("optimization", "micro_batch_size"), message, remedy)


@rule("recovery.standby", "recovery.standby recovery.restart slurm.runs_per_job")
def ranks_can_be_on_standby(experiment: Job) -> Iterator[Problem]:
    """``standby`` needs ranks of our trainer, a restart in place, and a job for each run."""
    if not experiment.recovery.standby:
        return
    key, remedy = ("recovery", "standby"), "take one of them out"
    if experiment.workload == "program":
        yield Problem(key, "a program imports its modules itself, once its attempt begins", "take it out")
    if experiment.recovery.restart == "requeue":
        message = "recovery.restart: requeue starts the ranks of the next attempt in another job"
        yield Problem(key, message, "write recovery.restart: auto, or take it out")
    if experiment.slurm is not None and experiment.slurm.runs_per_job > 1:
        yield Problem(key, "is not supported for runs that share a job (slurm.runs_per_job)", remedy)


@rule(
    "evaluation.as-job",
    "evaluation parallel checkpoint.best early_stopping sweep.search optimization.on_non_finite "
    "optimization.on_spike recovery.verify_every_steps logging slurm.runs_per_job environment.container",
)
def jobs_can_evaluate(experiment: Experiment) -> Iterator[Problem]:
    """``as_job`` evaluates on one rank, and nothing in training may wait for the result."""
    evaluation, slurm = experiment.evaluation, experiment.slurm
    key, remedy = ("evaluation", "as_job"), "take one of them out"
    if not evaluation.as_job:
        if evaluation.job_time_limit is not None:
            message = "is the limit of evaluations by jobs, and evaluation.as_job is false"
            yield Problem(("evaluation", "job_time_limit"), message, "write as_job: true, or take it out")
        return
    if experiment.checkpoint.best is not None:
        message = "the best checkpoint is chosen in training (checkpoint.best), before such a job has ended"
        yield Problem(key, message, remedy)
    if experiment.early_stopping is not None:
        yield Problem(key, "early_stopping decides in training, before such a job has ended", remedy)
    if experiment.sweep.search is not None:
        yield Problem(key, "a trial of sweep.search ends before such a job has ended", remedy)
    going_back = [
        name for name in ("on_non_finite", "on_spike") if getattr(experiment.optimization, name) == "rollback"
    ]
    if going_back:
        message = f"{going_back[0]}: rollback may replace a checkpoint while such a job evaluates it"
        yield Problem(key, message, f"write optimization.{going_back[0]}: skip, or take it out")
    if experiment.recovery.verify_every_steps is not None:
        message = "recovery.verify_every_steps may reject a checkpoint while such a job evaluates it"
        yield Problem(key, message, remedy)
    named = [name for name in ("wandb", "mlflow", "tensorboard", "csv") if getattr(experiment.logging, name)]
    if named:
        message = f"logging.{named[0]} receives rows while a run trains, and not those of such jobs"
        yield Problem(key, message, remedy)
    if isinstance(degrees := find_degrees(experiment.parallel, 1, 1), Problem):
        message = f"such a job has one rank: {degrees.message}"
        yield Problem(key, message, remedy)
    if slurm is not None and slurm.runs_per_job > 1:
        yield Problem(key, "is not supported for runs that share a job (slurm.runs_per_job)", remedy)
    if experiment.environment.container is not None:
        message = "has not been tested with environment.container and is not supported with it"
        yield Problem(key, message, remedy)


@rule("slurm.extra-option", "slurm.extra", "slurm.mem_gb")
def extra_options_are_free(experiment: Experiment) -> Iterator[Problem]:
    """``slurm.extra`` must not contain options that hpc-train sets or has keys for."""
    slurm = experiment.slurm
    if slurm is None:
        return
    yield from taken_options(slurm.extra, ("slurm", "extra"))
    for key in slurm.extra:
        if slurm.mem_gb is not None and sbatch_option(key) in MEMORY_SHARES:
            message = "requests memory a second time, beside slurm.mem_gb"
            yield Problem(("slurm", "extra", key), message, "take one of them out", on_key=True)


@rule("slurm.extra-value", "slurm.extra")
def extra_values_are_words(experiment: Experiment) -> Iterator[Problem]:
    """The values of ``slurm.extra`` must be safe in a ``#SBATCH`` line."""
    yield from bad_option_values(experiment.slurm.extra if experiment.slurm else {}, ("slurm", "extra"))


def taken_options(options: Mapping[str, object], path: KeyPath) -> Iterator[Problem]:
    """Yield a problem for each sbatch option below ``path`` that is not allowed there."""
    for key, value in options.items():
        option = sbatch_option(key)
        if option in OWNED:
            yield Problem((*path, key), f"--{option} is set by hpc-train", "take it out", on_key=True)
        elif key.replace("_", "-") in MEMORY_SHARES or (option == "gres" and "gpu" not in str(value).lower()):
            continue
        elif option in SBATCH_KEYS:
            remedy = f"write {SBATCH_KEYS[option]}"
            yield Problem((*path, key), f"--{option} has a key of its own", remedy, on_key=True)


def bad_option_values(options: Mapping[str, object], path: KeyPath) -> Iterator[Problem]:
    """Yield a problem for each value that is not allowed in a ``#SBATCH`` line."""
    for key, value in options.items():
        if value is False:
            yield Problem(
                (*path, key), "false is not a valid value of an option", "take it out; true sets the option"
            )
        elif isinstance(value, str) and not _WORD.fullmatch(value):
            needed = "one word without blanks, quotes, '$' or ';'"
            yield Problem((*path, key), f"needs {needed}, got {shown(value)}", "write a word of this form")


def sbatch_option(key: str) -> str:
    """Return the long option that sbatch would read ``key`` as: it completes abbreviations."""
    option = key.replace("_", "-")
    options = (*OWNED, *SBATCH_KEYS)
    if option in options:
        return option
    return next((name for name in options if name.startswith(option)), option)
