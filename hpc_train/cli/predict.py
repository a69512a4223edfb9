"""``predict``: writes a checkpoint's predictions for images or for the validation data to a file."""

from __future__ import annotations

import heapq
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from hpc_train.cli.command_options import PredictOptions
from hpc_train.cli.evaluate import run_ranks
from hpc_train.console import JSON_VERSION, csv_line, put, put_json, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.data_facts.by_name import task_facts
from hpc_train.paths import expanded
from hpc_train.run.attempts import newest_number
from hpc_train.run.bad_samples import BadSample, all_known
from hpc_train.run.files import read_json, replacing
from hpc_train.run.find import refuse_target

_FORMATS = (".jsonl", ".csv")
#: Number of skipped samples that are named.
_SHOWN = 5


class Predictions(TypedDict):
    """The file that was written."""

    version: int
    #: The run's.
    id: str
    file: str
    #: ``jsonl`` or ``csv``.
    format: str
    bytes: int
    step: int
    #: One per sample.
    predictions: int
    #: Samples without a prediction, since they can't be read (``data.on_bad_sample: skip``).
    skipped: int


def predict(options: PredictOptions) -> ExitCode:
    """Write a line per sample to ``--output``, in the order of the samples.

    Raises UsageError if the file exists without ``--force``, or has a suffix other than .jsonl or .csv, or if
    the run's task can't predict, or not in this format.
    """
    output = options.output
    _refuse_output(output, force=options.force)
    images = None if options.data is None else str(expanded(options.data).absolute())
    if images is not None and not Path(images).exists():
        raise UsageError(f"--data: there is no file or folder {options.data}")
    request = {"predict": {"images": images, "ema": options.ema}}
    code, run_of_ranks = run_ranks("predict", options, request, partial(_refuse_task, suffix=output.suffix))
    if code != ExitCode.DONE:
        return code
    with replacing(output.absolute()) as file:
        count = write_rows(file, partial(_merged_rows, run_of_ranks.prediction_files()), output.suffix)
    evaluated = read_json(run_of_ranks.evaluated_checkpoint) or {}
    skipped = sorted(all_known(run_of_ranks).values(), key=lambda sample: sample.index)
    notices = read_json(run_of_ranks.attempt(newest_number(run_of_ranks)).notices) or {}
    shutil.rmtree(run_of_ranks.folder.parent)
    for line in notices.get("lines", []):
        say(f"predict: {line}")
    say_skipped(skipped)
    if options.as_json:
        put_json(
            Predictions(
                version=JSON_VERSION,
                id=Path(evaluated["run"]).name,
                file=str(output),
                format=output.suffix[1:],
                bytes=output.stat().st_size,
                step=evaluated["step"],
                predictions=count,
                skipped=len(skipped),
            )
        )
    else:
        skipped_words = f", {len(skipped)} sample{'s' * (len(skipped) > 1)} skipped" if skipped else ""
        put(f"{output}  {count} predictions{skipped_words}")
    return ExitCode.DONE


def _refuse_output(output: Path, *, force: bool) -> None:
    if output.suffix not in _FORMATS:
        raise UsageError(f"-o: {output} must end in .jsonl or .csv, which chooses the format")
    refuse_target(output)
    if output.exists() and not force:
        raise UsageError(f"-o: {output} exists; add --force to replace it, or give another name")


def _refuse_task(experiment: Experiment, suffix: str) -> None:
    formats = task_facts(experiment.task).prediction_formats
    if formats == ():
        able = ", ".join(name for name, facts in TASKS.items() if facts.prediction_formats)
        raise UsageError(
            f"task: {experiment.task} can't predict; {able} and your own tasks with a method predictions can "
            "(docs/plugins.md)"
        )
    if formats is not None and suffix not in formats:
        raise UsageError(
            f"-o: predictions of {experiment.task} can't be written as {suffix}; name a {formats[0]} file"
        )


def say_skipped(samples: Sequence[BadSample]) -> None:
    """Report the samples that ``data.on_bad_sample: skip`` has skipped, the first ones by name."""
    for sample in samples[:_SHOWN]:
        say(f"predict: skipped, since it can't be read: {sample.name}: {sample.why}")
    if len(samples) > _SHOWN:
        say(f"predict: … and {len(samples) - _SHOWN} more; the file has no line for them")


def _merged_rows(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the ranks' files in the order of the samples."""
    with ExitStack() as stack:
        rows = (map(json.loads, stack.enter_context(file.open())) for file in files)
        yield from heapq.merge(*rows, key=lambda row: row["index"])


def write_rows(file: BinaryIO, read: Callable[[], Iterable[dict[str, Any]]], suffix: str) -> int:
    """Write the rows that each call of ``read`` returns as UTF-8, and return their number.

    A byte of a name that is not UTF-8 is written as ``\\udcff`` in both formats, as JSON escapes it.
    """
    if suffix == ".csv":
        lines = _csv_lines(read)
    else:
        lines = (json.dumps(_finite(row), allow_nan=False) + "\n" for row in read())
    return sum(1 for line in lines if file.write(line.encode(errors="backslashreplace")))


def _finite(value: Any) -> Any:
    """Return a JSON value with null in place of infinite numbers and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv_lines(read: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[str]:
    """Yield a line per row, the first with a header of the columns that any row has."""
    columns = dict.fromkeys(name for row in read() for name in _cells(row))
    for number, cells in enumerate(map(_cells, read())):
        header = csv_line(columns) if number == 0 else ""
        yield header + csv_line(cells.get(name) for name in columns)


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return column → value: one column per value of a list, one for all labels; nested lists are omitted."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        if not isinstance(value, list | dict):
            cells[key] = value
        elif key == "labels":
            cells[key] = ";".join(map(str, value))
        else:
            cells |= _parts("probability" if key == "probabilities" else key, value)
    return cells


def _parts(name: str, values: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """Return a cell per value, named by its position or key; empty if any value is nested itself."""
    parts = values if isinstance(values, dict) else dict(enumerate(values))
    if any(isinstance(part, list | dict) for part in parts.values()):
        return {}
    return {f"{name}_{key}": part for key, part in parts.items()}
