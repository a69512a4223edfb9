"""The health of nodes and ranks: the check before the first step, progress, hang detection, stack dumps."""
