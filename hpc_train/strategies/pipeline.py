"""``strategy: pipeline``: each rank has some of the layers; micro-batches pass from rank to rank.

A stage is sharded over the ranks that have the same layers, and shares its linear layers over "tensor".

Legend: K ranks of a pipeline, R data-parallel ranks, S slots: micro-batches of a step and pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from hpc_train.config.pipelines import problem_of_schedule, problem_of_stages, stages_per_rank
from hpc_train.config.problems import Problem, dotted
from hpc_train.errors import BadFileError
from hpc_train.models.splitting import Stage, split_model
from hpc_train.runtime.data_info import Batch
from hpc_train.strategies.base import Forward, Piece, Placement
from hpc_train.strategies.buffers import Buffers, broadcast_from_rank_0, buffers_kept
from hpc_train.strategies.clipping import clip_over_ranks
from hpc_train.strategies.data_parallel import move, refuse_complex
from hpc_train.strategies.fully_sharded import FullySharded, refuse_unshardable, shard
from hpc_train.strategies.mesh import data_mesh, device_mesh, made_once, part_of
from hpc_train.strategies.pipeline_run import Chunks, Run
from hpc_train.strategies.stages import Forms, HeldStages, Passage, let_go, make_contiguous
from hpc_train.strategies.tensor_plan import TensorPlan, even_out, refuse_unshared, share_layers


class PipelineStrategy(FullySharded):
    """Stages over ranks; see ``strategies.base.Strategy``.

    A stage's parameters and gradients are whole from a step's first forward to its last backward: gathering
    for each micro-batch would cost 2·S times the traffic, and torch's schedules reduce gradients once a step.
    """

    name = "pipeline"
    reshard_after_forward = False

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        if problem := problem_of_stages(placement.parallel):
            raise _as_error(problem)
        degrees = placement.degrees
        is_on_last = degrees.stage_rank(placement.rank) == degrees.pipeline - 1
        self.reports = is_on_last and degrees.tensor_rank(placement.rank) == 0
        # One rank alone has nobody to take turns with, and an older torch would have it send to itself.
        per_rank = stages_per_rank(placement.parallel) if degrees.pipeline > 1 else 1
        self._num_stages = degrees.pipeline * per_rank
        #: id of a parameter → what its stage's ranks share.
        self._plans: dict[int, TensorPlan] = {}
        self._prepared: tuple[object, Run] | None = None

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Keep this rank's stages of ``model``; the tensors of all others are freed. Collective."""
        # On all ranks alike, whichever stage it is of.
        refuse_complex(model)
        refuse_unshardable(model, blocks, self.placement.precision, self.name)
        self._refuse_compiled(model)
        refuse_unshared(model, self.placement.degrees.tensor, "take it out")
        names = list(model.state_dict())
        self._mesh = device_mesh(self.placement)
        self._first_of_stage, self._same_stage = self._make_stage_groups()
        self._held = self._own_stages(split_model(model, blocks, self._num_stages))
        let_go(model, list(self._held.values()))
        for stage in self._held.values():
            self._place_stage(model, stage, [block for block in blocks if block in set(stage.modules())])
        held = list(self._held.values())
        self.model = held[0] if len(held) == 1 else HeldStages(held)
        # Now, since what a forward gathers is shown in their place.
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self._optimized = {name: trained[name] for name in names if name in trained}
        self._buffers = Buffers(self.model)
        self._stage_statistics = {
            index: self._running_statistics(stage, self._same_stage) for index, stage in self._held.items()
        }
        group = part_of(self._mesh, "pipeline").get_group()
        passage = Passage(self.model, dict(self._held), self._num_stages, group, self.placement.device)
        self.wrapped = self._passage = passage
        return passage

    def _refuse_compiled(self, model: nn.Module) -> None:
        if model._compiled_call_impl is not None:
            raise BadFileError(
                f"compile.scope: {self.name} runs stages, and what would be compiled is the whole model; "
                "write blocks, or compile: false for a model that has none"
            )

    def _own_stages(self, stages: Sequence[Stage]) -> dict[int, Stage]:
        """Return index → stage; BadFileError, on all ranks alike, where one has nothing to optimise."""
        num_ranks = self.placement.degrees.pipeline
        by_rank = [dict(list(enumerate(stages))[rank::num_ranks]) for rank in range(num_ranks)]
        for held in by_rank:
            if not any(value.requires_grad for stage in held.values() for value in stage.parameters()):
                raise BadFileError(
                    f"parallel.pipeline: all parameters of stage {next(iter(held))} of {len(stages)} are "
                    "frozen; write fewer stages, or parallel.strategy: fsdp"
                )
        return by_rank[self.placement.degrees.stage_rank(self.placement.rank)]

    def mesh(self) -> DeviceMesh:
        return data_mesh(self._mesh)

    def _place_stage(self, model: nn.Module, stage: Stage, blocks: Sequence[nn.Module]) -> None:
        move(stage, self.placement)
        make_contiguous(stage)
        plan = share_layers(stage, part_of(self._mesh, "tensor"), within=model)
        shard(stage, blocks, self.mesh(), self.placement.precision, self.reshard_after_forward)
        plan.note_parameters()
        self._plans.update((id(parameter), plan) for parameter in stage.parameters())

    def _make_stage_groups(self) -> tuple[int, dist.ProcessGroup | None]:
        """Return the first of the ranks that have this one's stages, and their group; None if it is alone."""
        placement = self.placement
        size = placement.world_size // placement.degrees.pipeline
        if size == 1:
            return placement.rank, None
        # torch wants every rank to make all of them.
        stages = [tuple(range(first, first + size)) for first in range(0, placement.world_size, size)]
        groups = made_once(tuple(stages), lambda: [dist.new_group(list(ranks)) for ranks in stages])
        own = placement.rank // size
        return own * size, cast(dist.ProcessGroup, groups[own])

    def optimized(self) -> dict[str, nn.Parameter]:
        return dict(self._optimized)

    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        run = self._run_for(batches, forward)
        with ExitStack() as steps:
            for statistics in self._stage_statistics.values():
                steps.enter_context(statistics.step(len(batches)))
            total = run.step(batches, forward)
            self._buffers.settle()
        if self.placement.degrees.tensor > 1:
            even_out(self._optimized.values(), part_of(self._mesh, "tensor"))
        return total if self.reports else torch.zeros_like(total)

    def _run_for(self, batches: Sequence[Batch], forward: Forward) -> Run:
        """Return the schedule for so many micro-batches of such a shape; made at the first step."""
        inputs = batches[0].inputs
        key = (len(batches), tuple(inputs.shape), inputs.dtype)
        if self._prepared is None or self._prepared[0] != key:
            if problem := self.problem(len(batches)):
                raise _as_error(problem)
            forms = self._rehearse(batches[0], forward)
            stages = [self._chunks_of(index, forms) for index in self._held]
            self._prepared = key, self.new_run(stages, len(batches))
        return self._prepared[1]

    def problem(self, slots: int) -> Problem | None:
        """Return what keeps the file's schedule from so many micro-batches."""
        return problem_of_schedule(self.placement.parallel, self.placement.degrees.pipeline, slots)

    def _rehearse(self, batch: Batch, forward: Forward) -> list[Forms]:
        """Run a forward whose result does not count; return what each stage takes, and what the last returns.

        Else torch would run one of its own, in which layers draw from other streams.
        """

        @contextmanager
        def around(stage: int) -> Iterator[None]:
            with buffers_kept(self._held[stage]), forward.begin(batch, stage):
                yield

        inputs = forward.to_input(batch).inputs
        _, forms = self._passage.run(inputs, around=around)
        return [Forms.of(inputs), *forms]

    def _chunks_of(self, index: int, forms: list[Forms]) -> Chunks:
        return Chunks(
            self._held[index],
            index,
            self._num_stages,
            self.placement.device,
            input_args=tuple(form.on_meta() for form in forms[index].values),
            output_args=tuple(form.on_meta() for form in forms[index + 1].values),
            group=part_of(self._mesh, "pipeline").get_group(),
            statistics=self._stage_statistics[index],
        )

    def new_run(self, stages: list[Chunks], slots: int) -> Run:
        return Run(stages, self._schedule_class(slots), slots, self.placement.degrees.data_ranks)

    def _schedule_class(self, slots: int) -> type[Any]:
        schedule = self.placement.parallel.schedule
        if schedule == "interleaved" and len(self._held) > 1:
            return ScheduleInterleaved1F1B
        # With fewer slots than stages no rank comes to its turns: all forward first, then all backward.
        return Schedule1F1B if schedule == "1f1b" and slots >= self._num_stages else ScheduleGPipe

    def share_buffers(self, *, all_persistent: bool) -> None:
        """Give the ranks of each stage the buffers of the first of them."""
        buffers = self._buffers.tensors(all_persistent=all_persistent)
        if buffers and self._same_stage is not None:
            broadcast_from_rank_0(buffers, self._same_stage, self._first_of_stage)

    def clip_gradients(self, max_norm: float) -> Tensor:
        return clip_over_ranks(self._optimized.values(), self.pieces, max_norm, self.placement)

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        """Return this rank's part of a DTensor, and the whole of any other, which its stage's ranks hold."""
        if isinstance(tensor, DTensor):
            return self._plans[id(like)].pieces(tensor, like)
        shape = tuple(tensor.shape)
        is_writer = self.placement.rank == self._first_of_stage
        return [Piece(shape, (0,) * len(shape), tensor.detach(), is_writer)]


def _as_error(problem: Problem) -> BadFileError:
    return BadFileError(f"{dotted(problem.path)}: {problem.message}; {problem.remedy}")
