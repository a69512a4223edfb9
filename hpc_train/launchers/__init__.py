"""How runs come to be processes: launcher plug-ins for this machine and for Slurm, and ``doctor``'s checks.
Imports no torch, except that ``entry``, which runs on a node, calls ``training.main``. Start reading at
``base.py``.
"""
