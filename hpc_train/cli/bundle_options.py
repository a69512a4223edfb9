"""The options of ``bundle`` and ``reproduce``; see ``command_options``."""

from pathlib import Path

from hpc_train.cli import completion
from hpc_train.cli.command_line import Options, command
from hpc_train.cli.command_options import argument, flag, option


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
    devices: int | None = option(
        None, "Ranks on this machine. Default: as many as the run had, if there are enough devices.", min=1
    )
    tolerance: float = option(
        0.05, "Relative difference of the loss to accept if something differs here.", min=0.0
    )
    as_json: bool = flag("Print JSON to stdout.", "--json")
