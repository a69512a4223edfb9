"""Degrees of parallelism, pipeline schedules and batch arithmetic, derived from the file.
Imports no torch.
"""
