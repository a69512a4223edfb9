"""Open files and sockets of a rank by the number of ranks, beside what ``distributed.open_files`` demands.

    python -m benchmarks.open_files [--ranks 4 8 16]

CPU ranks on one machine join as in training, then make the DeviceMesh of ``fsdp``; each counts its own
/proc/self/fd. The count per peer is the slope between the smallest and the largest number of ranks. Writes
benchmarks/results/open_files.json and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from hpc_train.distributed import open_files
from hpc_train.distributed.env import RankFacts
from hpc_train.distributed.process_group import join
from hpc_train.topology.degrees import AXES

RESULTS = Path(__file__).parent / "results" / "open_files.json"


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
    demanded = open_files.needed(RankFacts(0, ranks, 0, ranks), (1, 1, ranks, 1), loaders=0)
    return {"rank 0": added[0], "another rank": others, "demanded of rank 0": {"fsdp": demanded}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    sizes = sorted(parser.parse_args().ranks)
    found = {ranks: measure(ranks) for ranks in sizes}
    least, most = sizes[0], sizes[-1]
    slopes = {
        who: {
            key: (found[most][who][key] - found[least][who][key]) / (most - least) for key in ("ddp", "fsdp")
        }
        for who in ("rank 0", "another rank")
    }
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "files by ranks": found,
        "files per peer": slopes,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
