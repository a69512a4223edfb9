"""A step's arithmetic, swept values, ranks and code: noted with the run and shown alike everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_train.run.attempts import claim_attempt
from hpc_train.run.files import read_json
from hpc_train.run.find import find_runs
from tests.cli.commands import hpc_train
from tests.cli.launchers import COMPLETING, SIZED_QUEUE
from tests.run.runs import small_run

_FILE = ("optimization.global_batch_size=64", "precision=bf16")
_ON_6 = "64 samples per step: 8 micro-batches of 8, at most 2 per rank, 6 ranks, bf16"
_ON_1 = "64 samples per step: 8 micro-batches of 8, 8 per rank, 1 rank, bf16"


def _runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(hpc_train("status", "--json").out)["runs"]
    return runs


def test_validate_plan_submit_and_status_agree(file: Path) -> None:
    assert _ON_6 in hpc_train("validate", file, *_FILE, "slurm={ranks_per_node: 6}").err
    queue = (file, *_FILE, "--launcher", SIZED_QUEUE)
    (planned,) = json.loads(hpc_train("plan", *queue, "--json").out)["runs"]
    heads, cells = (line.split() for line in hpc_train("plan", *queue).out.splitlines()[:2])
    table = dict(zip(heads, cells, strict=False))
    submitted = hpc_train("submit", *queue)
    assert _ON_6 in submitted.err
    (found,) = _runs()
    shown = {key: planned[key] for key in ("ranks", "micro_batches", "accumulation", "precision")}
    assert shown == {"ranks": 6, "micro_batches": 8, "accumulation": 2, "precision": "bf16"}
    assert {key: found[key] for key in shown} == shown
    names = {"ranks": "ranks", "micro_batches": "micro-batches", "accumulation": "accumulation"}
    assert {key: int(table[head]) for key, head in names.items()} == {key: shown[key] for key in names}
    assert table["precision"] == "bf16"


def test_the_ranks_of_a_node_are_those_of_the_newest_attempt(file: Path) -> None:
    """Without hosts in its record, those of a job of the launcher: 3, which don't divide 4 ranks."""
    hpc_train("submit", file, *_FILE, "parallel.strategy=tensor", "--launcher", SIZED_QUEUE)
    (paths,) = find_runs([])
    claim_attempt(paths, SIZED_QUEUE, ranks=4)
    assert (_runs()[0]["ranks"], _runs()[0]["accumulation"]) == (4, 8 // 4)
    claim_attempt(paths, SIZED_QUEUE, ranks=4, hosts=["n1", "n2"])
    assert _runs()[0]["accumulation"] == 8 // 2


def test_a_sweeps_values_and_the_code_are_noted(file: Path) -> None:
    done = hpc_train(
        "submit", file, *_FILE, "sweep.grid={seed: [1, 2]}", "--launcher", COMPLETING, "--devices", "1"
    )
    assert done.err.count(_ON_1) == 2
    found = _runs()
    assert sorted(run["values"]["seed"] for run in found) == [1, 2]
    for run, paths in zip(found, find_runs([]), strict=True):
        noted = read_json(paths.run) or {}
        assert (noted["values"], noted["ranks"]) == (run["values"], 1)
        assert run["code"] == {key: noted["code"][key] for key in ("commit", "dirty", "snapshot")}
        assert run["code"]["snapshot"] == (paths.folder / "code").resolve().name


def test_an_attempts_ranks_count_where_none_were_planned(tmp_path: Path) -> None:
    paths = small_run(tmp_path / "runs")
    (found,) = _runs()
    assert (found["values"], found["ranks"], found["accumulation"]) == ({}, None, None)
    claim_attempt(paths, ranks=2)
    (found,) = _runs()
    assert (found["ranks"], found["micro_batches"], found["accumulation"]) == (2, 2, 1)
    assert found["precision"] == "fp32"
