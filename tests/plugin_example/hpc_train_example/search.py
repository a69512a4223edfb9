"""The search method ``near_best``: random values at first, then small changes of the best trial."""

import random

from hpc_train.plugins import SearchRequest


def near_best(request: SearchRequest) -> list[dict[str, object]]:
    """Propose random values at first, then those of the best trial with one parameter drawn again."""
    draw = random.Random(request.seed)
    finished = [trial for trial in request.trials if trial.value is not None]
    sign = -1 if request.mode == "max" else 1
    best = min(finished, key=lambda trial: sign * (trial.value or 0.0), default=None)
    proposals = []
    for _ in range(request.count):
        values = {} if best is None else dict(best.values)
        missing = [key for key in request.parameters if key not in values]
        for key in missing or [draw.choice(list(request.parameters))]:
            distribution = request.parameters[key]
            ends = distribution.ends
            values[key] = draw.choice(ends) if distribution.choice else draw.uniform(*ends)
        proposals.append(values)
    return proposals
