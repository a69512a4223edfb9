"""The training loop and its parts: optimisation, checkpoints, meters, evaluation."""
