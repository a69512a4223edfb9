"""One YAML file in, a trained model out, on a laptop or on Slurm, whatever interrupts it."""

__version__ = "0.2.0"

import os as _os

if _os.environ.get("HPC_TRAIN_LATE_PATH"):
    from hpc_train.package_path import add_late_places as _add_late_places

    _add_late_places()
