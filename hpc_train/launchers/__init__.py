"""Launcher plug-ins, which start the ranks of a run as processes on machines. Without torch."""
