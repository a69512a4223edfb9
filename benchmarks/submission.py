"""The time of ``submit`` and ``status`` of many runs, beside bare scripts and submitit's ``map_array``.

    python -m benchmarks.submission [--rounds 7] [--runs 1 100 1000 10000]

Starts the test cluster (tests/slurm/cluster.py; root, Debian's Slurm). All jobs are held, and cancelled after
each measurement. Every arm is a process of its own from its start to its end:

- ours: the whole command, ``hpc-train submit`` of a sweep of that many runs, and ``hpc-train status``;
- the bare script (benchmarks/bare_submission.py): writes the same files with the same fsyncs and calls sbatch
  once; or calls squeue once and reads the runs' files;
- ``map_array`` of submitit, which keeps pickles only.

Rounds are interleaved over arms and, for submit, over numbers of runs: its growth is a ratio within a round.
10000 runs have three rounds of their own, which repeat ours of the number before. How each cost grows is
fitted to its medians from 100 runs on. CPU time is that of the arm and the commands that it calls, without
Slurm's daemons. Writes benchmarks/results/submission.json. All four numbers take about ten minutes on two
cores, without 10000 about two minutes.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import slurm_cluster
from benchmarks.measuring import (
    ROOT,
    comparison,
    conditions,
    growth,
    interleaved,
    parser,
    report,
    rounds_of,
)
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Settings

BARE, OURS, MAP_ARRAY = "bare script", "hpc-train", "submitit map_array"
SIZES = (1, 100, 1000, 10_000)
QUICK_SIZES = (1, 10)
#: From here on a size has rounds of its own, and fewer of them.
LARGE, LARGE_ROUNDS = 10_000, 3
#: The smallest size at which the start of Python and sbatch is not most of each cost.
FITTED_FROM = 100
#: Cancelled jobs are counted too for a while.
SETTINGS = Settings(accounting=False, min_job_age_s=2, max_array_size=10_001, max_job_count=200_000)

EXPERIMENT = """\
name: sweep
task: classification
model: {{name: "timm/resnet18"}}
data: {{name: digits}}
optimization:
  steps: 100
  global_batch_size: 64
  micro_batch_size: 64
  optimizer: {{name: sgd, lr: 0.01}}
