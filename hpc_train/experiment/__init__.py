"""The file and its plan: an experiment file is read, checked and turned into runs. Imports no torch.

- ``config``: schema, YAML with positions, messages
- ``validate``: the rules; ``loading.load`` is the way in
- ``data_facts``, ``topology``: built-in data sets, tasks and strategies, described without torch
- ``plan``: sweep → runs, with ids, ranks, steps, predicted memory and time

These packages import each other in the opposite order, and besides them only the modules of the base
(``errors``, ``paths``, ``registry``, …). Start reading at ``validate/loading.py``.
"""
