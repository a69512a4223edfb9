"""Search methods that tests name in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_train.search.base import SearchRequest

COUNTING = "tests.search.methods:counting"
STUBBORN = "tests.search.methods:stubborn"
WRONG = "tests.search.methods:wrong"

#: What was asked for, newest last; tests clear it.
requests: list[SearchRequest] = []


def counting(request: SearchRequest) -> Sequence[Mapping[str, Any]]:
    """Propose 0, 1, 2, … for every parameter that is a range."""
    requests.append(request)
    begin = len(request.trials)
    return [dict.fromkeys(request.parameters, begin + place) for place in range(request.count)]


def stubborn(request: SearchRequest) -> Sequence[Mapping[str, Any]]:
    """Always propose the first value."""
    requests.append(request)
    return [{key: each.ends[0] for key, each in request.parameters.items()}] * request.count


def wrong(request: SearchRequest) -> Sequence[Mapping[str, Any]]:
    """Propose what is not in the space."""
    return [dict.fromkeys(request.parameters, -5)] * request.count
