"""``bisect``: the first step, and the first tensor in it, at which two runs differ, or a run and its replay.

The runs' digests and checkpoints limit the steps in question. Then both runs are replayed from a checkpoint
that they have in common, by ranks that compute digests of all tensors: twice two replays at most from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict, cast

from hpc_train.cli.code import is_new
from hpc_train.cli.compare_diff import Difference, count_text, difference, difference_text, pair_lines
from hpc_train.cli.many_runs import find_readable
from hpc_train.cli.replay import number_of_ranks, report_begin, run_stretch, stretch_of
from hpc_train.cli.replay_options import BisectOptions
from hpc_train.cli.replayed_run import ReplayedRun, TrainedSteps, thread_variables
from hpc_train.console import put, put_json, say
from hpc_train.errors import ExitCode, HpcTrainError, UsageError, counted
from hpc_train.experiment.config.schema import as_training
from hpc_train.experiment.plan.input_files import other_inputs
from hpc_train.report import parted_steps
from hpc_train.report.parted_steps import Lines, Place, first_step, place, place_text, step_numbers
from hpc_train.report.replayed_steps import StepNumbers
from hpc_train.report.reproduction import Reproduction, reproduction, reproduction_text
from hpc_train.run.checkpoints import Manifest
from hpc_train.run.code.snapshot import linked
from hpc_train.run.digests import MAX_STEP, read_digests
from hpc_train.run.find import run_names
from hpc_train.run.run_status import read_status
from hpc_train.run.trust import check_run

#: So few steps are replayed from the start, if the runs have no checkpoint in common.
_FEW_STEPS = 16
#: If the first difference is in one of so few steps, a replay traces all of them.
_FEW_TRACED = 6


class Bisection(TypedDict):
    """The first difference of two runs, or of a run and its replay."""

    #: The ids of the runs, and their paths.
    ids: list[str]
    paths: list[str]
    #: As in ``compare --diff``; null for one run.
    difference: Difference | None
    #: ``ranks``, ``nodes``, ``device``, ``processor``, ``threads`` (by rank) → the runs' values that differ.
    machine: dict[str, list[Any]]
    #: Keys of the file whose data or weights differ, by their fingerprints.
    inputs: list[str]
    #: The number of steps whose digests were compared, up to the first difference.
    compared: int
    #: The first step whose digests differ; null: none.
    first_difference: int | None
    #: ``samples``, ``loss``, ``grad_norm``.
    differs: list[str]
    #: The digests of this step by run; empty without one.
    numbers: list[StepNumbers]
    #: The checkpoints of the same step: the last one that is bitwise identical before the first that is not.
    equal_checkpoint: int | None
    other_checkpoint: int | None
    #: The same of the digests of parts, if the runs have the same ranks.
    equal_parts: int | None
    other_parts: int | None
    #: The number of replays.
    replays: int
    #: Each run against its own replay; empty if nothing differs. Of one run: by the ranks that trained it,
    #: one replay after the other, up to the first difference.
    reproduction: list[Reproduction]
    #: Null: the runs are equal.
    place: Place | None


def bisect(options: BisectOptions) -> ExitCode:
    """Print the first difference; exit code 0 if there is none, else 1.

    Writes nothing into the runs' folders. Raises UsageError unless the words name one or two runs, and if
    they have nothing to compare.
    """
    folders = find_readable(options.runs)
    if len(folders) not in (1, 2):
        raise UsageError(f"bisect: compares two runs, or one with its replay; these are {len(folders):,}")
    if options.last is not None and options.last < options.first:
        raise UsageError(f"--to: {options.last} is before --from {options.first}; write a later step")
    for paths in folders:
        check_run(paths)
    pythons = _pythons(options.pythons, len(folders))
    names = run_names(folders)
    runs = [
        ReplayedRun(paths, names[paths], is_new(options.code), python)
        for paths, python in zip(folders, pythons, strict=True)
    ]
    for run in runs:
        if run.files.experiment is not None:
            as_training(run.files.experiment)
    search = _Search(runs, options)
    search.begin()
    if not options.as_json:
        put(*search.records_text())
    search.run()
    if options.as_json:
        put_json(search.answer)
    else:
        answer = search.answer
        put(
            *map(reproduction_text, answer["reproduction"]),
            *(place_text(answer["place"], search.names) if answer["place"] else ["no difference"]),
        )
    return ExitCode.DONE if search.answer["place"] is None else ExitCode.FAILED


def _pythons(paths: Sequence[Path], num_runs: int) -> Sequence[Path | None]:
    """Return the interpreter of each run's replays; None: this one. Raises UsageError."""
    if paths and len(paths) != num_runs:
        raise UsageError(
            f"--python: is given {counted(len(paths), 'time')}, and there {'is' if num_runs == 1 else 'are'} "
            f"{counted(num_runs, 'run')}; give it once per run, in their order"
        )
    for path in paths:
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise UsageError(f"--python: {path} is not a program; write a path such as venv/bin/python")
    return [path.absolute() for path in paths] or [None] * num_runs


