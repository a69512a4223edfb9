"""The protocol of search methods: ``sweep.search.method`` names one, built in or of a plug-in.

A method keeps no state: each ``submit`` passes it all trials so far, read from the run folders. It runs on
the login node and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hpc_train.experiment.config.sweep_sections import Distribution


@dataclass(frozen=True)
class Trial:
    """One run of the search: the values of its parameters, and its outcome."""

    #: Without parameters whose condition (``when``) does not hold.
    values: Mapping[str, Any]
    #: ``running``: also while it is queued, or was interrupted and will be resumed. ``diverged``: NaN or
    #: infinity, so its values are bad. ``failed``: ended without a result that depends on its values.
    state: Literal["finished", "running", "diverged", "failed"]
    #: The best value of the metric; only for finished trials.
    value: float | None = None
    run_id: str = ""
    #: It was interrupted (``running``), or failed before it saved anything: a later submit starts it again.
    is_due: bool = False


@dataclass(frozen=True)
class SearchRequest:
    """A request to a method."""

    parameters: Mapping[str, Distribution]
    #: In the order in which their runs were created.
    trials: Sequence[Trial]
    #: Number of proposals to return.
    count: int
    mode: Literal["min", "max"]
    #: Seed of the random numbers: the same request has the same result. Differs between rounds. 32 bits.
    seed: int


class SearchMethod(Protocol):
    """Proposes the values of the next runs. The registry maps a method's name to such a function."""

    def __call__(self, request: SearchRequest) -> Sequence[Mapping[str, Any]]:
        """Return the values of each proposal by key.

        A parameter whose ``when`` does not hold may have a value: it is dropped. Floats are rounded to six
        significant digits. Proposals that repeat a trial are dropped, and the method is then called again
        with another seed.
        """
        ...
