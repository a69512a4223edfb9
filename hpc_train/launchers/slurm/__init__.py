"""Runs as Slurm array jobs: submission, start and end of the batch script, job states."""

#: The launcher's name: on the command line, and in ``run.json`` of the runs that it has.
LAUNCHER = "slurm"
#: The same of runs that use an allocation which their user already has (``--here``).
ALLOCATION = "allocation"
