"""Whether a run continues after an interruption, and on which nodes. Knows no scheduler; no torch."""
