"""One process among the ranks of an attempt: its place from the environment, stop signals, its parent.
Imports no torch.

Launchers set these variables and block these signals; training reads them.
"""
