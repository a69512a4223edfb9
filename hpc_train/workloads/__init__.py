"""The work that the runs of a job execute: the implementations of ``experiment.workload.Workload``, which
commands and launchers use through ``workload_of`` only. Imports no torch. Start reading at ``training.py``.
"""
