"""Predicts a rank's peak memory by running a real training step on tensors that have shapes and no data.

``training.predicted_runs`` calls it in a child process of ``plan``. The model is built on the meta device,
then placed and trained by the same code as on every rank under torch's FakeTensorMode, in a process group
whose other ranks don't exist (torch's ``fake`` backend). Only code that reads data is replaced: DDP's reducer
(``BucketedGradients``), the guard against NaN, and the pipeline's first forward, which receives shapes from
other ranks.

A step on the (fake) CPU allocates as on a GPU, although three rules of torch differ. Under autocast CUDA
computes norms, softmax and losses in float32 and the CPU does not (docs.pytorch.org, "Autocast Op
Reference"). CUDA's fused attention kernels drop weights without storing them, while the CPU falls back to a
kernel that stores all of them. And optimizers on CUDA update all parameters at once, with temporary results
for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees, stages_per_rank
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.training.datasets.types import Batch, DataInfo, map_tensors
from hpc_train.training.distributed.device import Precision, choose_precision
from hpc_train.training.flops import unpacked_sequences
from hpc_train.training.forward import TrainingForward, make_to_input
from hpc_train.training.live_memory import LiveMemory, MemoryLabels, ShardSizes
from hpc_train.training.models import blocks, building, splitting
from hpc_train.training.non_finite import NoGuard
from hpc_train.training.step import train_step
from hpc_train.training.strategies import ddp
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.pipeline import PipelineStrategy
from hpc_train.training.strategies.stages import OutputSpecs
from hpc_train.training.tasks.base import make_task
from hpc_train.training.train_state import TrainState, assemble

_CPU = torch.device("cpu")
#: CUDA's allocator rounds sizes up to this (c10/cuda/CUDACachingAllocator, kMinBlockSize).
_CUDA_BLOCK_BYTES = 512
#: Maximum shards of the simulated group; more shards only make each one smaller.
_MAX_SHARDS = 4
#: Functions of the list "autocast to float32" that models use, with their modules. A TorchFunctionMode would
#: not be active in backward, when checkpointed blocks are recomputed.
_IN_FLOAT32 = (
    (functional, "layer_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss l1_loss"),
    (functional, "smooth_l1_loss binary_cross_entropy_with_logits kl_div"),
    (torch, "softmax log_softmax logsumexp cumsum pow exp log rsqrt"),
    (Tensor, "softmax log_softmax logsumexp cumsum pow exp log rsqrt"),
)
_HALF = (torch.bfloat16, torch.float16)
_Function = Callable[..., Any]


@dataclass(frozen=True)
class Prediction:
    """The memory and communication of a step on one rank."""

    #: Bytes of each part (``plan.prediction.PARTS``) at the peak.
    parts: dict[str, int]
    #: Kind of collective (``live_memory``) → bytes of the whole tensors in one step.
    communicated: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts at the peak."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class PredictedStep:
    """A training step of one rank of a run."""

    experiment: Experiment
    info: DataInfo
    #: One sample, as a loader yields it; only its shapes and dtypes matter.
    sample: Batch
    num_samples: int
    degrees: Degrees
    rank: int
    is_on_gpu: bool

    def predict(self) -> Prediction:
        """Run one step. Propagates the errors of model or task code that needs data."""
        if not self._is_long:
            return self._prediction(self._slots)
        # In a long pipeline every further micro-batch adds the same amount, at minimum its inputs.
        short, longer = (self._prediction(count) for count in self._few_slots)
        return _extrapolated(short, longer, self._few_slots, self._slots)

    def on_meta(self, count: int) -> Batch:
        """Return ``count`` samples prepared for the model, on the meta device."""
        to_input = make_to_input(self.experiment, self.info, torch.device("meta"), self._precision)
        return to_input(self.sample.repeated(count).to(torch.device("meta")))

    def without_activations(self) -> Prediction:
        """Return the memory that does not depend on the forward pass, for models whose forward needs data."""
        with self._environment() as (model, memory):
            state = self._assemble(model)
            labels = self._labels(memory, state)
            for value in state.strategy.optimized().values():
                value.grad = torch.empty_like(value)
            labels.before_update()
            memory.start()
            state.optimization.step()
            labels.label_optimizer()
            return Prediction(memory.peak(), {})

    def _prediction(self, slots: int) -> Prediction:
        with self._environment() as (model, memory):
            return self._run(model, memory, slots)

    @contextmanager
    def _environment(self) -> Iterator[tuple[nn.Module, LiveMemory]]:
        """Simulate the rank with tensors without data; yield the model and its memory recorder."""
        config = self.experiment.model.model_copy(update={"pretrained": False, "init_from": None})
        with torch.device("meta"):
            model = building.build_model(config, self.info)
        with _process_group(self._few.world_size, self._few_rank), ExitStack() as stack:
            stack.enter_context(patch.object(ddp, "DistributedDataParallel", BucketedGradients))
            stack.enter_context(patch.object(DeviceMesh, "__init__", _with_data(DeviceMesh.__init__)))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(unpacked_sequences())
            stack.enter_context(_as_on_cuda() if self.is_on_gpu else nullcontext())
            block_bytes = _CUDA_BLOCK_BYTES if self.is_on_gpu else 1
            memory = stack.enter_context(LiveMemory(block_bytes, copies_communicated=not self.is_on_gpu))
            yield _materialized(model, self._precision.param_dtype), memory

    @property
    def _arithmetic(self) -> BatchArithmetic:
        return BatchArithmetic.of(self.experiment.optimization, self.num_samples, self.degrees.data_ranks)

    @property
    def _slots(self) -> int:
        """Number of the rank's micro-batches to run: two are enough if they run one after the other."""
        one_by_one = traits_of(self.experiment.parallel.strategy).runs_one_by_one
        return min(self._arithmetic.accumulation, 2) if one_by_one else self._arithmetic.accumulation

    @property
    def _few_slots(self) -> tuple[int, int]:
        stages = self.degrees.pipeline * stages_per_rank(self.experiment.parallel)
        return 2 * stages, 3 * stages

    @property
    def _is_long(self) -> bool:
        return self._slots > self._few_slots[1] and self.degrees.pipeline > 1

    @property
    def _few(self) -> Degrees:
        """The degrees of the simulated group, reduced: fully_shard creates a view per rank and parameter."""
        shard, replicate = min(self.degrees.shard, _MAX_SHARDS), min(self.degrees.replicate, 2)
        return replace(self.degrees, shard=shard, replicate=replicate)

    @property
    def _few_rank(self) -> int:
        """The first rank of the simulated group with this rank's stage and part of the layers."""
        few, stage = self._few, self.degrees.stage_rank(self.rank)
        return stage * few.data_ranks * few.tensor + self.degrees.tensor_rank(self.rank)

    @property
    def _precision(self) -> Precision:
        name = self.experiment.precision
        return choose_precision("bf16" if name == "fp8" else name, _CPU)

    def _assemble(self, model: nn.Module) -> TrainState:
        # SyncBatchNorm reads the counts of other ranks; it stores as much as BatchNorm.
        parallel = self.experiment.parallel.model_copy(update={"sync_batchnorm": False})
        update = {"compile": CompileConfig(enabled=False), "precision": self._precision.name}
        config = self.experiment.model_copy(update=update | {"parallel": parallel})
        state = assemble(model, config, self._arithmetic, self._context)
        state.optimization.scaler = None  # an overflow check would read data
        if self.is_on_gpu:
            # Use ``foreach`` in groups for which the file chooses no kernel, as torch does on CUDA. On the
            # CPU torch would update them one by one
            # (``torch.optim.optimizer._default_to_fused_or_foreach``).
            for group in state.optimization.optimizer.param_groups:
                is_chosen = group.get("foreach", False) is not None or group.get("fused")
                if not is_chosen and not any(isinstance(value, DTensor) for value in group["params"]):
                    group["foreach"] = not group.get("differentiable", False)
        if isinstance(state.strategy, ddp.DDPStrategy):
            state.strategy.is_rehearsed = True  # the rehearsal needs no more memory than the step
        return state

    def _run(self, model: nn.Module, memory: LiveMemory, slots: int) -> Prediction:
        experiment, precision = self.experiment, self._precision
        micro_batches = self._arithmetic.micro_batches
        size = self.experiment.optimization.global_batch_size // micro_batches
        whole = replace(_without_data(self.sample).repeated(size), weight=1 / micro_batches)
        batches = [replace(whole, number=slot * self.degrees.data_ranks) for slot in range(slots)]
        specs: list[OutputSpecs] = []
        if self.degrees.pipeline > 1:
            to_input = make_to_input(experiment, self.info, _CPU, precision)
            specs = self._stage_specs(model, to_input(batches[0]).inputs)
        state = self._assemble(model)
        if specs and isinstance(state.strategy, PipelineStrategy):
            state.strategy.stage_specs = lambda batch, forward: specs  # type: ignore[method-assign]
        task = make_task(experiment, self.info)
        forward = TrainingForward.of(experiment, self.info, state, task, precision, _CPU)
        guard = NoGuard(experiment.optimization, state.model, norm_counts=False)
        labels = self._labels(memory, state)
        state.wrapped.train()
        memory.start()
        max_norm = experiment.optimization.clip_grad_norm
        train_step(state, 0, batches, forward, guard, max_norm, labels.before_update)
        labels.label_optimizer()
        # Read while the state is alive.
        return Prediction(memory.peak(), self._communicated(memory, state, slots))

    def _communicated(self, memory: LiveMemory, state: TrainState, slots: int) -> dict[str, int]:
        """Return the bytes communicated in a step of all slots."""
        communicated = dict(memory.communicated)
        if isinstance(state.wrapped, BucketedGradients):
            communicated["all_reduce"] = communicated.get("all_reduce", 0) + sum(
                bucket.nbytes for bucket in state.wrapped.buckets
            )
        more = self._arithmetic.accumulation / slots
        traits = traits_of(self.experiment.parallel.strategy)
        repeated = {"tensor_all_reduce", "send"}
        if traits.shards_parameters and not traits.has_stages:  # others gather once per step
            repeated.add("all_gather")
        return {kind: round(size * more) if kind in repeated else size for kind, size in communicated.items()}

    def _labels(self, memory: LiveMemory, state: TrainState) -> MemoryLabels:
        """Label the state before the step; return the object that labels the rest."""
        traits = traits_of(self.experiment.parallel.strategy)
        sizes = ShardSizes(self._few.shard, self.degrees.shard)
        labels = MemoryLabels(memory, state, sizes, are_parameters_sharded=traits.shards_parameters)
        labels.label_state()
        if isinstance(state.wrapped, BucketedGradients):
            memory.label(state.wrapped.buckets, "gradients")
        return labels

    @property
    def _context(self) -> RankContext:
        parallel = self.experiment.parallel.model_copy(update={"sync_batchnorm": False})
        return RankContext(self._few_rank, self._few, _CPU, self._precision, parallel=parallel)

    def _stage_specs(self, model: nn.Module, inputs: Any) -> list[OutputSpecs]:
        """Return the specs of tensors between stages of a pipeline, as ``PipelineStrategy.stage_specs``."""
        num_stages = self.degrees.pipeline * stages_per_rank(self.experiment.parallel)
        dtype = self._precision.compute_dtype
        specs, values = [OutputSpecs.of(inputs)], (inputs,)
        for stage in splitting.split_model(model, blocks.find_blocks(model), num_stages):
            values = tuple(value.to(dtype) if value.is_floating_point() else value for value in values)
            parameters = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in (*stage.named_parameters(), *stage.named_buffers())
            }
            outputs = torch.func.functional_call(stage, parameters, values)
            specs.append(OutputSpecs.of(outputs))
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            values = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        return specs


