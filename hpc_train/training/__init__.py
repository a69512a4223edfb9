"""One rank from its start to its exit code: the loop, the step, optimisation, evaluation, metrics."""
