"""One YAML file in, a trained model out, on a laptop or on Slurm, whatever interrupts it."""

__version__ = "0.2.0"
