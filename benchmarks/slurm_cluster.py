"""The test cluster (tests/slurm/cluster.py) of the benchmarks that submit jobs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measuring import cannot_run
from tests.slurm.cluster import Cluster, running
from tests.slurm.configuration import Settings
from tests.slurm.host import why_not


@contextmanager
def started(settings: Settings, **environment: str) -> Iterator[tuple[Cluster, Path, str]]:
    """Yield the cluster, a folder for runs, and Slurm's version.

    ``os.environ`` receives the cluster's variables and ``environment``. Ends the benchmark if no cluster can
    be started here.
    """
    if reason := why_not(accounting=settings.accounting):
        cannot_run(f"there is no test cluster: {reason}")
    with tempfile.TemporaryDirectory() as name, running(settings) as cluster:
        folder = Path(name)
        folder.chmod(0o755)
        os.environ.update(cluster.environment | environment)
        # Each attempt would compile hpc-train's modules again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        yield cluster, folder, cluster.run("sinfo", "--version").strip()