def _extrapolated(short: Prediction, longer: Prediction, counts: tuple[int, int], slots: int) -> Prediction:
    steps = (slots - counts[0]) / (counts[1] - counts[0])

    def at(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return {key: round(value + steps * (other[key] - value)) for key, value in one.items()}

    return Prediction(at(short.parts, longer.parts), longer.communicated)


class BucketedGradients(nn.Module):
    """Uses as much memory as DistributedDataParallel with ``gradient_as_bucket_view``, without communication.

    DDP's reducer is C++ code that reads data. Its buckets have the size of the gradients and exist from start
    to end. Under ``no_sync`` gradients are outside the buckets; in the last backward of a step each gradient
    is freed once it is in its bucket.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._is_synchronised = True
        self.buckets: list[Tensor] = []
        for value in module.parameters():
            if value.requires_grad:
                self._add(value)

    def _add(self, value: nn.Parameter) -> None:
        bucket = torch.empty_like(value, requires_grad=False)
        self.buckets.append(bucket)

        def copied(parameter: Tensor) -> None:
            if self._is_synchronised:
                assert parameter.grad is not None
                parameter.grad = bucket.copy_(parameter.grad)

        value.register_post_accumulate_grad_hook(copied)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients outside the buckets within this context."""
        self._is_synchronised = False
        yield
        self._is_synchronised = True


def _with_data(make: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor whose tensors have data, which a mesh reads to find its rank."""

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            make(self, *args, **kwargs)

    return made


@contextmanager
def _process_group(world_size: int, rank: int) -> Iterator[None]:
    """Simulate ``rank`` of a group whose collectives return immediately and do not change results."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _materialized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Move a model from the meta device to the (fake) CPU, in place; shared tensors stay shared.

    ``dtype``: for floating-point tensors, so that ``strategies.data_parallel.move`` has nothing to do.
    """
    tensors_on_cpu: dict[int, Tensor] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors_on_cpu:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=kind, device=_CPU)
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors_on_cpu[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return tensors_on_cpu[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None:
                    tensors[name] = on_cpu(value)  # type: ignore[assignment]
    return model


def _without_data(sample: Batch) -> Batch:
    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    return replace(
        sample,
        inputs=map_tensors(fake, sample.inputs),
        targets=map_tensors(fake, sample.targets),
        valid=fake(sample.valid),
    )


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Apply CUDA's rules within this context."""
    attention = functional.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(functional, "scaled_dot_product_attention", _without_dropout(attention))
        )
        for owner, names in _IN_FLOAT32:
            for name in names.split():
                stack.enter_context(patch.object(owner, name, _in_float32(getattr(owner, name))))
        yield


def _in_float32(function: _Function) -> _Function:
    """Return a function that computes tensors cast down by autocast in float32."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(
                Tensor, lambda value: value.float() if value.dtype in _HALF else value, (args, kwargs)
            )
        return function(*args, **kwargs)

    return computed


def _without_dropout(attention: _Function) -> _Function:
    """Return an attention without dropout; it needs as much memory as CUDA's with dropout."""

    def computed(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any, **kwargs: Any
    ) -> Any:
        kwargs |= dict(zip(("dropout_p", "is_causal"), rest, strict=False))
        mask = kwargs.pop("attn_mask", mask)
        return attention(query, key, value, mask, **kwargs | {"dropout_p": 0.0})

    return computed
