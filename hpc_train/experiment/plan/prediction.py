"""Predicts a planned run's step: memory by part, FLOPs, communication. A child process imports torch for it.

``predict`` is called by ``plan`` alone: a prediction takes seconds, and runs with the same model and
parallelism share one.

Volumes of communication are those of ring algorithms, which NCCL and gloo use for large tensors. For n ranks
and a tensor of b bytes each rank sends (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", sections 4.1 and 4.4; NVIDIA's nccl-tests, doc/PERFORMANCE.md):

- all-gather, b the gathered tensor, and reduce-scatter, b the whole one: (n − 1)/n · b;
- all-reduce, which is both: 2 (n − 1)/n · b;
- a stage of a pipeline sends b once, and a gradient of the same size comes back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan.devices import Device
from hpc_train.experiment.plan.planning import PlannedRun
from hpc_train.experiment.topology.batch_arithmetic import accumulation
from hpc_train.experiment.topology.degrees import AXES, Degrees, problem_of_schedule, scheduled_candidates
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.experiment.validate.child_process import Child, ChildError, one_child

_FUNCTION = "hpc_train.training.predicted_runs:answer"
#: Importing torch from a cold network disk takes a minute.
_LIMIT_S = 300.0
#: Limit for all questions after the first, which waits for torch; remaining runs are not predicted. Assumed.
_TOTAL_S = 60.0
#: Keys of the experiment that affect a step's memory.
_RELEVANT = (
    "task", "model", "data", "precision", "device", "parallel", "activation_checkpointing", "compile",
    "optimization",
)  # fmt: skip
#: The parts of a rank's memory, in display order.
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
_GB = 1e9


class _Answer(BaseModel):
    """The child's answer; sizes in bytes."""

    parts: dict[str, int] | None
    communicated: dict[str, int] = {}
    problem: str | None = None
    assumption: str | None = None
    micro_batch_size: int | None = None
    largest: int | None = None
    flops_per_sample: float | None = None


@dataclass(frozen=True)
class StepPrediction:
    """One run's step; None: unknown."""

    device: Device
    #: GB by part, on the rank that needs the most, at the peak of a step.
    memory: dict[str, float] | None = None
    #: The size that was predicted for: the file's or, under ``auto``, the largest that fits.
    micro_batch_size: int | None = None
    largest_micro_batch_size: int | None = None
    #: Sum over all ranks, forward and backward, without recomputation.
    flops_per_step: float | None = None
    communication: Communication | None = None
    #: Why parts are unknown.
    problem: str | None = None
    #: Assumption about the data.
    assumption: str | None = None

    @property
    def peak_memory_gb(self) -> float | None:
        """The sum of the parts; without activations if they are unknown."""
        return None if self.memory is None else sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the memory available to a step; None if either is unknown."""
        if self.memory is None or self.device.limit_bytes is None:
            return None
        is_over = sum(self.memory.values()) * _GB > self.device.limit_bytes
        return None if self.problem and not is_over else not is_over

    def to_json(self) -> dict[str, Any]:
        """Return the keys of a run in ``plan --json`` (a contract)."""
        peak, memory = self.peak_memory_gb, self.memory
        device_bytes = self.device.memory_bytes
        return {
            "peak_memory_gb": None if peak is None else _rounded(peak),
            "memory": None if memory is None else {part: _rounded(size) for part, size in memory.items()},
            "memory_problem": self.problem,
            "memory_assumption": self.assumption,
            "device_memory_gb": None if device_bytes is None else _rounded(device_bytes / _GB),
            "fits": self.fits,
            "largest_micro_batch_size": self.largest_micro_batch_size,
            "flops_per_step": self.flops_per_step,
            "communication": None if self.communication is None else self.communication.to_json(),
        }


def predict(runs: Sequence[PlannedRun], device_of: Callable[[PlannedRun], Device]) -> list[StepPrediction]:
    """Return the prediction for each run, in order. ``device_of``: returns the device of a run's ranks."""
    predictions = []
    with one_child() as child:
        answers = _Answers(child)
        for run in runs:
            device = replace(device_of(run), communicators=_communicators(run))
            question = _question(run, device)
            if isinstance(question, StepPrediction):
                predictions.append(question)
                continue
            predictions.append(_prediction(run, device, answers.to(question)))
    return predictions


