"""Plug-ins for hpc-train, one of each kind."""
