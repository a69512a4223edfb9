"""What follows from a file for its ranks: degrees of parallelism, pipeline schedules, batch arithmetic.
Imports no torch.
"""