class _Answers:
    def __init__(self, child: Child) -> None:
        self._child = child
        self._known: dict[str, _Answer] = {}
        self._until: float | None = None

    def to(self, question: str) -> _Answer:
        """Return the answer, or one with the reason for a missing prediction."""
        if question not in self._known:
            self._known[question] = self._ask(question)
        return self._known[question]

    def _ask(self, question: str) -> _Answer:
        if self._until is not None and time.monotonic() >= self._until:
            why = f"not predicted: the predictions of the runs before it took {_TOTAL_S:g} s"
            return _Answer(parts=None, problem=f"{why}; plan fewer runs at a time")
        try:
            reply = self._child.call(_FUNCTION, json.loads(question), limit_s=_LIMIT_S)
            answer = _Answer.model_validate(reply)
        except (ChildError, ValidationError) as error:
            answer = _Answer(parts=None, problem=f"the process that predicts it failed: {error}")
        self._until = self._until or time.monotonic() + _TOTAL_S
        return answer


def _question(run: PlannedRun, device: Device) -> str | StepPrediction:
    """Return the question of a run in JSON, or a prediction with the reason why there is no question."""
    experiment, degrees = run.experiment, run.degrees
    if not isinstance(experiment, Experiment):
        return StepPrediction(device, problem="the steps of a program are not predicted")
    if degrees is None:
        return StepPrediction(device, problem="the number of ranks is unknown, or parallel: does not fit it")
    optimization, parallel = experiment.optimization, experiment.parallel
    sizes = scheduled_candidates(optimization.global_batch_size, parallel, degrees)
    size = optimization.micro_batch_size
    if isinstance(size, int):
        if why := _problem_of_size(size, experiment, degrees):
            return StepPrediction(device, problem=why)
        sizes = sorted({*sizes, size})  # a schedule also runs with fewer micro-batches than auto would try
    if not sizes:
        return StepPrediction(device, problem="no micro-batch size fits the ranks and the schedule")
    question = {
        "experiment": _relevant(experiment),
        "degrees": asdict(degrees),
        "is_on_gpu": device.is_gpu,
        "limit_bytes": device.limit_bytes,
        "sizes": sizes,
    }
    return json.dumps(question, sort_keys=True)


def _communicators(run: PlannedRun) -> int:
    """Return the number of a rank's NCCL communicators: of all ranks and of each smaller mesh axis."""
    degrees = run.degrees
    if degrees is None:
        return 0
    has_mesh = run.parallel is not None and traits_of(run.parallel.strategy).has_mesh
    axes: list[int] = [getattr(degrees, axis) for axis in AXES] if has_mesh else []
    return (degrees.world_size > 1) + sum(1 < size < degrees.world_size for size in axes)


