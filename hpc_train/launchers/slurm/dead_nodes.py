"""Which of an attempt's nodes are gone, according to sinfo."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from hpc_train.recovery import bad_nodes

#: sinfo is asked at a requeue only; one that hangs must not keep the job from starting.
_SINFO_LIMIT_S = 30.0
#: Not ``power*``: nodes that are switched off to save power are not broken.
_GONE = ("down", "fail")


def gone(hosts: Sequence[str]) -> list[str]:
    """Return those of the nodes that Slurm calls down, or has not heard of; none where it can't be asked."""
    wanted = bad_nodes.names(hosts)
    if not wanted:
        return []
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(wanted)}", "--format=%N %T"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SINFO_")}
    with suppress(OSError, subprocess.SubprocessError):  # in a container there is none
        done = subprocess.run(
            command, env=clean, capture_output=True, text=True, check=True, timeout=_SINFO_LIMIT_S
        )
        pairs = (line.split() for line in done.stdout.splitlines())
        states = {pair[0]: pair[1].lower() for pair in pairs if len(pair) == 2}
        return sorted(node for node in wanted if _is_gone(states.get(node, "")))
    return []


def _is_gone(state: str) -> bool:
    """``idle*``: it does not respond."""
    return state.startswith(_GONE) or state.endswith("*")
