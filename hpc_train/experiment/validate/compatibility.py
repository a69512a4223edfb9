"""Rules on settings that do not work together: the source of the table in docs/parallelism.md."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.by_name import task_facts
from hpc_train.experiment.topology.strategy_traits import StrategyTraits, traits_of
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.base import rule

#: Precisions whose compute dtype differs from the dtype of the parameters.
_MIXED = ("bf16", "fp16", "fp8")
#: Optimizers of torch and timm that need whole parameters instead of DTensors. Compared by a test.
NEED_WHOLE_PARAMETERS = (
    "adafactor", "adamp", "adamuon", "cadafactor", "cadamp", "cmars", "csgdp", "mars", "nadamuon", "novograd",
    "novogradc", "novogradw", "sgdp",
)  # fmt: skip


#: Optimizers of timm that clip by the norm of all their parameters unless configured otherwise.
CLIP_BY_THEMSELVES = ("lamb", "lambc", "lambw")


def _traits(experiment: Experiment) -> StrategyTraits:
    return traits_of(experiment.parallel.strategy)


def _has_batchnorm(experiment: Experiment) -> bool:
    return model_facts.has_batchnorm(experiment.model.name, experiment.model.args) or False


_VERIFY = ("recovery", "verify_every_steps")
_FP32_OR_DDP = "write fp32, or parallel.strategy: ddp"
_WRITE_A_NUMBER = "write a number, like 64"


def sharded_batchnorm(precision: str, strategy: str, model: str) -> Problem:
    """Return the problem with BatchNorm in mixed precision if the strategy shards parameters."""
    message = f"{precision} does not work under {strategy} for {model}, which has BatchNorm"
    return Problem(("precision",), message, _FP32_OR_DDP)


def auto_batchnorm(model: str) -> Problem:
    """Return the problem with ``micro_batch_size: auto`` for a model with BatchNorm."""
    message = f"auto would make BatchNorm's statistics depend on memory, and {model} has BatchNorm"
    return Problem(("optimization", "micro_batch_size"), message, _WRITE_A_NUMBER)


def auto_on_cpu() -> Problem:
    """Return what is wrong with ``micro_batch_size: auto`` for ranks without GPUs."""
    path, message = ("optimization", "micro_batch_size"), "auto finds what fits into the memory of a GPU"
    return Problem(path, f"{message}, and ranks use CPUs", _WRITE_A_NUMBER, code="batch.auto-cpu")


def compiled_whole(strategy: str) -> Problem:
    """Return the problem with compiling the whole model if the strategy cuts it into stages."""
    message = f"model compiles the forward of the whole model, which no rank runs under {strategy}"
    return Problem(("compile", "scope"), message, "write blocks")


def no_float8(found: str) -> Problem:
    """Return the problem with fp8 on a device without it; ``found``: the device or GPU that is used."""
    message = f"fp8 needs an NVIDIA GPU of compute capability 9.0 or higher (H100), and {found}"
    return Problem(("precision",), message, "write bf16, or use such a GPU")


def unverifiable_results(experiment: Experiment, *, is_on_gpu: bool) -> Problem | None:
    """Return the problem with ``recovery.verify_every_steps`` if a step does not repeat bitwise."""
    if experiment.deterministic or (experiment.deterministic is None and not is_on_gpu):
        return None
    cause = "a GPU does not without deterministic: true" if is_on_gpu else "deterministic is false"
    message = f"compares two computations of a step bitwise, which must repeat exactly, and {cause}"
    return Problem(_VERIFY, message, "write deterministic: true, or take it out")


def uneven_sync_batchnorm(micro_batches: int, ranks: int) -> Problem | None:
    """Return the problem if SyncBN's ranks have spare slots, whose samples would count twice."""
    if micro_batches % ranks == 0:
        return None
    message = f"needs a number of ranks that divides {micro_batches} micro-batches, got {ranks}"
    fitting = max(size for size in range(1, ranks) if micro_batches % size == 0)
    path, remedy = ("parallel", "sync_batchnorm"), f"start {fitting}, or write false"
    return Problem(path, message, remedy, code="parallel.sync-batchnorm-ranks")


@rule(
    "recovery.verify", "recovery.verify_every_steps parallel compile deterministic device slurm.gpus_per_node"
)
def steps_can_be_verified(experiment: Experiment) -> Iterator[Problem]:
    """``verify_every_steps`` needs steps that any rank can repeat bitwise and alone."""
    if experiment.recovery.verify_every_steps is None:
        return
    slurm, parallel, take_out = experiment.slurm, experiment.parallel, "or take it out"
    uses_gpus = experiment.device == "cuda" or (slurm is not None and slurm.gpus_per_node > 0)
    if problem := unverifiable_results(experiment, is_on_gpu=uses_gpus and experiment.device != "cpu"):
        yield problem
    if not _traits(experiment).computes_alone:
        message = f"a rank can't repeat the micro-batches of another one alone under {parallel.strategy}"
        yield Problem(_VERIFY, message, f"write parallel.strategy: ddp or zero1, {take_out}")
    elif parallel.sync_batchnorm:
        message = "parallel.sync_batchnorm takes statistics over all ranks, and a rank repeats a step alone"
        yield Problem(_VERIFY, message, f"write parallel.sync_batchnorm: false, {take_out}")
    if experiment.compile.enabled and experiment.compile.mode == "max-autotune":
        message = "compile.mode: max-autotune chooses kernels by their times, so ranks round differently"
        yield Problem(_VERIFY, message, f"write compile.mode: default, {take_out}")


