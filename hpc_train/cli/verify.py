"""``verify``: the checkpoints of runs by their hashes and, with ``--replay``, every step between them.

The stretches between two checkpoints are replayed in slots, several at the same time. The ranks of a slot
repeat one stretch after the other (``training.replaying``), so that they import and read the data once.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

from hpc_train.cli.code import is_new
from hpc_train.cli.command_line import exit_code_of
from hpc_train.cli.many_runs import find_readable
from hpc_train.cli.replay import replay_folder, replay_on_ranks
from hpc_train.cli.replay_options import VerifyOptions
from hpc_train.cli.replayed_run import ReplayedRun, replayed_stretches, thread_variables
from hpc_train.cli.verify_jobs import VerifyingJobs, jobs_lines, joined, submit
from hpc_train.console import put, put_json, say
from hpc_train.errors import ExitCode, UsageError, counted
from hpc_train.experiment.config.schema import Experiment
from hpc_train.launchers.local import LocalLauncher, noted_signals
from hpc_train.paths import RunPaths
from hpc_train.rank.env import count_gpus, gpu_names
from hpc_train.report.parted_steps import (
    Lines,
    place,
    step_digest,
    step_numbers,
)
from hpc_train.report.reproduction import (
    FAILURES,
    VerifiedStretch,
    near,
    reproduction,
    stretches_text,
)
from hpc_train.run import checkpoints
from hpc_train.run.code.snapshot import linked
from hpc_train.run.digests import read_digests
from hpc_train.run.find import run_name
from hpc_train.run.resource_limits import usable_cpus
from hpc_train.run.trust import check_run
from hpc_train.run.verification_parts import PartsRequest

#: Relative difference that passes if a replay can't be bitwise identical. Assumed.
DEFAULT_TOLERANCE = 0.05


class CheckpointJson(TypedDict):
    """One checkpoint, checked by its hashes."""

    step: int
    path: str
    #: Empty if it is intact.
    problems: list[str]
    #: False if the attempt that wrote it no longer owned the run.
    counts: bool
    #: Whether it is the one that would be loaded.
    loads: bool


class VerifiedRun(TypedDict):
    """A run's checkpoints, the newest one first."""

    id: str
    name: str
    path: str
    checkpoints: list[CheckpointJson]
    #: With ``--replay``: in their order.
    stretches: list[VerifiedStretch]
    #: With ``--replay``: the stretches that were replayed at the same time, and the seconds of all.
    slots: int | None
    seconds: float | None
    #: The newest jobs of ``--submit``, whose results are in ``stretches``; null: none, or with ``--replay``.
    jobs: VerifyingJobs | None


class Verification(TypedDict):
    """Which checkpoints would load and, with ``--replay``, whether replays of the steps equal the runs."""

    runs: list[VerifiedRun]


def verify(options: VerifyOptions) -> ExitCode:
    """Check every checkpoint; FAILED if a valid one is damaged, or a replayed stretch differs."""
    folders = find_readable(options.runs)
    part = _check_options(options)
    for paths in folders if options.replays else ():
        check_run(paths)
    runs = []
    for paths in folders:
        verified = _begun(paths, list(_verified(paths, shows=not options.as_json)))
        if options.replays:
            replays = _Replays(ReplayedRun(paths, run_name(paths), is_new(options.code)), options, part)
            replays.submit(verified) if options.submits else replays.verify(verified)
        else:
            _join(verified, paths)
        if verified["stretches"] and not options.as_json:
            put(*stretches_text(verified["stretches"], verified["seconds"] or 0.0, run_name(paths)))
        runs.append(verified)
    if options.as_json:
        put_json(Verification(runs=runs))
    is_damaged = any(saved["counts"] and saved["problems"] for run in runs for saved in run["checkpoints"])
    differs = any(stretch["result"] in FAILURES for run in runs for stretch in run["stretches"])
    jobs = [run["jobs"] for run in runs if run["jobs"] is not None]
    if is_damaged or differs or any(array["failed"] for array in jobs):
        return ExitCode.FAILED
    waits = not options.submits and any(array["unfinished"] for array in jobs)
    return ExitCode.TRY_AGAIN if waits else ExitCode.DONE


def _begun(paths: RunPaths, saved: list[CheckpointJson]) -> VerifiedRun:
    return VerifiedRun(
        id=paths.folder.name,
        name=paths.siblings.folder.name,
        path=str(paths.folder.absolute()),
        checkpoints=saved,
        stretches=[],
        slots=None,
        seconds=None,
        jobs=None,
    )


