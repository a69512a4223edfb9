"""``verify --replay``: what it refuses, and how it shares stretches among slots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import verify as module
from hpc_train.cli import verify_jobs
from hpc_train.cli.replay_options import VerifyOptions
from hpc_train.cli.replayed_run import ReplayedRun
from hpc_train.errors import NoSchedulerError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.launchers.base import JobArray, KeyProblem
from hpc_train.paths import RunPaths
from hpc_train.report.reproduction import VerifiedStretch
from hpc_train.run.digests import DigestsFile
from hpc_train.run.files import write_json
from hpc_train.run.verification_parts import PartsRequest
from tests.cli.commands import hpc_train, stderr_of
from tests.cli.json_checks import checked
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, save
from tests.run.test_digests import digest


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = small_run(tmp_path / "runs")
    begin_attempt(paths, 1)
    return paths


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "2"], "--slots: has no effect without --replay; add it, or omit --slots"),
        (["--part", "1/2"], "--part: has no effect without --replay"),
        (["--tolerance", "0"], "--tolerance: has no effect without --replay"),
        (["--submit"], "--submit: has no effect without --replay"),
        (["--replay", "--submit", "--part", "1/2"], "--part: each job of --submit repeats a part"),
        (["--replay", "--part", "3/2"], "--part: '3/2' is not K/N with K from 1 to N, such as 3/20"),
        (["--replay", "--part", "x"], "--part: 'x' is not K/N"),
        (["--replay", "--slots", "0"], "--slots"),
        (["--replay", "--code", "old"], "--code: unknown value 'old'"),
        (["--replay"], "abc: has neither checkpoints nor digests to compare a replay with"),
    ],
)
def test_mistakes_are_named_before_any_rank_starts(
    run: RunPaths, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "replay_on_ranks", None)
    done = hpc_train("verify", "abc", *words)
    assert done.code == 2 and message in done.err.replace("\n", " "), done.err


def replays(run: RunPaths, part: tuple[int, int] = (1, 1), **options: Any) -> module._Replays:
    made = VerifyOptions(runs=["abc"], **options)
    return module._Replays(ReplayedRun(run, "abc", uses_new_code=False), made, part)


def test_stretches_end_at_intact_checkpoints_and_the_newest_digest(run: RunPaths) -> None:
    for step in (5, 10, 20):
        save(run, step)
    file = DigestsFile(run.digests, 0)
    file.append([digest(step) for step in range(1, 24)])
    file.close()
    assert replays(run)._stretches() == [(0, 5), (5, 10), (10, 20), (20, 23)]
    run.checkpoint(10).shard(0).write_bytes(b"damaged")
    assert replays(run)._stretches() == [(0, 5), (5, 20), (20, 23)]
    assert [(part.begin, part.last) for part in replays(run, (2, 3))._parts] == [(5, 20)]
    write_json(run.run, json.loads(run.run.read_text()) | {"extends": {"run": "def", "step": 5}})
    assert replays(run)._stretches() == [(5, 20), (20, 23)], "the run before had another length"


@pytest.mark.parametrize(
    ("slots", "expected"), [(1, [[5, 15, 16]]), (2, [[15], [5, 16]]), (7, [[15], [5], [16]])]
)
def test_slots_have_about_as_many_steps(run: RunPaths, slots: int, expected: list[list[int]]) -> None:
    for step in (5, 15, 16):
        save(run, step)
    (group,) = replays(run, slots=slots)._slots()
    assert [[part.last for part in slot.parts] for slot in group] == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "slots", "expected"),
    [(8, 2, None, 4), (2, 4, None, 1), (0, 1, None, 2), (0, 2, None, 1), (0, 2, 5, 5), (8, 2, 5, None)],
)
def test_slots_follow_from_the_devices(
    gpus: int, ranks: int, slots: int | None, expected: int | None, run: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "usable_cpus", lambda: {0, 1})
    save(run, 5)
    work = replays(run, slots=slots)
    work._num_gpus = gpus
    if expected is None:
        with pytest.raises(module.UsageError, match="--slots: 5 slots of 2 ranks need a GPU per rank"):
            work._num_slots(ranks, ())
    else:
        assert work._num_slots(ranks, (("OMP_NUM_THREADS", "1"),)) == expected


def test_a_replay_that_can_not_be_bitwise_has_a_tolerance(run: RunPaths) -> None:
    save(run, 5)
    assert replays(run)._parts[0].tolerance == 0
    assert replays(run, devices=1)._parts[0].tolerance == module.DEFAULT_TOLERANCE, "two saved it"
    assert replays(run, devices=1, tolerance=0.0)._parts[0].tolerance == 0


class Queue:
    """A launcher whose jobs end when a test says so."""

    title = "Queue"

    def __init__(self) -> None:
        self.arrays: list[JobArray] = []
        self.ended: dict[int, str] = {}
        self.fails = False

    def problems(self, experiment: Experiment) -> list[KeyProblem]:
        return [] if experiment.slurm is not None else [KeyProblem("slurm", "is missing", "write it")]

    def submit_array(self, array: JobArray) -> str:
        self.arrays.append(array)
        return str(10 + len(self.arrays))

    def ended_jobs(self, job: str, numbers: Sequence[int]) -> dict[int, str]:
        if self.fails:
            raise NoSchedulerError("no answer")
        return {number: state for number, state in self.ended.items() if number in numbers}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(verify_jobs, "load_launcher", lambda name: queue)
    return queue


def verified(*words: str, code: int) -> dict[str, Any]:
    done = hpc_train("verify", "abc", *words, "--json")
    assert done.code == code, done.err
    (answer,) = checked("verify", done.out)["runs"]
    found: dict[str, Any] = answer
    return found


def test_jobs_repeat_a_part_each_and_their_results_are_joined(tmp_path: Path, queue: Queue) -> None:
    run = small_run(tmp_path / "runs", slurm={"ranks_per_node": 2})
    begin_attempt(run, 1)
    for step in (5, 10, 15):
        save(run, step)
    words = ("--replay", "--submit", "--slots", "2", "--tolerance", "0.5")
    jobs = verified(*words, code=0)["jobs"]
    assert jobs == {"job": "11", "parts": 2, "unfinished": [1, 2], "failed": {}, "last": 15}
    (array,) = queue.arrays
    assert (array.count, array.module, array.folder) == (2, "cli.verify", run.verification)
    assert "abc: job 11 of Queue still verifies it" in stderr_of(2, "verify", "abc", *words)
    request = PartsRequest.read(run)
    assert request is not None and request.tolerance == 0.5
    row = dict.fromkeys(VerifiedStretch.__annotations__) | {
        "first": 1, "last": 5, "result": "identical", "tolerance": 0.0, "numbers": [],
        "host": "n1", "slot": 1,
    }  # fmt: skip
    request.note(run, 1, {"stretches": [row], "seconds": 2.5})
    queue.fails = True
    assert "the state of job 11 is unknown: no answer" in hpc_train("verify", "abc").err
    queue.fails = False
    answer = verified(code=75)
    assert (answer["jobs"]["unfinished"], answer["seconds"], answer["slots"]) == ([2], 2.5, 2)
    queue.ended = {2: "TIMEOUT"}
    assert "part 2 of 2: job 11_2 has ended without a result (TIMEOUT)" in stderr_of(1, "verify", "abc")
    other = row | {"first": 6, "last": 10, "result": "failed"}
    request.note(run, 2, {"stretches": [row | {"first": 11, "last": 15}, other], "seconds": 1.0})
    answer = verified(code=1)
    assert [stretch["first"] for stretch in answer["stretches"]] == [1, 6, 11]
    save(run, 20)
    assert "abc: steps 16 to 20 are newer than job 11" in hpc_train("verify", "abc").err
    verified(*words, code=0)  # a new array; results of the former one do not count
    assert verified(code=1)["stretches"] == [], "job 2 has ended"


def test_a_run_that_requests_no_resources_has_no_jobs(run: RunPaths, queue: Queue) -> None:
    save(run, 5)
    done = hpc_train("verify", "abc", "--replay", "--submit")
    assert done.code == 2 and "--submit: slurm of abc is missing; omit --submit" in done.err, done.err
    assert not queue.arrays and not run.verification.exists()