@rule("checkpoint.digests-off", "checkpoint.digests", "optimization.on_spike")
def spikes_have_digests(experiment: Experiment) -> Iterator[Problem]:
    """A resumed run takes the window of ``on_spike`` from the digests."""
    if experiment.optimization.on_spike is not None and experiment.checkpoint.digests == "off":
        message = "off records no losses, with which optimization.on_spike compares those after a resume"
        remedy = "write steps, or take optimization.on_spike out"
        yield Problem(("checkpoint", "digests"), message, remedy)


@rule("optimizer.clips-itself", "optimization.optimizer", "parallel.strategy")
def optimizers_that_clip_see_the_whole_model(experiment: Experiment) -> Iterator[Problem]:
    """An optimizer that clips by the norm of all its parameters needs the whole model on each rank."""
    optimizer, strategy = experiment.optimization.optimizer, experiment.parallel.strategy
    name = optimizer.name.lower().rpartition("/")[2]
    is_off = optimizer.args.get("max_grad_norm", 1.0) is None
    if _traits(experiment).is_model_parallel and name in CLIP_BY_THEMSELVES and not is_off:
        message = (
            f"{shortened(optimizer.name)} clips by the norm of all its parameters, and under {strategy} "
            "a rank has only a part of the model"
        )
        remedy = "write args: {max_grad_norm: null} with it, and optimization.clip_grad_norm: 1.0"
        yield Problem(("optimization", "optimizer", "name"), message, remedy)


@rule("optimizer.whole-parameters", "optimization.optimizer.name", "parallel.strategy")
def optimizers_have_whole_parameters(experiment: Experiment) -> Iterator[Problem]:
    """Some optimizers need whole parameters instead of shards."""
    name, strategy = experiment.optimization.optimizer.name, experiment.parallel.strategy
    needs_whole = name.lower().rpartition("/")[2] in NEED_WHOLE_PARAMETERS
    if needs_whole and _traits(experiment).shards_optimizer:
        message = f"{shortened(name)} needs whole parameters, and {strategy} gives it shards"
        path = ("optimization", "optimizer", "name")
        yield Problem(path, message, "write adamw, or parallel.strategy: ddp")


@rule("channels-last.sharded", "model.channels_last", "parallel.strategy")
def channels_last_is_not_sharded(experiment: Experiment) -> Iterator[Problem]:
    """Weights in ``channels_last`` can't be sharded."""
    if experiment.model.channels_last and _traits(experiment).shards_parameters:
        message = f"can't be true under {experiment.parallel.strategy}, which can't shard such weights"
        yield Problem(("model", "channels_last"), message, "write false, or parallel.strategy: ddp")


@rule("precision.batchnorm", "model.name model.args precision parallel.strategy", looks_up_names=True)
def sharded_batchnorm_is_fp32(experiment: Experiment) -> Iterator[Problem]:
    """BatchNorm does not work in mixed precision if the strategy shards parameters."""
    precision, strategy = experiment.precision, experiment.parallel.strategy
    if precision in _MIXED and _traits(experiment).shards_parameters and _has_batchnorm(experiment):
        yield sharded_batchnorm(precision, strategy, shortened(experiment.model.name))


@rule("batch.auto-batchnorm", "optimization.micro_batch_size model.name model.args", looks_up_names=True)
def batchnorm_has_a_fixed_batch(experiment: Experiment) -> Iterator[Problem]:
    """``micro_batch_size: auto`` excludes BatchNorm."""
    if experiment.optimization.micro_batch_size == "auto" and _has_batchnorm(experiment):
        yield auto_batchnorm(shortened(experiment.model.name))


@rule("parallel.sync-batchnorm", "parallel.sync_batchnorm", "parallel.strategy")
def sync_batchnorm_has_the_whole_model(experiment: Experiment) -> Iterator[Problem]:
    """SyncBN needs all layers on each rank."""
    if experiment.parallel.sync_batchnorm and _traits(experiment).is_model_parallel:
        message = (
            f"can't be true under {experiment.parallel.strategy}, whose ranks have only some of the layers"
        )
        yield Problem(("parallel", "sync_batchnorm"), message, "write false, or parallel.strategy: ddp")


@rule("precision.fp8-device", "precision", "device")
def fp8_needs_a_gpu(experiment: Experiment) -> Iterator[Problem]:
    """fp8 does not run on CPUs."""
    if experiment.precision == "fp8" and experiment.device == "cpu":
        yield no_float8("device is cpu")


