"""Degrees of parallelism, pipeline schedules and batch arithmetic of a file. Imports no torch."""
