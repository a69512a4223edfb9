"""Launcher plug-ins: how the ranks of a run come to be processes on machines. No torch."""
