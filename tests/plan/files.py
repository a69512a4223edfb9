"""Experiment files for tests of the planner."""

from __future__ import annotations

from pathlib import Path

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan.planning import Plan, make_plan
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.launchers.slurm.launcher import SlurmLauncher

EXPERIMENT = """\
name: tiny
device: cpu
task: classification
model: {name: "torch.nn:Identity"}
data: {name: synthetic, args: {num_samples: 100}}
optimization:
  epochs: 3
  global_batch_size: 32
  micro_batch_size: 8
  optimizer: {name: sgd, lr: 0.1}
"""


def loaded(folder: Path, *overrides: str, more: str = "") -> Loaded:
    file = folder / "exp.yaml"
    file.write_text(EXPERIMENT + more, encoding="utf-8")
    return load(file, overrides)


def plan_here(file: Loaded, devices: int) -> Plan:
    def ranks_of(experiment: Experiment) -> Ranks:
        return Ranks(devices, devices, devices, gpu_hours=0.0)

    return make_plan(file, ranks_of, on_this_machine=True)


def plan_on_slurm(file: Loaded) -> Plan:
    return make_plan(file, lambda experiment: SlurmLauncher().ranks(experiment, None))
