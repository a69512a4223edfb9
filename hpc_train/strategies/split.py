"""``strategy: split``: each rank has some of the layers; micro-batches pass through all, one at a time."""

from __future__ import annotations

from torch.distributed.pipelining import ScheduleGPipe

from hpc_train.strategies.pipeline import PipelineStrategy
from hpc_train.strategies.pipeline_run import Chunks, Run


class SplitStrategy(PipelineStrategy):
    """A pipeline of one micro-batch: the least memory for activations, and all ranks but one wait.

    Gradients are reduced once a step.
    """

    name = "split"

    def new_run(self, stages: list[Chunks], slots: int) -> Run:
        return Run(stages, ScheduleGPipe, 1, self.placement.degrees.data_ranks)
