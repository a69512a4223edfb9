"""Rules on ``slurm:`` and on how many ranks it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.config.degrees import find_degrees
from hpc_train.config.fields import SLURM_WORD_PATTERN
from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shown
from hpc_train.config.schema import Experiment

#: Options of sbatch that the launcher sets itself.
OWNED = (
    "wrap",
    "array",
    "output",
    "error",
    "input",
    "signal",
    "requeue",
    "no-requeue",
    "export",
    "export-file",
    "job-name",
    "open-mode",
    "chdir",
    "parsable",
    "test-only",
    "wait",
    "wait-all-nodes",
    # They change what sbatch prints, or which cluster is asked.
    "clusters",
    "help",
    "quiet",
    "usage",
    "verbose",
    "version",
    # Root's, for jobs of others.
    "uid",
    "gid",
)
#: Options of sbatch → the key of the file that says the same.
HAVE_A_KEY = {
    "nodes": "slurm.nodes",
    "ntasks": "slurm.ranks_per_node",
    "ntasks-per-node": "slurm.ranks_per_node",
    "ntasks-per-gpu": "slurm.ranks_per_node",
    "gpus": "slurm.gpus_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "gpus-per-task": "slurm.gpus_per_node",
    "gres": "slurm.gpus_per_node and slurm.gpu_type",
    "cpus-per-task": "slurm.cpus_per_gpu",
    "cpus-per-gpu": "slurm.cpus_per_gpu",
    "mem": "slurm.mem_gb",
    "mem-per-cpu": "slurm.mem_gb",
    "mem-per-gpu": "slurm.mem_gb",
    "time": "slurm.time_limit",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "constraint": "slurm.constraint",
    "exclude": "slurm.exclude",
    "reservation": "slurm.reservation",
    "dependency": "slurm.dependency",
    "mail-user": "slurm.mail",
    "mail-type": "slurm.mail",
    "container": "environment.container",
}
_WORD = re.compile(SLURM_WORD_PATTERN)


def least_nodes(slurm: SlurmConfig) -> int:
    """Return the nodes that the run gets at least."""
    return slurm.nodes if isinstance(slurm.nodes, int) else int(slurm.nodes.partition("-")[0])


def most_nodes(slurm: SlurmConfig) -> int:
    """Return ``nodes``, the upper end of a range."""
    return slurm.nodes if isinstance(slurm.nodes, int) else int(slurm.nodes.partition("-")[2])


def ranks_a_node(slurm: SlurmConfig) -> int:
    return slurm.ranks_per_node or slurm.gpus_per_node or 1


@rule("slurm.nodes")
def node_range_goes_up(experiment: Experiment) -> Iterator[Problem]:
    if experiment.slurm is None or isinstance(experiment.slurm.nodes, int):
        return
    low, high = experiment.slurm.nodes.split("-")
    if int(low) > int(high):
        message = f"{experiment.slurm.nodes} begins with the greater number"
        yield Problem(("slurm", "nodes"), message, f"write {high}-{low}")


@rule(
    "slurm.nodes",
    "slurm.gpus_per_node",
    "slurm.ranks_per_node",
    "parallel",
    "optimization.global_batch_size",
    "optimization.micro_batch_size",
)
def every_rank_has_a_micro_batch(experiment: Experiment) -> Iterator[Problem]:
    slurm, optimization, parallel = experiment.slurm, experiment.optimization, experiment.parallel
    if slurm is None or optimization.micro_batch_size == "auto":
        return
    micro_batches = max(1, experiment.micro_batches)
    ranks = most_nodes(slurm) * ranks_a_node(slurm)
    degrees = find_degrees(parallel, ranks, ranks_a_node(slurm))
    if isinstance(degrees, Problem):
        return  # ``check_start`` says so
    degree = degrees.tensor * degrees.pipeline
    if ranks // degree <= micro_batches:
        return
    batch, micro = optimization.global_batch_size, optimization.micro_batch_size
    yield Problem(
        ("slurm", "nodes"),
        f"{most_nodes(slurm)} nodes of {ranks_a_node(slurm)} ranks make {ranks} ranks, but a step has "
        f"{micro_batches} micro-batches (global_batch_size {batch} / micro_batch_size {micro})",
        f"ask for at most {micro_batches * degree} ranks, or write a smaller micro_batch_size",
    )


@rule(
    "slurm.nodes",
    "slurm.gpus_per_node",
    "slurm.ranks_per_node",
    "parallel",
)
def degrees_divide_the_ranks(experiment: Experiment) -> Iterator[Problem]:
    slurm, parallel = experiment.slurm, experiment.parallel
    degrees = (parallel.shard, parallel.replicate, parallel.tensor, parallel.pipeline)
    product = prod(degree or 1 for degree in degrees)
    if slurm is None or (least_nodes(slurm) * ranks_a_node(slurm)) % product == 0:
        return
    ranks = least_nodes(slurm) * ranks_a_node(slurm)
    key = next(
        key for key in ("shard", "replicate", "tensor", "pipeline") if (getattr(parallel, key) or 1) > 1
    )
    yield Problem(
        ("parallel", key),
        f"the degrees make groups of {product} ranks, which don't divide {ranks} ranks",
        f"write degrees whose product divides {ranks}",
    )


@rule("slurm.gpu_type", "slurm.gpus_per_node")
def a_kind_of_gpu_needs_gpus(experiment: Experiment) -> Iterator[Problem]:
    slurm = experiment.slurm
    if slurm is not None and slurm.gpu_type is not None and slurm.gpus_per_node == 0:
        message = "is given, but no GPUs are asked for"
        yield Problem(("slurm", "gpu_type"), message, "write slurm.gpus_per_node, or take it out")


@rule("slurm.gpus_per_node", "slurm.ranks_per_node", "device")
def every_rank_has_a_gpu(experiment: Experiment) -> Iterator[Problem]:
    slurm = experiment.slurm
    if slurm is None or slurm.ranks_per_node is None or experiment.device == "cpu":
        return
    if 0 < slurm.gpus_per_node < slurm.ranks_per_node:
        message = f"{slurm.ranks_per_node} ranks would share {slurm.gpus_per_node} GPUs, which NCCL refuses"
        yield Problem(("slurm", "ranks_per_node"), message, f"write {slurm.gpus_per_node}, or take it out")


@rule("slurm.cpus_per_gpu", "slurm.gpus_per_node", "slurm.ranks_per_node")
def ranks_share_the_cores_evenly(experiment: Experiment) -> Iterator[Problem]:
    slurm = experiment.slurm
    if slurm is None or slurm.cpus_per_gpu is None or slurm.gpus_per_node == 0:
        return
    cores, ranks = slurm.cpus_per_gpu * slurm.gpus_per_node, ranks_a_node(slurm)
    if cores % ranks:
        yield Problem(
            ("slurm", "cpus_per_gpu"),
            f"{slurm.gpus_per_node} GPUs of {slurm.cpus_per_gpu} cores have {cores}, which {ranks} ranks "
            "can't share evenly",
            f"write a number that makes a multiple of {ranks}",
        )


@rule("slurm.signal_lead_s", "slurm.time_limit")
def the_warning_comes_within_the_time(experiment: Experiment) -> Iterator[Problem]:
    slurm = experiment.slurm
    if slurm is None or slurm.signal_lead_s is None or slurm.time_limit is None:
        return
    limit_s = slurm.time_limit * 60
    if slurm.signal_lead_s >= limit_s:
        message = f"{slurm.signal_lead_s} s is not below slurm.time_limit of {limit_s} s"
        yield Problem(("slurm", "signal_lead_s"), message, f"write less than {limit_s}")


@rule("slurm.extra")
def extra_options_are_free(experiment: Experiment) -> Iterator[Problem]:
    yield from taken_options(experiment.slurm.extra if experiment.slurm else {}, ("slurm", "extra"))


@rule("slurm.extra")
def extra_values_are_words(experiment: Experiment) -> Iterator[Problem]:
    yield from bad_option_values(experiment.slurm.extra if experiment.slurm else {}, ("slurm", "extra"))


def taken_options(options: Mapping[str, object], path: KeyPath) -> Iterator[Problem]:
    """Yield a problem for each option of sbatch below ``path`` that may not be given there."""
    for key, value in options.items():
        option = sbatch_option(key)
        if option in OWNED:
            yield Problem((*path, key), f"--{option} belongs to hpc-train", "take it out", on_key=True)
        elif option == "gres" and "gpu" not in str(value).lower():
            continue
        elif option in HAVE_A_KEY:
            remedy = f"write {HAVE_A_KEY[option]}"
            yield Problem((*path, key), f"--{option} has a key of its own", remedy, on_key=True)


def bad_option_values(options: Mapping[str, object], path: KeyPath) -> Iterator[Problem]:
    """Yield a problem for each value that may not stand in a ``#SBATCH`` line."""
    for key, value in options.items():
        if value is False:
            yield Problem((*path, key), "false is no value of an option", "take it out; true sets the option")
        elif isinstance(value, str) and not _WORD.fullmatch(value):
            needed = "one word without blanks, quotes, '$' or ';'"
            yield Problem((*path, key), f"needs {needed}, got {shown(value)}", "write such a word")


def sbatch_option(key: str) -> str:
    """Return the long option that sbatch would take ``key`` for: it completes abbreviations."""
    option = key.replace("_", "-")
    known = (*OWNED, *HAVE_A_KEY)
    if option in known:
        return option
    return next((name for name in known if name.startswith(option)), option)


RULES: tuple[Rule, ...] = (
    node_range_goes_up,
    every_rank_has_a_micro_batch,
    degrees_divide_the_ranks,
    a_kind_of_gpu_needs_gpus,
    every_rank_has_a_gpu,
    ranks_share_the_cores_evenly,
    the_warning_comes_within_the_time,
    extra_options_are_free,
    extra_values_are_words,
)