def _join(verified: VerifiedRun, paths: RunPaths) -> None:
    """Add the results of the newest jobs of ``--submit``."""
    verified["jobs"], verified["stretches"], seconds = joined(paths)
    if (jobs := verified["jobs"]) is not None:
        verified["slots"], verified["seconds"] = jobs["parts"], seconds
        newest = max((saved["step"] for saved in verified["checkpoints"]), default=0)
        for line in jobs_lines(jobs, paths, newest):
            say(line)


def _check_options(options: VerifyOptions) -> tuple[int, int]:
    """Return ``--part`` as two numbers."""
    others = {
        "--slots": options.slots,
        "--part": options.part,
        "--submit": options.submits or None,
        "--tolerance": options.tolerance,
        "--devices": options.devices,
        "--code": options.code,
    }
    for name, value in others.items():
        if value is not None and not options.replays:
            raise UsageError(f"{name}: has no effect without --replay; add it, or omit {name}")
    if options.submits and options.part is not None:
        raise UsageError("--part: each job of --submit repeats a part; omit --part, or --submit")
    numbers = (options.part or "1/1").split("/")
    if len(numbers) == 2 and all(number.isdecimal() and len(number) < 10 for number in numbers):
        part, parts = map(int, numbers)
        if 1 <= part <= parts:
            return part, parts
    raise UsageError(f"--part: {options.part!r} is not K/N with K from 1 to N, such as 3/20")


def _verified(paths: RunPaths, *, shows: bool) -> Iterator[CheckpointJson]:
    """Yield a run's checkpoints, newest first; ``shows``: print each once it is verified."""
    folders = paths.checkpoint_folders()[::-1]
    if not folders:
        say(f"{run_name(paths)}: no checkpoint yet")
        return
    counting = set(checkpoints.committed(paths)) | set(checkpoints.damaged(paths))
    would_load = None
    for checkpoint in folders:
        problems = checkpoints.verify(checkpoint)
        if not checkpoint.folder.is_dir():
            continue  # a running run has removed it meanwhile
        counts = checkpoint in counting
        if counts and not problems:
            would_load = would_load or checkpoint
        loads = checkpoint == would_load
        if shows:
            text = "damaged" if problems else "whole"
            if not counts:
                text += ", does not count: its attempt no longer owned the run"
            elif loads:
                text += ", would load"
            put(f"{run_name(paths)}  {checkpoint.folder.name}  {text}")
            for problem in problems:
                say(f"  {problem}")
        yield CheckpointJson(
            step=checkpoint.step,
            path=str(checkpoint.folder),
            problems=problems,
            counts=counts,
            loads=loads,
        )
    if would_load is None:
        say(f"{run_name(paths)}: nothing would load; start again with `hpc-train submit FILE --new`")


@dataclass(frozen=True)
class _Part:
    """The steps from checkpoint ``begin`` (0: the start) to ``last``, and how they are repeated."""

    begin: int
    last: int
    ranks: int
    experiment: Experiment
    #: Of the ranks' environment.
    variables: tuple[tuple[str, str], ...]
    tolerance: float

    @property
    def steps(self) -> int:
        return self.last - self.begin


@dataclass
class _Slot:
    """The stretches that the same ranks repeat, one after the other."""

    number: int
    parts: list[_Part] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)


class _StoppedError(Exception):
    """A stop signal ends the replays."""


