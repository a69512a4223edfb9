"""``export`` and ``verify``: the checkpoints of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.cli.children import child_report, run_child
from hpc_train.cli.evaluate import Checkpoint
from hpc_train.cli.logs import listed_runs
from hpc_train.cli.unreadable import find_readable
from hpc_train.console import JSON_VERSION, put, put_json, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run import checkpoints
from hpc_train.run.find import run_name

#: Suffixes of formats that torch itself writes.
_PROGRAMS = (".onnx", ".pt2")


def export(
    word: str,
    output: Path,
    *,
    checkpoint: Checkpoint,
    ema: bool = False,
    as_json: bool = False,
) -> int:
    """Write the weights of one run's newest valid checkpoint as a safetensors file.

    A child process, which imports torch, does the work. ``checkpoint``: another checkpoint; ``ema``: use the
    EMA weights.
    """
    if output.suffix in _PROGRAMS:
        raise UsageError(
            f"-o {output}: export writes weights; write {output.with_suffix('.safetensors')}, or pass the "
            "module of hpc_train.load_model to torch.onnx.export or torch.export.export (docs/deploying.md)"
        )
    if output.suffix not in ("", ".safetensors"):
        say(f"-o {output}: written as safetensors")
    checkpoint.refuse_both()
    paths = _one_run(word)
    options = [*(["--ema"] if ema else []), *(["--best"] if checkpoint.best else [])]
    options += [] if checkpoint.step is None else ["--step", str(checkpoint.step)]
    request = ("hpc_train.checkpoint.export", str(paths.folder), str(output), *options)
    if not as_json:
        return run_child(*request)
    exit_code, report = child_report(*request)
    if exit_code == ExitCode.DONE:
        head = {"version": JSON_VERSION, "id": paths.folder.name, "file": str(output)}
        size = output.stat().st_size
        put_json(head | {"bytes": size, "step": report["step"], "ema": ema, "tensors": report["tensors"]})
    return exit_code


def _one_run(word: str) -> RunPaths:
    matches = find_readable([word])
    if len(matches) > 1:
        raise UsageError(
            f"{word}: matches {len(matches)} runs, export takes one; write its id:\n{listed_runs(matches)}"
        )
    return matches[0]


@dataclass(frozen=True)
class _Verdict:
    """The result of ``verify`` for one checkpoint."""

    checkpoint: CheckpointPaths
    problems: list[str]
    #: An attempt that owned the run saved it.
    counts: bool
    #: A resume would load it.
    loads: bool

    def to_json(self) -> dict[str, Any]:
        verdict = {"problems": self.problems, "counts": self.counts, "loads": self.loads}
        return {"step": self.checkpoint.step, "path": str(self.checkpoint.folder), **verdict}


def verify(names_or_ids: Sequence[str], *, as_json: bool = False) -> ExitCode:
    """Check every checkpoint; FAILED if a valid one is damaged."""
    by_run: dict[RunPaths, list[_Verdict]] = {}
    for paths in find_readable(names_or_ids):
        by_run[paths] = list(_verdicts(paths, shows=not as_json))
    if as_json:
        put_json({"version": JSON_VERSION, "runs": [_run_json(paths, by_run[paths]) for paths in by_run]})
    is_damaged = any(one.counts and one.problems for verdicts in by_run.values() for one in verdicts)
    return ExitCode.FAILED if is_damaged else ExitCode.DONE


def _run_json(paths: RunPaths, verdicts: Sequence[_Verdict]) -> dict[str, Any]:
    listed = [verdict.to_json() for verdict in verdicts]
    name, path = paths.siblings.folder.name, str(paths.folder.absolute())
    return {"id": paths.folder.name, "name": name, "path": path, "checkpoints": listed}


def _verdicts(paths: RunPaths, *, shows: bool) -> Iterator[_Verdict]:
    """Yield the verdicts on a run's checkpoints, newest first; ``shows``: print each once it is known."""
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
        verdict = _Verdict(checkpoint, problems, counts, checkpoint == would_load)
        if shows:
            _put_verdict(paths, verdict)
        yield verdict
    if would_load is None:
        say(f"{run_name(paths)}: nothing would load; start again with `hpc-train submit FILE --new`")


def _put_verdict(paths: RunPaths, verdict: _Verdict) -> None:
    text = "damaged" if verdict.problems else "whole"
    if not verdict.counts:
        text += ", does not count: its attempt no longer owned the run"
    elif verdict.loads:
        text += ", would load"
    put(f"{run_name(paths)}  {verdict.checkpoint.folder.name}  {text}")
    for problem in verdict.problems:
        say(f"  {problem}")