@dataclass
class _Search:
    """The search for the first difference; ``answer`` has its results."""

    runs: Sequence[ReplayedRun]
    options: BisectOptions
    answer: Bisection = field(init=False)

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.runs]

    def begin(self) -> None:
        """Compare everything that the runs recorded."""
        runs = self.runs
        machines = [run.machine() for run in runs]
        inputs = [run.files.facts.get("inputs") or {} for run in runs]
        facts = {
            "ids": [run.paths.folder.name for run in runs],
            "paths": [str(run.paths.folder) for run in runs],
            "difference": difference([run.paths for run in runs]) if len(runs) == 2 else None,
            "machine": {
                key: [machine[key] for machine in machines]
                for key in machines[0]
                if any(one[key] != other[key] for one, other in pairwise(machines))
            },
            "inputs": [key for one, other in pairwise(inputs) for key in other_inputs(one, other)],
        }
        empty = {"compared": 0, "replays": 0, "differs": [], "numbers": [], "reproduction": []}
        self.answer = cast("Bisection", dict.fromkeys(Bisection.__annotations__) | facts | empty)
        if len(runs) == 2:
            self._compare_digests()
            self._compare_checkpoints()
            self._compare_parts()

    def _compare_digests(self) -> None:
        steps = self.options.first, self.options.last or MAX_STEP
        for one, other in parted_steps.common_steps(
            *(read_digests(run.paths.digests, *steps) for run in self.runs)
        ):
            if differs := one.differences(other):
                self.answer["first_difference"], self.answer["differs"] = one.step, differs
                self.answer["numbers"] = [step_numbers(one), step_numbers(other)]
                return
            self.answer["compared"] += 1

    def _compare_checkpoints(self) -> None:
        """Find the first checkpoint that differs, and the last equal one before any difference."""
        first, second = (run.checkpoints for run in self.runs)
        common = [step for step in first if step in second and step <= (self.options.last or MAX_STEP)]
        is_equal = {step: self._has_equal_checkpoint(step) for step in common}
        end = self.answer["first_difference"] or MAX_STEP
        others = [step for step in common if is_equal[step] is False and step <= end]
        equal = [step for step in common if is_equal[step] and step < min([end, *others])]
        self.answer["other_checkpoint"] = min(others, default=None)
        self.answer["equal_checkpoint"] = max(equal, default=None)

    def _has_equal_checkpoint(self, step: int) -> bool | None:
        """Compare the checkpoints of a step by their hashes; None if other ranks saved them."""
        first, second = (Manifest.read(run.checkpoints[step]) for run in self.runs)
        if first.world_size != second.world_size:
            return None
        one, other = (
            {name: entry for name, entry in saved.files.items() if name.endswith(".safetensors")}
            for saved in (first, second)
        )
        return one == other and not any(step in run.damage for run in self.runs)

    def _compare_parts(self) -> None:
        one, other = (run.parts for run in self.runs)
        if not (one and other and self.runs[0].experiment.parallel == self.runs[1].experiment.parallel):
            return
        for step in sorted(one.keys() & other.keys()):
            pairs = [
                {
                    part: (digest.weights, digest.optimizer, digest.ranks)
                    for part, digest in parts[step].items()
                }
                for parts in (one, other)
            ]
            if step > (self.options.last or MAX_STEP):
                return
            if pairs[0] != pairs[1]:
                self.answer["other_parts"] = step
                return
            self.answer["equal_parts"] = step

    def records_text(self) -> list[str]:
        """Return the lines about everything that the runs recorded."""
        answer = self.answer
        lines = [
            f"checkpoint {step} of {run.name} is damaged: {problems}"
            for run in self.runs
            for step, problems in run.damage.items()
        ]
        if answer["difference"] is None:
            return lines
        lines += [f"{sign} {name}" for sign, name in zip(("---", "+++"), self.names, strict=True)]
        lines += difference_text(answer["difference"])
        lines += [f"machine: {count_text(len(answer['machine']), 'fact')}", *pair_lines(answer["machine"])]
        lines += [f"data: other files: {', '.join(answer['inputs'])}"] * bool(answer["inputs"])
        if answer["first_difference"] is not None:
            same = "" if "samples" in answer["differs"] else "; the samples are the same"
            lines.append(
                f"digests: step {answer['first_difference']} is the first of {answer['compared'] + 1:,} that "
                f"differs: {parted_steps.labels(answer['differs'])}{same}"
            )
            pairs = [dict(numbers) for numbers in answer["numbers"]]
            lines += pair_lines({key: [pair[key] for pair in pairs] for key in answer["differs"]})
        elif answer["compared"]:
            lines.append(f"digests: bitwise identical in {answer['compared']:,} steps")
        else:
            lines.append("digests: none of the same step (checkpoint.digests: steps records them)")
        checkpoints = [
            f"{step} {'is' if is_equal else 'is not'} bitwise identical"
            for step, is_equal in ((answer["equal_checkpoint"], True), (answer["other_checkpoint"], False))
            if step is not None
        ]
        lines.append(f"checkpoints: {', '.join(checkpoints) or 'none of the same step'}")
        parts = [
            f"{'bitwise identical' if is_equal else 'not identical'} after step {step}"
            for step, is_equal in ((answer["equal_parts"], True), (answer["other_parts"], False))
            if step is not None
        ]
        return [*lines, *[f"parts: {', '.join(parts)}"] * bool(parts)]

    def run(self) -> None:
        """Replay the steps in question, and compare."""
        first_place = self._place_of_one() if len(self.runs) == 1 else self._place_of_two()
        if first_place is not None:
            first_place["nodes"] = [run.node(first_place["step"], first_place["rank"]) for run in self.runs]
        self.answer["place"] = first_place

    def _place_of_one(self) -> Place | None:
        (run,) = self.runs
        intact = [step for step in run.checkpoints if step not in run.damage and step >= run.begin]
        begin = run.newest_before(self.options.first) if self.options.first > 1 else min(intact, default=0)
        last = self.options.last or max([read_status(run.paths).step, *run.checkpoints])
        if begin >= last:  # the only checkpoint is that of the last step
            begin = 0
        has_digests = next(read_digests(run.paths.digests, begin + 1, last), None) is not None
        if not has_digests and not any(begin < step <= last for step in run.checkpoints):
            raise UsageError(
                f"{run.name}: a replay can't be compared, because the run has neither digests nor "
                f"checkpoints of the steps {begin + 1} to {last}; checkpoint.digests: steps records them"
            )
        for part in run.trained(begin, last):
            if (place_in_part := self._place_in_part(run, part)) is not None:
                return place_in_part
        return None

    def _place_in_part(self, run: ReplayedRun, part: TrainedSteps) -> Place | None:
        """Replay the steps of a part on its own ranks, from the first checkpoint that is left of it."""
        intact = run.checkpoints.keys() - run.damage.keys()
        begin = min((step for step in {0, *intact} if part.begin <= step < part.last), default=None)
        if begin != part.begin:
            end = part.last if begin is None else begin
            say(
                f"{run.name}: steps {part.begin + 1} to {end} can't be compared on the ranks that trained "
                f"them, because checkpoint {part.begin}, from which they continued, is gone or damaged"
            )
        if begin is None:
            return None
        lines = self._replay(run, [replace(part, begin=begin)])
        return self._compare_with_run(run, lines, begin)

    def _place_of_two(self) -> Place | None:
        answer = self.answer
        differing = answer["first_difference"], answer["other_checkpoint"], answer["other_parts"]
        ends = [step for step in differing if step is not None]
        if not ends:
            if not answer["compared"] and (answer["equal_checkpoint"], answer["equal_parts"]) == (None, None):
                raise UsageError(
                    f"bisect: {' and '.join(self.names)} can't be compared, because they have neither "
                    "digests nor checkpoints of the same step; checkpoint.digests: steps records them"
                )
            return None
        last = min(ends)
        for begins in self._begins(last):
            trained = [run.trained(begin, last) for run, begin in zip(self.runs, begins, strict=True)]
            first, second = replays = list(map(self._replay, self.runs, trained))
            layout = _has_same_layout(trained, replays)
            step = first_step(first, second, has_same_layout=layout)
            if step is None or step > max(begins) or max(begins) in (0, answer["equal_checkpoint"]):
                break  # otherwise they differ before the steps that were replayed
        # A replay of steps that other ranks trained, one after the other, can't be bitwise identical.
        compared = [
            lines if len(parts) == 1 else {begin: lines[begin]}
            for lines, parts, begin in zip(replays, trained, begins, strict=True)
        ]
        found = map(self._compare_with_run, self.runs, compared, begins)
        places = [found_place for found_place in found if found_place is not None]
        if step is None:
            return min(places, key=lambda found_place: found_place["step"], default=place(last, "record"))
        step = max(step, max(begins) + 1)
        if step not in self._traced(max(begins), last):
            trained = [run.trained(begin, step) for run, begin in zip(self.runs, begins, strict=True)]
            first, second = replays = list(map(self._replay, self.runs, trained))
            layout = _has_same_layout(trained, replays)
        return parted_steps.parted_at(step, first, second, has_same_layout=layout) or place(step, "record")

    def _begins(self, last: int) -> Iterator[list[int]]:
        """Yield the checkpoints to replay from, by run, until the replays are equal there."""
        equal = self.answer["equal_checkpoint"]
        if equal is not None and equal < last:
            yield [equal, equal]
            return
        newest = [run.newest_before(last) for run in self.runs]
        if last > _FEW_STEPS and any(newest):
            yield newest
        yield [0, 0]

    def _replay(self, run: ReplayedRun, trained: Sequence[TrainedSteps]) -> Lines:
        """Repeat the steps on the ranks that trained the last of them.

        Return their lines, those of the step from which they continue first.
        Raises HpcTrainError if the ranks fail, UsageError if the run's hpc-train computes no digests.
        """
        begin, last, experiment = trained[0].begin, trained[-1].last, trained[-1].experiment
        traced = self._traced(begin, last)
        stretch = stretch_of(run, trained, traced.start)
        num_ranks = self.options.devices or number_of_ranks(experiment, stretch)
        report_begin(stretch, num_ranks)
        states = [begin, *(step for step in (*run.checkpoints, *run.parts) if begin < step <= last)]
        digests = {"trace": [traced.start, last], "states": states}
        snapshot = None if run.uses_new_code else linked(run.paths)
        lines = run_stretch(
            stretch,
            experiment,
            snapshot,
            num_ranks,
            digests=digests,
            variables=thread_variables(run.machine(begin)),
            python=run.python,
        )
        self.answer["replays"] += 1
        if lines is None:
            raise HpcTrainError(f"{run.name}: the replay failed, so the first difference is not known")
        if "state" not in lines[0][0]:
            raise UsageError(
                f"{run.name}: the hpc-train of its snapshot has no bisect; --code new replays with this one"
            )
        return {of_ranks[0]["step"]: of_ranks for of_ranks in zip(*lines, strict=False)}

    def _traced(self, begin: int, last: int) -> range:
        """Return the steps of a replay whose values all get a digest: a difference often shows a step later.

        All steps in question, if these are few: those after the last state that both runs have in common.
        """
        equal = [self.answer["equal_checkpoint"] or 0, self.answer["equal_parts"] or 0]
        after = max((step for step in equal if begin <= step < last), default=last)
        first = after + 1 if last - after <= _FEW_TRACED else last
        return range(max(begin + 1, min(first, last - 1)), last + 1)

    def _compare_with_run(self, run: ReplayedRun, lines: Lines, begin: int) -> Place | None:
        """Compare the run with its replay; return their first difference."""
        compared, first_place = reproduction(run.name, run.checkpoints, lines, begin, run.parts)
        self.answer["reproduction"].append(compared)
        return first_place


def _has_same_layout(trained: Sequence[Sequence[TrainedSteps]], replays: Sequence[Lines]) -> bool:
    """Return True if the same ranks of both replays have the same parts of tensors."""
    one, other = (parts[-1].experiment.parallel for parts in trained)
    num_ranks = {len(next(iter(lines.values()))) for lines in replays}
    return len(num_ranks) == 1 and one == other