class _Replays:
    """The replays of one run; ``verify`` adds their results to its JSON."""

    def __init__(self, run: ReplayedRun, options: VerifyOptions, part: tuple[int, int]) -> None:
        self._run, self._options = run, options
        self._num_gpus = 0 if run.experiment.device == "cpu" else count_gpus(os.environ)
        number, count = part
        self._parts = [self._part(*ends) for ends in self._stretches()][number - 1 :: count]
        self._snapshot = None if run.uses_new_code else linked(run.paths)

    def _stretches(self) -> list[tuple[int, int]]:
        """Return the ends of the stretches: every intact checkpoint, and the newest step.

        Without the steps of a run that this one extends: verify that run.
        """
        run = self._run
        newest = max(run.checkpoints, default=0)
        last = max((digest.step for digest in read_digests(run.paths.digests, newest + 1)), default=newest)
        if last <= run.begin:
            raise UsageError(
                f"{run.name}: has neither checkpoints nor digests to compare a replay with; repeat this once "
                "it has saved a checkpoint"
            )
        ends = sorted({0, *(run.checkpoints.keys() - run.damage.keys()), last})
        return [(begin, end) for begin, end in pairwise(ends) if begin >= run.begin]

    def _part(self, begin: int, last: int) -> _Part:
        run, options = self._run, self._options
        facts = run.machine(begin)
        *earlier, trained = run.trained(begin, last)
        ranks = options.devices or min(trained.ranks or 1, self._num_gpus or os.cpu_count() or 1)
        device = "cuda" if self._num_gpus else "cpu"
        is_exact = run.experiment.deterministic
        is_bitwise = (device == "cpu" if is_exact is None else is_exact) and (
            facts["device"] in (None, device) and not earlier and trained.ranks in (ranks, None)
        )
        chosen = options.tolerance
        tolerance = chosen if chosen is not None else 0.0 if is_bitwise else DEFAULT_TOLERANCE
        variables = tuple(thread_variables(facts).items())
        return _Part(begin, last, ranks, trained.experiment, variables, tolerance)

    def _slots(self) -> list[list[_Slot]]:
        """Return the slots that work at the same time, for one kind of ranks after another."""
        kinds: dict[tuple[int, str, tuple[tuple[str, str], ...]], list[_Part]] = {}
        for part in self._parts:
            kind = part.ranks, part.experiment.model_dump_json(), part.variables
            kinds.setdefault(kind, []).append(part)
        groups = []
        for parts in kinds.values():
            num_slots = min(self._num_slots(parts[0].ranks, parts[0].variables), len(parts))
            slots = [_Slot(number + 1) for number in range(num_slots)]
            for part in sorted(parts, key=lambda part: -part.steps):
                min(slots, key=lambda slot: slot.steps).parts.append(part)
            for slot in slots:
                slot.parts.sort(key=lambda part: part.begin)
            groups.append(slots)
        return groups

    def _num_slots(self, ranks: int, variables: Sequence[tuple[str, str]]) -> int:
        """Return ``--slots``, or as many as this machine has devices or cores for."""
        if self._num_gpus:
            fitting = max(1, self._num_gpus // ranks)
            if self._options.slots is not None and self._options.slots > fitting:
                raise UsageError(
                    f"--slots: {self._options.slots} slots of {counted(ranks, 'rank')} need a GPU per rank, "
                    f"and this machine shows {self._num_gpus}; write --slots {fitting}, or omit it"
                )
        else:
            cores = len(usable_cpus())
            threads = int(dict(variables).get("OMP_NUM_THREADS", max(1, cores // ranks)))
            fitting = max(1, cores // (ranks * threads))
        return self._options.slots or fitting

    def submit(self, verified: VerifiedRun) -> None:
        """Submit jobs that replay the stretches; what they record is added by a later command."""
        verified["jobs"] = submit(self._run, self._options, [part.last for part in self._parts])

    def verify(self, verified: VerifiedRun) -> None:
        """Replay and compare the stretches. Raises KeyboardInterrupt after a stop signal."""
        began = time.monotonic()
        groups = self._slots()
        num_slots = verified["slots"] = max(map(len, groups), default=0)
        steps = sum(part.steps for part in self._parts)
        say(
            f"verify: replaying {counted(steps, 'step')} of {self._run.name}: "
            f"{counted(len(self._parts), 'stretch')} in {counted(num_slots, 'slot')}"
        )
        for slots in groups:
            with noted_signals() as signals, ThreadPoolExecutor(len(slots)) as pool:

                def poll(signals: Sequence[int] = signals) -> None:
                    if signals:
                        raise _StoppedError

                futures = [pool.submit(self._replay, slot, poll) for slot in slots]
            if signals:
                raise KeyboardInterrupt
            for future in futures:
                verified["stretches"] += future.result()
        verified["stretches"].sort(key=lambda stretch: stretch["first"])
        verified["seconds"] = round(time.monotonic() - began, 3)

    def _replay(self, slot: _Slot, poll: Any) -> list[VerifiedStretch]:
        """Replay the stretches of a slot, and compare them. Called in a thread of its own."""
        verified: list[VerifiedStretch] = []
        left = slot.parts
        while left:
            replayed = self._repeat(slot, left, poll)
            done = zip(left, replayed, strict=False)
            verified += [self._compared(slot, part, *of_part) for part, of_part in done]
            left = left[len(replayed) :]
            if left:  # the ranks failed in the first of these
                verified.append(self._compared(slot, left[0], {}, None))
                left = left[1:]
        return verified

    def _repeat(self, slot: _Slot, parts: Sequence[_Part], poll: Any) -> list[tuple[Lines, float]]:
        """Start ranks that repeat the stretches; return the lines and seconds of those they completed."""
        run = self._run
        inside = [range(part.begin + 1, part.last + 1) for part in parts]
        saved, recorded = (
            [step for step in steps if any(step in of_part for of_part in inside)]
            for steps in (run.checkpoints, run.parts)
        )
        is_close = any(part.tolerance for part in parts)
        request = {
            "begin": parts[0].begin,
            "first": parts[0].last + 1,
            "last": parts[0].last,
            "stretches": [(part.begin, part.last) for part in parts],
            "states": [*saved, *recorded],
            "distances": [step for step in saved if is_close and step not in run.damage],
        }
        variables = dict(parts[0].variables)
        ranks = parts[0].ranks
        if self._num_gpus:
            names = gpu_names(os.environ)[(slot.number - 1) * ranks : slot.number * ranks]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        experiment = parts[0].experiment
        folder = replay_folder(run.paths, experiment, self._snapshot, request)
        is_done = replay_on_ranks(folder, experiment, ranks, LocalLauncher(variables=variables), poll)
        replayed = replayed_stretches(folder, ranks)
        if is_done and not replayed:
            raise UsageError(
                f"{run.name}: the hpc-train of its snapshot has no verify --replay; --code new replays with "
                "this one"
            )
        if is_done:
            shutil.rmtree(folder.folder.parent)
        return replayed

    def _compared(self, slot: _Slot, part: _Part, lines: Lines, seconds: float | None) -> VerifiedStretch:
        run = self._run
        answer, difference, distance = None, None, None
        if lines and part.tolerance:
            answer, difference, distance = near(run.name, run.checkpoints, lines, part.begin, part.tolerance)
        elif lines:
            answer, difference = reproduction(run.name, run.checkpoints, lines, part.begin, run.parts)
        if answer is not None and difference is None and (newest := max(lines)) < part.last:
            difference = place(newest + 1, "record", run=run.name)  # NaN ended the replay, but not the run
        result = "close" if part.tolerance and distance else "identical"
        if answer is None:
            result = "failed"
        elif difference is not None:
            result = "differs"
            difference["nodes"] = [run.node(difference["step"], difference["rank"])]
        elif answer["is_reproducible"] is None:
            result = "unknown"
        head = lines[difference["step"]][0] if difference and difference["step"] in lines else {"step": 0}
        numbers = [step_digest(head, key) for key in ("recorded", "digest")]
        return VerifiedStretch(
            first=part.begin + 1,
            last=part.last,
            result=result,
            tolerance=part.tolerance,
            distance=distance if distance is not None and math.isfinite(distance) else None,
            reproduction=answer,
            first_difference=difference,
            numbers=[step_numbers(digest) for digest in numbers if digest is not None],
            node=run.node(part.last, None),
            host=socket.gethostname(),
            slot=slot.number,
            seconds=seconds,
        )


def verify_in_job(folder: str, part: str) -> ExitCode:
    """Replay a part as a job of ``--submit``, and record the result in the run's folder."""
    paths = RunPaths(Path(folder))
    check_run(paths)
    request = PartsRequest.read(paths)
    if request is None:
        raise UsageError(f"{folder}: has no request of `verify --submit`")
    of_request = {"devices": request.devices, "tolerance": request.tolerance, "code": request.code}
    options = VerifyOptions(runs=[folder], replays=True, **of_request)
    run = ReplayedRun(paths, run_name(paths), is_new(request.code))
    verified = _begun(paths, [])
    _Replays(run, options, (int(part), request.parts)).verify(verified)
    stretches, seconds = verified["stretches"], verified["seconds"] or 0.0
    request.note(paths, int(part), {"stretches": stretches, "seconds": seconds})
    put(*stretches_text(stretches, seconds, run.name))
    differs = any(stretch["result"] in FAILURES for stretch in stretches)
    return ExitCode.FAILED if differs else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: verify_in_job(*sys.argv[2:])))
