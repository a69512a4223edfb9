"""What a file whose runs exceed its budget of GPU-hours is told."""

from __future__ import annotations

from hpc_train.validate.budget_rules import over_budget
from tests.run.runs import small_experiment


def test_large_numbers_of_gpu_hours_are_written_in_full() -> None:
    experiment = small_experiment(slurm={"max_gpu_hours": 1_500_000})
    predicted, one_attempt = over_budget(experiment, 2_345_678.9, None), over_budget(experiment, None, 2e6)
    assert predicted is not None and one_attempt is not None
    assert predicted.message.startswith("1,500,000 is less than the 2,345,679 GPU-hours that the runs")
    assert one_attempt.message.startswith("1,500,000 is less than the 2,000,000 GPU-hours that one")
    small = over_budget(small_experiment(slurm={"max_gpu_hours": 1.5}), 2.125, None)
    assert small is not None and small.message.startswith("1.5 is less than the 2.12 GPU-hours")