def _problem_of_size(size: int, experiment: Experiment, degrees: Degrees) -> str | None:
    global_batch_size = experiment.optimization.global_batch_size
    if size * degrees.data_ranks > global_batch_size:
        return f"micro_batch_size: {size} leaves ranks without a micro-batch"
    slots = accumulation(global_batch_size // size, degrees.data_ranks)
    problem = problem_of_schedule(experiment.parallel, degrees.pipeline, slots)
    return None if problem is None else str(problem)


def step_settings(experiment: Experiment) -> str:
    """Return what determines the tensors of a step, as JSON; numbers that only turn on are normalized."""
    return json.dumps(_relevant(experiment), sort_keys=True)


def _relevant(experiment: Experiment) -> dict[str, Any]:
    settings = experiment.model_dump(mode="json")
    _neutralize_optimization(settings["optimization"])
    data = settings["data"] | {"workers": 0}
    off = {"hflip": 0.0, "vflip": 0.0, "erasing": 0.0, "randaugment": None, "color_jitter": None}
    data["augment"] |= off | {"policy": None}
    settings["data"] = data
    return {"name": "plan", **{key: settings[key] for key in _RELEVANT}}


def _neutralize_optimization(settings: dict[str, Any]) -> None:
    settings |= {"epochs": None, "steps": 1, "schedule": {"name": "constant"}}
    settings |= {"max_non_finite": 1, "cutmix_probability": 0.5}
    for key in ("clip_grad_norm", "label_smoothing", "mixup", "cutmix"):
        settings[key] = _switch(settings[key])
    if settings["ema"] is not None:
        settings["ema"] = {"decay": 0.5}
    optimizer = settings["optimizer"]
    optimizer |= {"lr": 1e-3, "lr_per_batch": None}
    for key in ("momentum", "weight_decay", "layer_decay"):
        optimizer[key] = _switch(optimizer[key])
    for group in optimizer["groups"]:
        group |= {key: _switch(group[key]) for key in ("lr_factor", "weight_decay")}
    for key in {"betas", "eps"} & optimizer["args"].keys():
        optimizer["args"][key] = _switch(optimizer["args"][key])


def _switch(value: Any) -> Any:
    """Replace each number that turns a feature on by the same one; 0 (off) and 1 are unchanged."""
    if isinstance(value, list):
        return [_switch(item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return 0.5 if is_number and value not in (0, 1) else value


def _prediction(run: PlannedRun, device: Device, answer: _Answer) -> StepPrediction:
    degrees, experiment = run.degrees, run.experiment
    assert degrees is not None and isinstance(experiment, Experiment), "there was a question"
    per_node = run.size.per_node or degrees.world_size
    parts, flops = answer.parts, answer.flops_per_sample
    sent = communication(experiment.parallel.strategy, degrees, per_node, answer.communicated)
    batch = experiment.optimization.global_batch_size
    return StepPrediction(
        device,
        memory=None if parts is None else {part: parts.get(part, 0) / _GB for part in PARTS},
        micro_batch_size=answer.micro_batch_size,
        largest_micro_batch_size=answer.largest,
        flops_per_step=None if flops is None else flops * batch,
        communication=sent if parts is not None and answer.problem is None else None,
        problem=answer.problem,
        assumption=answer.assumption,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Communication:
    """GB that a rank sends in one step."""

    all_reduce_gb: float = 0.0
    all_gather_gb: float = 0.0
    reduce_scatter_gb: float = 0.0
    #: Collectives of activations among tensor-parallel ranks.
    tensor_gb: float = 0.0
    #: Activations and their gradients, between stages.
    pipeline_gb: float = 0.0
    #: The parts of the sum within a node and between nodes.
    within_node_gb: float = 0.0
    between_nodes_gb: float = 0.0

    def to_json(self) -> dict[str, float]:
        """Return ``communication`` of ``plan --json``: GB with 4 significant digits."""
        return {key: float(f"{value:.4g}") for key, value in asdict(self).items()}


def communication(
    strategy: str, degrees: Degrees, ranks_per_node: int, tensors: Mapping[str, int]
) -> Communication:
    """Return a rank's volumes. ``tensors``: kind of collective → bytes of the whole tensors in a step."""
    shards = traits_of(strategy).shards_parameters
    # Data-parallel ranks reduce gradients over both axes, unless gradient shards are reduced over copies.
    scattered = tensors.get("reduce_scatter", 0)
    reduced = scattered / degrees.shard if shards else tensors.get("all_reduce", 0)
    reducing = degrees.replicate if shards else degrees.data_ranks
    by_kind = {
        "all_reduce_gb": 2 * _ring(reducing, reduced),
        "all_gather_gb": _ring(degrees.shard, tensors.get("all_gather", 0)),
        "reduce_scatter_gb": _ring(degrees.shard, scattered),
        "tensor_gb": 2 * _ring(degrees.tensor, tensors.get("tensor_all_reduce", 0)),
        "pipeline_gb": tensors.get("send", 0) / _GB,
    }
    #: Kind → the number of neighbouring ranks that its group spans (``topology.degrees``).
    shard = degrees.tensor * degrees.shard
    replicate = shard * degrees.replicate
    spans = {
        "all_reduce_gb": replicate,
        "all_gather_gb": shard,
        "reduce_scatter_gb": shard if shards else replicate,
        "tensor_gb": degrees.tensor,
        "pipeline_gb": degrees.world_size,
    }
    within = sum(gb for kind, gb in by_kind.items() if spans[kind] <= ranks_per_node)
    return Communication(**by_kind, within_node_gb=within, between_nodes_gb=sum(by_kind.values()) - within)


def _ring(ranks: int, nbytes: float) -> float:
    return (ranks - 1) / ranks * nbytes / _GB
