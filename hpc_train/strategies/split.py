"""``strategy: split``: each rank has some of the layers; micro-batches pass through all, one at a time."""

from __future__ import annotations

from torch.distributed.pipelining import ScheduleGPipe

from hpc_train.strategies.pipeline import PipelineStrategy
from hpc_train.strategies.pipeline_run import MicroBatchStage, Run


class SplitStrategy(PipelineStrategy):
    """A pipeline of one micro-batch: minimal memory for activations, but all ranks except one wait.

    Gradients are reduced once a step.
    """

    name = "split"

    def new_run(self, stages: list[MicroBatchStage], slots: int) -> Run:
        return Run(stages, ScheduleGPipe, 1, self.context.degrees.data_ranks)
