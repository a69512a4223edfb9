"""The jobs of an array verify a run, each a part of its stretches; their results are joined."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.digests import encoded, read_digests
from tests.cli.json_checks import checked
from tests.end_to_end.runs import hpc_train
from tests.end_to_end.test_replay import copy_run
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import ENVIRONMENT, TWO_RANKS
from tests.slurm.runs import wait_for_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def verified(run: RunPaths, *options: str, code: int) -> dict[str, Any]:
    done = hpc_train("verify", run.folder, *options, "--json", **ENVIRONMENT)
    assert done.code == code, done.err + done.out
    (answer,) = checked("verify", done.out)["runs"]
    found: dict[str, Any] = answer
    return found


def test_jobs_of_an_array_verify_a_run_and_their_results_are_joined(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    words = ("checkpoint.keep_every=30", "checkpoint.every_steps=30")
    run = quiet_runs.of(*words, text=TWO_RANKS, environment=ENVIRONMENT)
    copy = RunPaths(tmp_path / "runs" / "digits" / run.folder.name)
    copy.folder.parent.mkdir(parents=True, mode=0o700)
    copy_run(run, copy)
    record, octets = list(read_digests(copy.digests))[39], bytearray(copy.digests.read_bytes())
    octets[16 + 39 * 40 : 16 + 40 * 40] = encoded(replace(record, loss=1.0))
    copy.digests.write_bytes(octets)
    jobs = verified(copy, "--replay", "--submit", code=0)["jobs"]
    assert (jobs["parts"], jobs["unfinished"]) == (2, [1, 2])
    states = [wait_for_state(cluster, f"{jobs['job']}_{part}", "COMPLETED", "FAILED") for part in (1, 2)]
    logs = [path.read_text() for path in copy.verification.glob("*log*")]
    assert states == ["COMPLETED", "FAILED"], logs
    answer = verified(copy, code=1)
    assert answer["jobs"] == jobs | {"unfinished": []}
    results = [(stretch["first"], stretch["last"], stretch["result"]) for stretch in answer["stretches"]]
    assert results == [(1, 30, "identical"), (31, 60, "differs")]
    assert answer["stretches"][1]["first_difference"]["step"] == 40
    done = hpc_train("verify", copy.folder)
    assert "1 to 30   bitwise identical" in done.out and "31 to 60  differs at step 40" in done.out, done.out
    # A job that ends without a result.
    cancelled = verified(copy, "--replay", "--submit", "--slots", "1", code=0)["jobs"]["job"]
    cluster.run("scancel", cancelled)
    wait_for_state(cluster, f"{cancelled}_1", "CANCELLED")
    answer = verified(copy, code=1)
    assert (answer["jobs"]["job"], answer["stretches"]) == (cancelled, [])
    assert answer["jobs"]["failed"] == {"1": "CANCELLED"}
    shutil.rmtree(copy.folder)
