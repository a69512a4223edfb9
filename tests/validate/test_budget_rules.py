"""What a file whose runs exceed its budget of GPU-hours is told."""

from __future__ import annotations

from hpc_train.experiment.validate.budget_rules import over_budget, over_share
from tests.run.runs import small_experiment


def test_large_numbers_of_gpu_hours_are_written_in_full() -> None:
    experiment = small_experiment(slurm={"max_gpu_hours": 1_500_000})
    predicted, one_attempt = over_budget(experiment, 2_345_678.9, None), over_budget(experiment, None, 2e6)
    assert predicted is not None and one_attempt is not None
    assert predicted.message.startswith("1,500,000 is less than the 2,345,679 GPU-hours that the runs")
    assert one_attempt.message.startswith("1,500,000 is less than the 2,000,000 GPU-hours that one")
    small = over_budget(small_experiment(slurm={"max_gpu_hours": 1.5}), 2.125, None)
    assert small is not None and small.message.startswith("1.5 is less than the 2.12 GPU-hours")


def test_a_run_that_needs_more_than_its_share_is_refused() -> None:
    experiment = small_experiment(slurm={"max_gpu_hours": 60})
    found = over_share(experiment, [1.25, 58.5], 2)
    assert found is not None
    assert found.message == (
        "60 is divided evenly among 2 runs; the longest is predicted to need 58.5 GPU-hours, "
        "and its share is 30"
    )
    assert found.remedy is not None and found.remedy.startswith("raise it to 117, or submit")
    assert over_share(experiment, [30.0, None], 2) is None
    assert over_share(experiment, [20.000000000001] * 3, 3) is None
    assert over_share(small_experiment(), [58.5, 1.0], 2) is None
