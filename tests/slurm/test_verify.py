"""The jobs of an array verify a run, each a part of its stretches; a job whose stretch differs fails."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.digests import encoded, read_digests
from tests.end_to_end.runs import REPOSITORY
from tests.end_to_end.test_replay import copy_run
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.runs import sbatch, wait_for_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_each_job_of_an_array_verifies_its_part(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    run = quiet_runs.of("checkpoint.keep_every=30", "checkpoint.every_steps=30", "parallel.strategy=ddp")
    copy = RunPaths(tmp_path / "runs" / "digits" / run.folder.name)
    copy.folder.parent.mkdir(parents=True, mode=0o700)
    copy_run(run, copy)
    record, octets = list(read_digests(copy.digests))[39], bytearray(copy.digests.read_bytes())
    octets[16 + 39 * 40 : 16 + 40 * 40] = encoded(replace(record, loss=1.0))
    copy.digests.write_bytes(octets)
    output = tmp_path / "part-%a.txt"
    verify = f"{sys.executable} -m hpc_train verify {copy.folder} --replay --part $SLURM_ARRAY_TASK_ID/2"
    options = ("--array=1-2", f"--output={output}", "--cpus-per-task=1", "--time=20")
    job = sbatch(cluster, *options, wrap=f"export PYTHONPATH={REPOSITORY}; {verify}", folder=tmp_path)
    states = [wait_for_state(cluster, f"{job}_{part}", "COMPLETED", "FAILED") for part in (1, 2)]
    texts = [(tmp_path / f"part-{part}.txt").read_text() for part in (1, 2)]
    assert states == ["COMPLETED", "FAILED"], texts
    assert "1 to 30  bitwise identical" in texts[0] and "31 to 60  differs at step 40" in texts[1], texts
    shutil.rmtree(copy.folder)