slurm: {{partition: low, nodes: 1, time_limit: 60min, extra: {{hold: true}}}}
sweep: {{grid: {{seed: {seeds}}}}}
"""
MAP_ARRAY_SCRIPT = """\
import sys
from submitit import SlurmExecutor
executor = SlurmExecutor(sys.argv[1])
executor.update_parameters(
    partition="low", nodes=1, time=60, wckey=None, array_parallelism=10**9,
    additional_parameters={"hold": True},
)
executor.map_array(abs, range(int(sys.argv[2])))
"""


class Bench:
    """A folder with all that the arms write, on a cluster that runs."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder, self._cluster = folder, cluster
        self._numbers = itertools.count()
        #: The CPU seconds of each arm and number of runs, by round.
        self.cpu_s: dict[str, list[float]] = {}

    def submit_arms(self, size: int) -> dict[str, Callable[[], float]]:
        """Return the arms that submit this many runs. Submits one run, which the bare script copies."""
        template = self._submitted(1)
        arms = {
            BARE: functools.partial(self._bare_submit, template, size),
            OURS: functools.partial(self._submit, size),
            MAP_ARRAY: functools.partial(self._map_array, size),
        }
        return {_key("submit", arm, size): arms[arm] for arm in arms if arm != MAP_ARRAY or size > 1}

    def status_arms(self, size: int) -> dict[str, Callable[[], float]]:
        """Return the arms that show this many runs, which are submitted first."""
        runs = self._submitted(size).parent
        script = str(ROOT / "benchmarks" / "bare_submission.py")
        bare = [sys.executable, script, "status", str(runs)]
        ours = [sys.executable, "-m", "hpc_train", "status"]
        commands = {_key("status", BARE, size): bare, _key("status", OURS, size): ours}
        return {
            key: functools.partial(self._measured, key, command, runs.parent)
            for key, command in commands.items()
        }

    def cancel(self) -> None:
        """Cancel all jobs."""
        self._cluster.run("scancel", f"--user={os.getuid()}")

    def _submitted(self, size: int) -> Path:
        """Submit runs with hpc-train; return the folder of one of them."""
        runs = self._new_folder()
        self._run(self._submit_command(size), runs)
        return next(path for path in (runs / "sweep").iterdir() if path.name[0] != ".")

    def _submit(self, size: int) -> float:
        with self._disposable() as runs:
            return self._measured(_key("submit", OURS, size), self._submit_command(size), runs)

    def _bare_submit(self, template: Path, size: int) -> float:
        script = str(ROOT / "benchmarks" / "bare_submission.py")
        with self._disposable() as runs:
            command = [sys.executable, script, "submit", str(template), str(runs / "sweep"), str(size)]
            return self._measured(_key("submit", BARE, size), command, runs)

    def _map_array(self, size: int) -> float:
        with self._disposable() as runs:
            command = [sys.executable, "-c", MAP_ARRAY_SCRIPT, str(runs), str(size)]
            return self._measured(_key("submit", MAP_ARRAY, size), command, runs)

    def _submit_command(self, size: int) -> list[str]:
        file = self._folder / "work" / f"sweep{size}.yaml"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(EXPERIMENT.format(seeds=list(range(size))), encoding="utf-8")
        return [sys.executable, "-m", "hpc_train", "submit", str(file)]

    def _new_folder(self) -> Path:
        folder = self._folder / f"runs{next(self._numbers)}"
        folder.mkdir()
        return folder

    @contextmanager
    def _disposable(self) -> Iterator[Path]:
        """A runs folder that is removed afterwards, with the jobs submitted meanwhile cancelled."""
        runs, before = self._new_folder(), self._jobs()
        try:
            yield runs
        finally:
            if made := self._jobs() - before:
                self._cluster.run("scancel", *made)
            shutil.rmtree(runs)

    def _jobs(self) -> set[str]:
        return set(self._cluster.run("squeue", "--noheader", "--format=%F").split())

    def _measured(self, key: str, command: Sequence[str], runs: Path) -> float:
        for answer in (self._folder / "cache").glob("slurm-*.json"):  # each asks Slurm by itself
            answer.unlink()
        seconds, cpu_s = self._run(command, runs)
        self.cpu_s.setdefault(key, []).append(cpu_s)
        return seconds

    def _run(self, command: Sequence[str], runs: Path) -> tuple[float, float]:
        """Return the seconds and CPU seconds of a command. Raises RuntimeError with its output's end."""
        paths = {"PYTHONPATH": str(ROOT), "HPC_TRAIN_RUNS": str(runs)}
        environment = os.environ | paths | {"HPC_TRAIN_CACHE": str(self._folder / "cache")}
        with tempfile.TemporaryFile() as output:
            start = time.perf_counter()
            process = subprocess.Popen(
                command, env=environment, cwd=self._folder / "work", stdout=output, stderr=subprocess.STDOUT
            )
            _, code, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(code)
            if process.returncode != 0:
                output.seek(0)
                raise RuntimeError(f"{command}: {output.read()[-2000:].decode(errors='replace')}")
        return seconds, usage.ru_utime + usage.ru_stime


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, nargs="+", default=SIZES)
    arguments = made.parse_args()
    sizes = QUICK_SIZES if arguments.quick else sorted(set(arguments.runs))
    rounds = rounds_of(arguments)
    with slurm_cluster.started(SETTINGS) as (cluster, folder, slurm):
        (folder / "work").mkdir()
        comparisons, tables = _measure(Bench(folder, cluster), sizes, rounds)
    measured_with = conditions(("submitit",)) | {"slurm": slurm, "jobs": "held", "disk": _disk()}
    report("submission", arguments, measured_with, comparisons, tables)


