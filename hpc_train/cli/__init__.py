"""The command line: one module per command, with its options in ``command_options``. Imports no torch: work
that needs it runs in a child process. May import everything but ``training``. Start reading at
``submit.py``.
"""
