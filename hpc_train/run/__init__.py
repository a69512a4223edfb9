"""The plain files of a run folder: all code that creates, reads and checks them; ``code``: the snapshot of
the code. Imports ``experiment``, no torch. Start reading at ``create.py``.
"""
