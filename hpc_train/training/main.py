"""One rank, from its start to its exit code: joins the others, trains, and reports how it ended.

Called by ``launchers.entry`` on every rank. Every error becomes an exit code and, unless another rank is the
cause, a ``rank-<r>.error`` file that the launcher and ``status`` show.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from contextlib import suppress
from datetime import datetime

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.rank.env import RankFacts
from hpc_train.registry import split_name, target_of
from hpc_train.run.attempts import read_record
from hpc_train.run.create import training_experiment
from hpc_train.training import build, evaluation, rank_exit, replaying
from hpc_train.training.distributed import log_stream
from hpc_train.training.rank import joined


def run(paths: RunPaths, attempt: int) -> ExitCode:
    """Run one rank of one attempt to its end. Returns the process's exit code; never raises."""
    flag = signals.install(_earliest_warning(paths, attempt))
    facts = RankFacts()
    log_stream.install()
    try:
        facts = RankFacts.from_environment(os.environ)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO if facts.rank == 0 else logging.WARNING)
        with joined(paths, attempt, facts, flag) as rank:
            if paths.replayed_steps.is_file():
                return replaying.replay(rank)
            is_evaluation = paths.evaluated_checkpoint.is_file()
            return evaluation.evaluate_checkpoint(rank) if is_evaluation else build.train(rank)
    except BaseException as error:
        return rank_exit.report(error, paths, attempt, facts, flag)


def import_parts(paths: RunPaths, attempt: int) -> None:
    """Import the built-in parts that the run's file names, such as timm, for a rank on standby.

    Modules of the user's are not imported: they may use the GPU. Errors are left to the attempt.
    """
    with suppress(Exception):
        experiment = training_experiment(paths, attempt)
        names = {
            "models": experiment.model.name,
            "datasets": experiment.data.name,
            "tasks": experiment.task,
            "strategies": experiment.parallel.strategy,
        }
        for kind, name in names.items():
            target = target_of(kind, split_name(name)[0]) or ""
            if target.startswith("hpc_train."):
                importlib.import_module(target.partition(":")[0])


def _earliest_warning(paths: RunPaths, attempt: int) -> float:
    """Return the earliest time of the scheduler's warning about the time limit, in seconds since 1970."""
    record = read_record(paths.attempt(attempt), with_events=False)
    if record is None or record.time_limit_s is None or record.lead_s is None:
        return 0.0
    began = datetime.fromisoformat(record.events.get("begin", record.start)).timestamp()
    return began + record.time_limit_s - record.lead_s
