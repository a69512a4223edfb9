"""The options of commands that repeat steps of a run: ``replay``, ``bisect``, ``verify``, ``bundle``,
``reproduce``. See ``command_options``.
"""

from pathlib import Path
from typing import Any

from hpc_train.cli import completion
from hpc_train.cli.command_line import Options, command
from hpc_train.cli.command_options import CodeOptions, OnOneRun, OnRuns, argument, flag, option


def _replay_ranks() -> Any:
    text = "Ranks on this machine. Default: as many as the run had, if there are enough devices."
    return option(None, text, min=1)


@command("replay")
class ReplayOptions(OnOneRun):
    """Repeat steps of a run and show their batches, losses and gradients.

    From the newest checkpoint before them, on this machine. The run is not changed.
    """

    step: int = option(..., "The first step to show, as in the metrics.", min=1)
    to: int | None = option(None, "The last step to show. Default: the first.", min=1)
    changes: list[str] = option(
        list, "Replay again with this key changed, and compare.", "--set", metavar="KEY=VALUE"
    )
    activations: bool = flag("Also show the range of each module's outputs.")
    save_batch: Path | None = option(
        None, "Write the micro-batches of the first step to FILE.safetensors.", metavar="FILE"
    )
    save_samples: Path | None = option(
        None, "Write the samples of the first step to a new FOLDER, as PNG or text.", metavar="FOLDER"
    )
    profile: Path | None = option(
        None, "Write torch.profiler's trace of the shown steps to FILE.json.gz.", metavar="FILE"
    )
    debugger: bool = flag("Stop in pdb at the beginning of each shown step, on one rank.")
    devices: int | None = _replay_ranks()


@command("bisect")
class BisectOptions(OnRuns, CodeOptions):
    """Find the first step, module and tensor at which two runs differ, or a run and its replay.

    By their digests and checkpoints, and by replays on this machine. The runs are not changed.
    """

    first: int = option(1, "The first step to compare.", "--from", min=1)
    last: int | None = option(None, "The last step to compare. Default: all.", "--to", min=1)
    pythons: list[Path] = option(
        list,
        "Interpreter of the environment in which to replay a run; once per run, in their order.",
        "--python",
        metavar="PATH",
    )
    devices: int | None = _replay_ranks()


@command("verify")
class VerifyOptions(OnRuns, CodeOptions):
    """Check by hashes which checkpoints would load; with --replay, repeat the steps between them.

    The runs are not changed; jobs of --submit add their results to the folder.
    """

    replays: bool = flag("Repeat the steps between checkpoints on this machine, and compare.", "--replay")
    slots: int | None = option(None, "Stretches to repeat at a time. Default: by cores or GPUs.", min=1)
    submits: bool = flag(
        "Repeat them in --slots jobs of an array; `verify RUN` shows the results.", "--submit"
    )
    part: str | None = option(None, "Repeat part K of N of the stretches: for job arrays.", metavar="K/N")
    tolerance: float | None = option(
        None, "Relative difference that passes. Default: 0 (bitwise) or, if it can't be, 0.05.", min=0
    )
    devices: int | None = _replay_ranks()


@command("bundle")
class BundleOptions(Options):
    """Pack a run into one file, with which others can reproduce it.

    Experiment, code, package versions, digests, metrics, checkpoints, small data; no secrets and no paths.
    """

    run: str = argument(..., "One run.", "RUN", autocompletion=completion.runs)
    output: Path = option(
        ..., "File to write: .tar.zst, .tar.xz, .tar.gz or .tar.", "-o", "--output", metavar="FILE"
    )
    max_data: int = option(
        64, "Include data and weights up to this size in all; 0: none.", min=0, metavar="MB"
    )
    all_checkpoints: bool = flag("Include all checkpoints. Default: the newest and the best.")
    keep_paths: bool = flag("Also pack code that contains paths of this machine.")
    as_json: bool = flag("Print JSON to stdout.", "--json")


@command("reproduce")
class ReproduceOptions(Options):
    """Verify a bundle: check its files and what differs here, then repeat the run and compare bitwise."""

    file: Path = argument(..., "A file that `hpc-train bundle` wrote.", "FILE")
    trust: bool = flag("Run the code in FILE, with your permissions. Without it FILE is only checked.")
    data: Path | None = option(None, "The data (data.root), if FILE does not contain them.", metavar="PATH")
    places: list[str] = option(
        list,
        "Place of another file that the experiment names (may be repeated).",
        "--set",
        metavar="KEY=PATH",
    )
    output: Path | None = option(
        None, "Extract to DIR and keep it. Default: a temporary folder.", "-o", "--output", metavar="DIR"
    )
    first: int = option(
        1, "Begin at the newest checkpoint in FILE before this step.", "--from", min=1, metavar="STEP"
    )
    last: int | None = option(None, "The last step. Default: that of the last checkpoint.", "--to", min=1)
    devices: int | None = _replay_ranks()
    tolerance: float = option(
        0.05, "Relative difference of the loss to accept if something differs here.", min=0.0
    )
    as_json: bool = flag("Print JSON to stdout.", "--json")
