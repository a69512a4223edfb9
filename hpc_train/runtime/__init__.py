"""Where 0.1 had what plug-ins import; the same objects as in ``hpc_train.datasets.types``."""
