"""``strategy: pipeline``: each rank owns some of the layers; micro-batches pass from rank to rank.

A stage is sharded over the ranks that have the same layers, and shares its linear layers over "tensor". A
step is torch.distributed.pipelining's schedule over the micro-batches of a rank's slots.

Legend: K ranks of a pipeline, R data-parallel ranks, M micro-batches of a step, S slots: micro-batches of a
step and pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.topology.degrees import (
    problem_of_schedule,
    problem_of_stages,
    stages_per_rank,
)
from hpc_train.experiment.validate.compatibility import compiled_whole
from hpc_train.training.datasets.types import Batch
from hpc_train.training.models.splitting import Stage, split_model
from hpc_train.training.strategies.base import Forward, Piece, RankContext
from hpc_train.training.strategies.batchnorm import RunningStatistics
from hpc_train.training.strategies.buffers import Buffers, broadcast_from_rank_0, buffers_kept
from hpc_train.training.strategies.data_parallel import move, refuse_complex, refuse_renormalized
from hpc_train.training.strategies.fully_sharded import FullySharded, refuse_unshardable, shard
from hpc_train.training.strategies.pieces import clip_over_ranks, data_mesh, made_once, mesh_of, part_of
from hpc_train.training.strategies.stages import (
    HeldStages,
    OutputSpecs,
    PipelineForward,
    drop_other_stages,
    make_contiguous,
    only_tensor,
)
from hpc_train.training.strategies.tensor import TensorPlan, even_out, refuse_unshared, share_layers


class PipelineStrategy(FullySharded):
    """Stages over ranks; see ``strategies.base.Strategy``.

    A stage's parameters and gradients are whole from a step's first forward to its last backward: gathering
    for each micro-batch would need 2·S times the traffic, and torch's schedules reduce them once per step.
    """

    name = "pipeline"
    reshard_after_forward = False
    #: Whether a single micro-batch is in the pipeline at a time.
    runs_one_by_one = False

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        if problem := problem_of_stages(context.parallel):
            raise problem.as_error()
        degrees = context.degrees
        is_on_last = degrees.stage_rank(context.rank) == degrees.pipeline - 1
        self.owns_loss = is_on_last and degrees.tensor_rank(context.rank) == 0
        # A single rank has one stage, because an older torch would have it send to itself.
        per_rank = stages_per_rank(context.parallel) if degrees.pipeline > 1 else 1
        self._num_stages = degrees.pipeline * per_rank
        #: id of a parameter → the tensor plan of its stage.
        self._plans: dict[int, TensorPlan] = {}
        self._prepared: tuple[object, Run] | None = None

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Keep this rank's stages of ``model`` and free the tensors of all others. Collective."""
        # Before the split, so that all ranks raise the same error.
        refuse_complex(model)
        refuse_renormalized(model, self.context)
        refuse_unshardable(model, blocks, self.context.precision, self.name)
        if model._compiled_call_impl is not None:
            raise compiled_whole(self.name).as_error()
        refuse_unshared(model, self.context.degrees.tensor, "take it out")
        names = list(model.state_dict())
        self._mesh = mesh_of(self.context)
        self._first_of_stage, self._same_stage = self._make_stage_groups()
        self._held = self._local_stages(split_model(model, blocks, self._num_stages))
        drop_other_stages(model, list(self._held.values()))
        for stage in self._held.values():
            self._place_stage(model, stage, [block for block in blocks if block in set(stage.modules())])
        held = list(self._held.values())
        self.model = held[0] if len(held) == 1 else HeldStages(held)
        # Read here, because a forward replaces them by gathered parameters.
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self._optimized = {name: trained[name] for name in names if name in trained}
        self._buffers = Buffers(self.model)
        self._stage_statistics = {
            index: self._running_statistics(stage, self._same_stage) for index, stage in self._held.items()
        }
        group = part_of(self._mesh, "pipeline").get_group()
        passage = PipelineForward(self.model, dict(self._held), self._num_stages, group, self.context.device)
        self.wrapped = self._passage = passage
        return passage

    def _local_stages(self, stages: Sequence[Stage]) -> dict[int, Stage]:
        """Return index → stage; BadFileError, on all ranks, if a rank has no trainable parameters."""
        num_ranks = self.context.degrees.pipeline
        by_rank = [dict(list(enumerate(stages))[rank::num_ranks]) for rank in range(num_ranks)]
        for held in by_rank:
            if not any(value.requires_grad for stage in held.values() for value in stage.parameters()):
                raise BadFileError(
                    f"parallel.pipeline: all parameters of stage {next(iter(held))} of {len(stages)} are "
                    "frozen; write fewer stages, or parallel.strategy: fsdp"
                )
        return by_rank[self.context.degrees.stage_rank(self.context.rank)]

    @override
    def mesh(self) -> DeviceMesh:
        return data_mesh(self._mesh)

    def _place_stage(self, model: nn.Module, stage: Stage, blocks: Sequence[nn.Module]) -> None:
        move(stage, self.context)
        make_contiguous(stage)
        plan = share_layers(stage, part_of(self._mesh, "tensor"), within=model)
        shard(stage, blocks, self.mesh(), self.context.precision, self.reshard_after_forward)
        plan.note_parameters()
        self._plans.update((id(parameter), plan) for parameter in stage.parameters())

    def _make_stage_groups(self) -> tuple[int, dist.ProcessGroup | None]:
        """Return the first of the ranks with this rank's stages, and their group; None for a single rank."""
        context = self.context
        size = context.world_size // context.degrees.pipeline
        if size == 1:
            return context.rank, None
        # Every rank must create all groups.
        stages = [tuple(range(first, first + size)) for first in range(0, context.world_size, size)]
        groups = made_once(tuple(stages), lambda: [dist.new_group(list(ranks)) for ranks in stages])
        index = context.rank // size
        return index * size, cast(dist.ProcessGroup, groups[index])

    @override
    def optimized(self) -> dict[str, nn.Parameter]:
        return dict(self._optimized)

    @override
    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        run = self._run_for(batches, forward)
        with ExitStack() as steps:
            for statistics in self._stage_statistics.values():
                steps.enter_context(statistics.step(len(batches)))
            total = run.step(batches, forward)
            self._buffers.write_back()
        if self.context.degrees.tensor > 1:
            even_out(self._optimized.values(), part_of(self._mesh, "tensor"))
        return total if self.owns_loss else torch.zeros_like(total)

    def _run_for(self, batches: Sequence[Batch], forward: Forward) -> Run:
        """Return the schedule for these micro-batches; created at the first step."""
        inputs = only_tensor(batches[0].inputs)
        key = (len(batches), tuple(inputs.shape), inputs.dtype)
        if self._prepared is None or self._prepared[0] != key:
            if problem := self.problem(len(batches)):
                raise problem.as_error()
            specs = self.stage_specs(batches[0], forward)
            stages = [self._chunks_of(index, specs) for index in self._held]
            in_flight = 1 if self.runs_one_by_one else len(batches)
            schedule = self._schedule_class(in_flight)
            self._prepared = key, Run(stages, schedule, in_flight, self.context.degrees.data_ranks)
        return self._prepared[1]

    def problem(self, slots: int) -> Problem | None:
        """Return the reason why the file's schedule can't run this number of micro-batches, or None."""
        return problem_of_schedule(self.context.parallel, self.context.degrees.pipeline, slots)

    def stage_specs(self, batch: Batch, forward: Forward) -> list[OutputSpecs]:
        """Run a forward and discard its result; return the input specs of each stage and the last's outputs.

        Otherwise torch would run a forward, in which layers draw from other random streams.
        """

        @contextmanager
        def around(stage: int) -> Iterator[None]:
            with buffers_kept(self._held[stage]), forward.begin(batch, stage):
                yield

        inputs = forward.to_input(batch).inputs
        _, specs = self._passage.run(inputs, around=around)
        return [OutputSpecs.of(inputs), *specs]

    def _chunks_of(self, index: int, specs: list[OutputSpecs]) -> MicroBatchStage:
        return MicroBatchStage(
            self._held[index],
            index,
            self._num_stages,
            self.context.device,
            input_args=tuple(form.on_meta() for form in specs[index].values),
            output_args=tuple(form.on_meta() for form in specs[index + 1].values),
            group=part_of(self._mesh, "pipeline").get_group(),
            statistics=self._stage_statistics[index],
        )

    def _schedule_class(self, slots: int) -> type[Any]:
        schedule = self.context.parallel.schedule
        if schedule == "interleaved" and len(self._held) > 1:
            return ScheduleInterleaved1F1B
        # With fewer slots than stages 1F1B has no steady state: all forward first, then all backward.
        return Schedule1F1B if schedule == "1f1b" and slots >= self._num_stages else ScheduleGPipe

    def share_buffers(self, *, all_persistent: bool) -> None:
        """Copy the buffers of each stage's first rank to the stage's other ranks."""
        buffers = self._buffers.tensors(all_persistent=all_persistent)
        if buffers and self._same_stage is not None:
            broadcast_from_rank_0(buffers, self._same_stage, self._first_of_stage)

    @override
    def clip_gradients(self, max_norm: float) -> Tensor:
        return clip_over_ranks(self._optimized.values(), self.pieces, max_norm, self.context)

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        """Return this rank's part of a DTensor; any other tensor whole, because the stage's ranks have it."""
        if isinstance(tensor, DTensor):
            return self._plans[id(like)].pieces(tensor, like)
        shape = tuple(tensor.shape)
        is_writer = self.context.rank == self._first_of_stage
        return [Piece(shape, (0,) * len(shape), tensor.detach(), is_writer)]


