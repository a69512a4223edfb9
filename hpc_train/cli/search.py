"""``search``: submits a file with ``sweep.search`` again and again, until all its trials are done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.cli.searching import search_round
from hpc_train.cli.submit import SubmitOptions, submit
from hpc_train.console import say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.validate.loading import load

#: Between two looks at trials in a queue. Assumed: trials take minutes.
_POLL_S = 30.0


def search(file: Path, overrides: Sequence[str], options: SubmitOptions, rounds: int | None) -> ExitCode:
    """Start the next trials whenever some are missing; return how the worst run ended.

    ``rounds``: the number of submits; None: until all trials are done. Raises UsageError if the file has no
    search.
    """
    loaded = load(file, overrides)
    section = loaded.experiment.sweep.search
    if section is None:
        raise UsageError(f"search: {file} has no sweep.search; add it, or use `hpc-train submit`")
    codes = [ExitCode.DONE]
    before: list[Mapping[str, Any]] | None = None
    while rounds is None or len(codes) <= rounds:
        made = search_round(loaded, section)
        if not made.proposals and made.running:
            time.sleep(_POLL_S)
            continue
        if made.proposals and made.proposals == before:
            say(f"{loaded.experiment.name}: the last submit started none of its trials; see its messages")
            return max(*codes, ExitCode.FAILED)
        before = list(made.proposals)
        codes.append(submit(file, overrides, options))
        if not made.proposals or codes[-1] == ExitCode.INTERRUPTED:
            break
    return max(codes)
