"""Runs as Slurm array jobs: submission, the batch script's two ends, what Slurm says of jobs."""

#: The launcher's name: on the command line, and in ``run.json`` of the runs that it has.
LAUNCHER = "slurm"
