"""Open files and sockets of a rank by the number of ranks, and what ``distributed.rank_limits`` demands.

    python -m benchmarks.open_files [--ranks 4 8 16] [--quick]

CPU ranks on one machine join as in training, then make the DeviceMesh of ``fsdp``; each counts its own
/proc/self/fd. The count per peer is the slope between the smallest and the largest number of ranks. Writes
benchmarks/results/open_files.json. ``--quick``: two and three ranks.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measuring import conditions, parser, report, table
from hpc_train.experiment.topology.degrees import AXES
from hpc_train.rank.env import RankFacts
from hpc_train.training.distributed import rank_limits
from hpc_train.training.distributed.process_group import join

FILES, SLOPE = "Open files of a rank", "Open files per peer"
OTHERS = ("rank 0", "another rank")


def _count() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # the listing's own  # noqa: PTH208


def _rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    facts = RankFacts(rank, ranks, rank, ranks, 0, 1)
    counts = [_count()]
    group = join(facts, torch.device("cpu"), folder / "rendezvous.json", "token")
    group.wait_to_leave()
    counts.append(_count())
    mesh = init_device_mesh("cpu", (1, 1, ranks, 1), mesh_dim_names=AXES)
    assert mesh.size() == ranks
    group.wait_to_leave()
    counts.append(_count())
    (folder / f"{rank}.json").write_text(json.dumps(counts))
    group.wait_to_leave()
    group.leave()


def measure(ranks: int) -> dict[str, dict[str, int]]:
    """Return rank 0's and the largest other rank's counts, less what was open before they joined."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.spawn(_rank, (ranks, folder), nprocs=ranks)
        counts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    added = [{"ddp": ddp - before, "fsdp": fsdp - before} for before, ddp, fsdp in counts]
    others = {key: max(each[key] for each in added[1:]) for key in ("ddp", "fsdp")}
    demanded = rank_limits.needed_files(RankFacts(0, ranks, 0, ranks), (1, 1, ranks, 1), loaders=0)
    return {"rank 0": added[0], "another rank": others, "limit demanded of rank 0": {"fsdp": demanded}}


def results(found: Mapping[int, Mapping[str, Mapping[str, int]]]) -> list[dict[str, Any]]:
    """Return the tables of the results file. ``found``: what ``measure`` returns, by number of ranks."""
    rows: dict[str, dict[str, float | None]] = {
        f"{who} of {ranks}": dict(files) for ranks, by in found.items() for who, files in by.items()
    }
    smallest, largest = min(found), max(found)
    slopes: dict[str, dict[str, float | None]] = {
        who: {
            key: (found[largest][who][key] - files) / (largest - smallest)
            for key, files in found[smallest][who].items()
        }
        for who in OTHERS
    }
    return [
        table(FILES, "files", rows, remark="Counted once"),
        table(SLOPE, "files", slopes, remark="Counted once"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    arguments = options.parse_args()
    sizes = [2, 3] if arguments.quick else sorted(arguments.ranks)
    report("open_files", arguments, conditions(), tables=results({ranks: measure(ranks) for ranks in sizes}))


if __name__ == "__main__":
    main()
