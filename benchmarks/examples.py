"""The figure of each example that trains to its end on two CPU cores, by the real command.

    python -m benchmarks.examples [NAME …] [--data data] [--quick]

Trains examples/NAME.yaml, by default all of ``EXAMPLES``, and keeps the last evaluation and the seconds of
the whole command. ``--data``: a folder with the data that an example names below data/; an example whose data
are not there is not measured. Writes benchmarks/results/examples.json, which examples/README.md cites.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.headlines import train
from benchmarks.measuring import ROOT, conditions, parser, report, table

#: Name → ranks, metrics of the last evaluation, and the data below ``--data``, None: included.
EXAMPLES: dict[str, tuple[int, tuple[str, ...], str | None]] = {
    "digits": (2, ("accuracy",), None),
    "digits-wandb": (2, ("accuracy",), None),
    "ema-syncbn-compile": (2, ("accuracy",), None),
    "graph-network": (2, ("accuracy",), None),
    "shakespeare": (2, ("loss", "accuracy"), "tinyshakespeare.txt"),
    "camvid-lraspp": (2, ("miou", "accuracy"), "camvid"),
}
QUICK = ("optimization.epochs=null", "optimization.steps=2", "optimization.schedule={name: constant}")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    made.add_argument("--data", type=Path, default=ROOT / "data")
    options = made.parse_args()
    for name in options.names or (["digits"] if options.quick else EXAMPLES):
        ranks, metrics, data = EXAMPLES[name]
        root = options.data.absolute() / (data or "")
        if data and not root.exists():
            print(f"{name}: not measured: {root} does not exist", file=sys.stderr)
            continue
        changes = ([f"data.root={root}"] if data else []) + list(QUICK if options.quick else ())
        row = measure(name, ranks, metrics, changes)
        title = f"examples/{name}.yaml, whole command"
        rows = {f"hpc-train, {ranks} rank{'s' * (ranks > 1)}": row}
        report("examples", options, conditions(), tables=[table(title, "", rows)])


def measure(name: str, ranks: int, metrics: tuple[str, ...], changes: list[str]) -> dict[str, float | None]:
    """Train the example; return the metrics of its last evaluation, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        rows, seconds = train(ROOT / "examples" / f"{name}.yaml", ranks, Path(folder), *changes)
    last = [row for row in rows if row["split"] == "val"][-1]
    return {metric: last[metric] for metric in metrics} | {"seconds": seconds}


if __name__ == "__main__":
    main()
