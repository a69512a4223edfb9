"""Runs as Slurm array jobs: submission, the batch script's two ends, what Slurm says of jobs."""
