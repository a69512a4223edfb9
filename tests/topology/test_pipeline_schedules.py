from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import bubble, problem_of_schedule, stages_per_rank


def pipeline(**keys: Any) -> ParallelConfig:
    return ParallelConfig(**{"strategy": "pipeline", **keys})


def test_the_bubble_is_gpipes_and_by_several_stages_a_rank_smaller() -> None:
    for schedule in ("gpipe", "1f1b"):
        assert bubble(pipeline(schedule=schedule), ranks=4, slots=8) == pytest.approx(3 / 11)
    assert bubble(pipeline(schedule="interleaved"), ranks=4, slots=8) == pytest.approx(3 / 19)
    assert bubble(pipeline(schedule="interleaved", stages_per_rank=4), ranks=4, slots=8) == pytest.approx(
        3 / 35
    )
    assert bubble(pipeline(strategy="split"), ranks=4, slots=8) == pytest.approx(3 / 4)
    assert bubble(pipeline(), ranks=1, slots=8) == 0


def test_with_fewer_slots_than_ranks_several_stages_a_rank_help_less() -> None:
    # One micro-batch is in one place at a time.
    assert bubble(pipeline(schedule="interleaved"), ranks=4, slots=1) == pytest.approx(3 / 4)
    assert bubble(pipeline(schedule="interleaved"), ranks=4, slots=4) == pytest.approx(3 / 11)
    assert bubble(pipeline(schedule="1f1b"), ranks=4, slots=2) == pytest.approx(3 / 5)


def test_interleaved_has_two_stages_a_rank_unless_the_file_says_more() -> None:
    assert stages_per_rank(pipeline()) == 1
    assert stages_per_rank(pipeline(schedule="interleaved")) == 2
    assert stages_per_rank(pipeline(schedule="interleaved", stages_per_rank=3)) == 3
    # A key that split does not have.
    assert stages_per_rank(pipeline(strategy="split", schedule="interleaved")) == 1


class _Stage:
    """As much of torch's stage as its schedule looks at before it runs."""

    def __init__(self, ranks: int, index: int) -> None:
        self.group_size, self.num_stages, self.group_rank, self.stage_index = ranks, 2 * ranks, 0, index
        self.is_first, self.is_last, self.submod = index == 0, False, None


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_interleaved_takes_the_slots_that_torch_does(ranks: int) -> None:
    for slots in range(1, 20):
        problem = problem_of_schedule(pipeline(schedule="interleaved"), ranks, slots)
        stages = [_Stage(ranks, 0), _Stage(ranks, ranks)]
        try:
            ScheduleInterleaved1F1B(stages, slots)
        except ValueError:
            assert problem is not None
            number = int(problem.remedy.split()[-1])
            assert problem_of_schedule(pipeline(schedule="interleaved"), ranks, number) is None
        else:
            assert problem is None
    assert problem_of_schedule(pipeline(schedule="1f1b"), ranks, 1) is None
