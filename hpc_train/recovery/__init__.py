"""Decides whether a run continues after an interruption, and on which nodes. No scheduler, no torch."""