def _measure(
    bench: Bench, sizes: Sequence[int], rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the comparisons and the tables of the results file."""
    values, grown = _submits(bench, sizes, rounds)
    for size in sizes:  # with no other jobs in the queue
        values |= interleaved(bench.status_arms(size), _rounds_of(size, rounds))
        bench.cancel()
    found = []
    for command, size in itertools.product(("submit", "status"), sizes):
        title = f"{command} of {_runs(size)}"
        most = _rounds_of(size, rounds)  # CPU times have those that were repeated, too
        seconds, cpu_s = (_of(each, command, size, most) for each in (values, bench.cpu_s))
        found.append(comparison(title, "seconds", seconds, BARE))
        found.append(comparison(f"{title}, CPU time", "CPU seconds", cpu_s, BARE))
    for (small, large), pair in grown.items():
        title = f"submit of {large:,} runs beside {small:,}, hpc-train"
        found.append(comparison(title, "seconds", pair, _runs(small)))
    if sum(size >= FITTED_FROM for size in sizes) < 2:
        return found, []
    costs = {**_costs(values, sizes, ""), **_costs(bench.cpu_s, sizes, ", CPU time")}
    remark = f"Medians of the rounds above; the exponent is fitted from {FITTED_FROM} runs on"
    title = "Growth with the number of runs"
    return found, [growth(title, "seconds", costs, "runs", since=FITTED_FROM, remark=remark)]


def _submits(
    bench: Bench, sizes: Sequence[int], rounds: int
) -> tuple[dict[str, list[float]], dict[tuple[int, int], dict[str, list[float]]]]:
    """Return the values of each arm, and by two neighbouring sizes ours within the same rounds."""
    usual = [size for size in sizes if size < LARGE]
    arms: dict[str, Callable[[], float]] = {}
    for size in usual:
        arms |= bench.submit_arms(size)
    values = interleaved(arms, rounds)
    grown = {pair: _ours(values, pair) for pair in itertools.pairwise(usual)}
    for large in (size for size in sizes if size >= LARGE):
        repeated = {key: arms[key] for key in (_key("submit", OURS, small) for small in usual[-1:])}
        of_large = interleaved(repeated | bench.submit_arms(large), LARGE_ROUNDS)
        grown |= {(small, large): _ours(of_large, (small, large)) for small in usual[-1:]}
        values |= {key: found for key, found in of_large.items() if key not in repeated}
    bench.cancel()
    return values, grown


def _rounds_of(size: int, rounds: int) -> int:
    return LARGE_ROUNDS if size >= LARGE else rounds


def _runs(size: int) -> str:
    return f"{size:,} {'run' if size == 1 else 'runs'}"


def _ours(values: Mapping[str, list[float]], sizes: Sequence[int]) -> dict[str, list[float]]:
    return {_runs(size): values[_key("submit", OURS, size)] for size in sizes}


def _costs(
    values: Mapping[str, list[float]], sizes: Sequence[int], suffix: str
) -> dict[str, dict[int, float]]:
    """Return the median of each arm by size; a row's name begins with the arm's."""
    costs: dict[str, dict[int, float]] = {}
    for command, arm, size in itertools.product(("submit", "status"), (OURS, BARE, MAP_ARRAY), sizes):
        if found := values.get(_key(command, arm, size)):
            costs.setdefault(f"{arm}: {command}{suffix}", {})[size] = statistics.median(found)
    return costs


def _of(values: dict[str, list[float]], command: str, size: int, rounds: int) -> dict[str, list[float]]:
    keys = {arm: _key(command, arm, size) for arm in (BARE, OURS, MAP_ARRAY)}
    return {arm: values[key][:rounds] for arm, key in keys.items() if key in values}


def _key(command: str, arm: str, size: int) -> str:
    return f"{command} {arm} {size}"


def _disk() -> str:
    """Return the type of the file system that the runs were written to."""
    said = subprocess.run(
        ["stat", "--file-system", "--format=%T", tempfile.gettempdir()],
        check=True,
        capture_output=True,
        text=True,
    )
    return said.stdout.strip()


if __name__ == "__main__":
    main()