@rule("precision.fp8-strategy", "precision", "parallel.strategy")
def fp8_needs_whole_layers(experiment: Experiment) -> Iterator[Problem]:
    """fp8 does not work if ranks share layers."""
    if experiment.precision == "fp8" and _traits(experiment).is_model_parallel:
        message = f"fp8 does not work under {experiment.parallel.strategy}, whose ranks share layers"
        yield Problem(("precision",), message, "write bf16, or parallel.strategy: fsdp")


@rule("lora.strategy", "model.lora", "parallel")
def lora_needs_whole_layers(experiment: Experiment) -> Iterator[Problem]:
    """LoRA does not work if ranks share linear layers."""
    traits, tensor = _traits(experiment), experiment.parallel.tensor
    is_shared = traits.is_model_parallel and not traits.has_stages and tensor != 1
    if experiment.model.lora is not None and (is_shared or (tensor or 1) > 1):
        message = f"does not work under {experiment.parallel.strategy} where ranks share linear layers"
        yield Problem(("model", "lora"), message, "write parallel.strategy: fsdp")


@rule("lora.fp8", "model.lora", "precision")
def lora_is_not_fp8(experiment: Experiment) -> Iterator[Problem]:
    """fp8 does not work with LoRA."""
    if experiment.model.lora is not None and experiment.precision == "fp8":
        message = "fp8 does not work with model.lora, whose layers have their own forward"
        yield Problem(("precision",), message, "write bf16")


@rule("compile.graphs", "compile", "parallel.strategy")
def graphs_have_fixed_addresses(experiment: Experiment) -> Iterator[Problem]:
    """CUDA graphs exclude sharded parameters, whose tensors move or are overwritten before the backward."""
    mode, strategy = experiment.compile.mode, experiment.parallel.strategy
    replays_graphs = experiment.compile.enabled and mode in {"reduce-overhead", "max-autotune"}
    if replays_graphs and _traits(experiment).shards_parameters:
        message = (
            f"{mode} replays CUDA graphs, which does not work under {strategy}: "
            "parameters or activations do not stay in one place from forward to backward"
        )
        yield Problem(("compile", "mode"), message, "write default, or parallel.strategy: ddp")


@rule("compile.stages", "compile", "parallel.strategy")
def stages_compile_blocks(experiment: Experiment) -> Iterator[Problem]:
    """The whole model can't be compiled if no rank runs all of it."""
    compiles_all = experiment.compile.enabled and experiment.compile.scope == "model"
    if compiles_all and _traits(experiment).has_stages:
        yield compiled_whole(experiment.parallel.strategy)


@rule("parallel.tied-stages", "model.name", "model.args", "parallel")
def stages_share_no_weight(experiment: Experiment) -> Iterator[Problem]:
    """Stages can't share a weight. Only ``gpt`` is checked; for other models the ranks find out."""
    model, parallel = experiment.model, experiment.parallel
    is_tied = model.name == "gpt" and model.args.get("tie_embeddings", True) is True
    if is_tied and _traits(experiment).has_stages and parallel.pipeline != 1:
        message = (
            "true shares a weight between the first and the last stage, which "
            f"{parallel.strategy} does not support"
        )
        yield Problem(("model", "args", "tie_embeddings"), message, "write false, or parallel.strategy: fsdp")


@rule("parallel.whole-model", "task", "parallel.strategy")
def tasks_have_the_whole_model(experiment: Experiment) -> Iterator[Problem]:
    """Some tasks need the whole model on each rank."""
    if task_facts(experiment.task).needs_whole_model and _traits(experiment).is_model_parallel:
        message = f"{experiment.parallel.strategy} splits the model, and {experiment.task} needs it whole"
        yield Problem(("parallel", "strategy"), message, "write ddp, or fsdp")


@rule("precision.boxes", "task", "precision", "parallel.strategy")
def boxes_are_not_rounded(experiment: Experiment) -> Iterator[Problem]:
    """Mixed precision rounds boxes if the strategy shards parameters."""
    is_rounded = experiment.precision in _MIXED and _traits(experiment).shards_parameters
    if is_rounded and task_facts(experiment.task).needs_whole_model:
        message = (
            f"{experiment.precision} under {experiment.parallel.strategy} rounds the boxes that the model of "
            f"{experiment.task} takes"
        )
        yield Problem(("precision",), message, _FP32_OR_DDP)


@rule("compile.fallback", "compile")
def fallback_is_possible(experiment: Experiment) -> Iterator[Problem]:
    """``fallback`` excludes ``fullgraph``."""
    if experiment.compile.enabled and experiment.compile.fallback and experiment.compile.fullgraph:
        message = "can't be combined with fullgraph: true, which ends the run where fallback would continue"
        yield Problem(("compile", "fallback"), message, "take one of the two out")


@rule("compile.fullgraph", "parallel.sync_batchnorm", "compile")
def fullgraph_is_unbroken(experiment: Experiment) -> Iterator[Problem]:
    """SyncBN breaks the graph."""
    is_full = experiment.compile.enabled and experiment.compile.fullgraph
    if is_full and experiment.parallel.sync_batchnorm:
        message = "can't be true with parallel.sync_batchnorm, which breaks the graph"
        yield Problem(("compile", "fullgraph"), message, "write false")