class SplitStrategy(PipelineStrategy):
    """A pipeline of one micro-batch: minimal memory for activations, but all ranks except one wait."""

    name = "split"
    runs_one_by_one = True


class Run:
    """A schedule, and the step that it runs: the batches and the sum of their losses."""

    def __init__(
        self, stages: list[MicroBatchStage], schedule: type[Any], in_flight: int, data_ranks: int
    ) -> None:
        """``in_flight``: micro-batches that the schedule runs at a time."""
        self._in_flight = in_flight
        self._data_ranks = data_ranks
        self._batches: Sequence[Batch] = ()
        self._forward: Forward
        self._first = 0
        self._device = stages[0].device
        self._kept = ExitStack()
        self._has_last = any(stage.is_last for stage in stages)
        for stage in stages:
            stage.run = self
        # A schedule of one stage takes the stage itself.
        is_multi = issubclass(schedule, ScheduleInterleaved1F1B)
        self._schedule = schedule(
            stages if is_multi else stages[0], in_flight, loss_fn=self._scaled_loss, scale_grads=False
        )

    def step(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        """Run all micro-batches forward and backward; return the weighted sum of losses, 0 without losses."""
        self._batches, self._forward = batches, forward
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        targets = {"target": torch.arange(self._in_flight)} if self._has_last else {}
        with self._kept:
            for first in range(0, len(batches), self._in_flight):
                self._first = first
                self._schedule.step(return_outputs=False, **targets)
        self._batches = ()
        return self._total

    @property
    def is_at_end(self) -> bool:
        """Whether the current micro-batches are the last of the step."""
        return self._first + self._in_flight >= len(self._batches)

    @contextmanager
    def begun(self, chunk: int, stage: MicroBatchStage) -> Iterator[Batch]:
        """Enter the context of a stage's forward; yield the batch."""
        slot = self._first + chunk
        batch = self._batches[slot]
        is_spare = batch.weight == 0
        if is_spare:
            # Until the end of the step, because a checkpointed forward is repeated in backward. It is the
            # last slot.
            self._kept.enter_context(buffers_kept(stage.submod))
        statistics = stage.statistics.micro_batch(slot, is_spare=is_spare)
        with statistics, self._forward.begin(batch, stage.stage_index):
            yield self._forward.to_input(batch) if stage.is_first else batch

    def _scaled_loss(self, outputs: Any, chunk: Tensor) -> Tensor:
        # ``chunk`` is a piece of ``arange``: its value is the index; a fake tensor has only its offset.
        number = int(chunk.storage_offset() if isinstance(chunk, FakeTensor) else chunk)
        batch = self._batches[self._first + number]
        loss = self._forward.loss_of(outputs, batch)
        self._total += loss.detach() * batch.weight
        # fully_shard divides by R, but the result must be the mean over M micro-batches.
        return self._forward.scale(loss * (batch.weight * self._data_ranks))


class MicroBatchStage(PipelineStage):
    """torch's stage, whose micro-batches (torch: chunks) run in the context of the training loop."""

    run: Run

    def __init__(self, *args: Any, statistics: RunningStatistics, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.statistics = statistics

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run a micro-batch within ``Run.begun``; raise the errors of its forward unwrapped."""
        with self.run.begun(fwd_chunk_id, self) as batch:
            if self.is_first:
                # Contiguous, as the stages expect: torch compares the layout under debug level DETAIL.
                args = (batch.inputs.contiguous(),)
            try:
                return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                cause = error.__cause__
            # torch wraps errors of a forward, and hides the message for the user.
            raise cause

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients only after the step's last micro-batches."""
        if self.run.is_at_end:
            super().perform_reduce_grad(grad_scale_factor)
