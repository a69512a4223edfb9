"""Runs in unusual environments resume bitwise equal, or are refused before the first step by name.

One table: variables, resource limits, mounts, locales, streams and refused system calls. Each run of ten
steps is killed with all its ranks and resumed in the same environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    LIMIT_S,
    assert_equal_to_the_bit,
    found_runs,
    hpc_train,
    kill_everything,
    only_run,
    rows,
    start,
    write_experiment,
)
from tests.quiet import QuietRuns
from tests.refused_calls import IS_POSSIBLE, prefix
from tests.waiting import came_true
from tests.warm import FRESH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_POSSIBLE, reason="system calls are refused by number, on Linux on x86-64"),
]

SHORT = ("optimization.schedule={name: constant}", "optimization.steps=10")
#: Stands in the table for the folder of the case, which holds the runs.
PLACE = "<place>"
CAN_MOUNT = (
    IS_POSSIBLE
    and os.geteuid() == 0
    and not subprocess.run(["unshare", "-m", "true"], check=False).returncode
)
#: A user without an entry in passwd, and not exempt from limits.
USER = "4242"


@dataclass(frozen=True)
class Case:
    """An environment, and the outcome of a run in it."""

    name: str
    #: None: unset.
    variables: Mapping[str, str | None] = field(default_factory=dict)
    #: Words before the command.
    before: tuple[str, ...] = ()
    #: A pattern of the message; empty if the run has to train.
    refusal: str = ""
    #: Whether it may train instead: the limit is near what libraries of other versions need.
    may_train: bool = False
    ranks: int = 1
    workers: int = 0
    #: Whether ``make test`` runs it too.
    is_sampled: bool = False
    #: Below the place: where the experiment and the runs are.
    folder: str = "."
    #: Options of the tmpfs on which the runs are; empty: the disk.
    tmpfs: str = ""

    def command(self) -> list[str]:
        """Return the words before the command, with those that unset variables."""
        unset = [f"-u{name}" for name, value in self.variables.items() if value is None]
        return [*self.before, *(["env", *unset] if unset else [])]

    def needs_root(self) -> bool:
        return bool(self.tmpfs) or not {"unshare", "setpriv"}.isdisjoint(self.before)


def shell(script: str) -> tuple[str, ...]:
    """Return a command that runs its arguments after ``script``."""
    return "bash", "-c", f'{script}\nexec "$@"', "bash"


def mounts(script: str) -> tuple[str, ...]:
    return "unshare", "-m", *shell(f"set -e; {script}")


def limit(*options: str) -> tuple[str, ...]:
    return "prlimit", *options


def refused(error: str, *calls: str) -> tuple[str, ...]:
    return tuple(prefix(calls, error))


def as_user(*command: str) -> tuple[str, ...]:
    """Return a command that runs another as ``USER``, who owns the place."""
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # closed folders above Python
    own = ("setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", *reads)
    return (*shell(f"chown -R {USER} {PLACE}"), *own, *command)


#: /dev with the usual devices and nothing else.
NO_SHM = f"""d={PLACE}/dev; mkdir -p $d; mount -t tmpfs dev $d
for n in null zero full random urandom; do touch $d/$n; mount --bind /dev/$n $d/$n; done
mount --move $d /dev"""
TORCHRUN = {
    "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_RANK": "3",
}  # fmt: skip
SALLOC = {
    "SLURM_JOB_ID": "77", "SLURM_JOBID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "2",
    "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "64", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n2", "SLURM_SRUN_COMM_HOST": "10.255.255.1", "SLURM_JOB_END_TIME": "1",
    "SLURM_STEP_ID": "0", "SLURM_MEM_PER_NODE": "1", "PMI_RANK": "2", "PMI_SIZE": "4",
}  # fmt: skip
PROXY = "http://127.0.0.1:9"

NON_ASCII = {"TMPDIR": f"{PLACE}/ä b 文"}
WARNINGS = {"PYTHONWARNINGS": "error"}
NAMELESS: dict[str, str | None] = {"USER": None, "LOGNAME": None, "HOME": None}
NO_AFFINITY = refused("EPERM", "sched_getaffinity")

CASES = [
    # Each of these is also a case of its own.
    Case(
        "several-at-once",
        NAMELESS | NON_ASCII | WARNINGS | TORCHRUN,
        as_user(*NO_AFFINITY),
        ranks=2,
        workers=1,
        is_sampled=True,
    ),
    # Variables.
    Case("tmpdir-missing", {"TMPDIR": f"{PLACE}/gone"}, workers=1),
    Case("tmpdir-too-long", {"TMPDIR": f"{PLACE}/{'x' * 110}"}, workers=1),
    Case("tmpdir-read-only", {"TMPDIR": "/proc"}, workers=1),
    Case("tmpdir-spaces-non-ascii", NON_ASCII, workers=1),
    Case("home-unset", {"HOME": None, "XDG_CACHE_HOME": None, "XDG_CONFIG_HOME": None}),
    Case("home-missing", {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"}),
    Case("home-read-only", {"HOME": "/proc", "XDG_CACHE_HOME": "/proc", "HPC_TRAIN_CACHE": "/proc/cache"}),
    Case("python-optimize", {"PYTHONOPTIMIZE": "2"}),
    Case("python-safe-path", {"PYTHONSAFEPATH": "1"}),
    Case("python-warnings-are-errors", WARNINGS),
    Case("python-hash-seed", {"PYTHONHASHSEED": "7"}, ranks=2),
    Case("python-no-bytecode", {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/proc/cache"}),
    Case("python-path-junk", {"PYTHONPATH": f"/nonexistent::{PLACE}/exp.yaml:/proc:relative"}),
    Case("python-dev-mode", {"PYTHONDEVMODE": "1", "PYTHONASYNCIODEBUG": "1"}, workers=1),
    Case("python-malloc", {"PYTHONMALLOC": "malloc_debug", "MALLOC_ARENA_MAX": "x", "MALLOC_PERTURB_": "9"}),
    Case("python-ascii-streams", {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"}, folder="läufe 文"),
    Case("python-import-times", {"PYTHONPROFILEIMPORTTIME": "1", "PYTHONFAULTHANDLER": "1"}),
    Case("omp-threads-are-no-number", {"OMP_NUM_THREADS": "many"}, ("taskset", "-c", "0")),
    Case("omp-threads-zero", {"OMP_NUM_THREADS": "0", "OMP_STACKSIZE": "x"}, ("taskset", "-c", "0")),
    Case("mkl", {"MKL_NUM_THREADS": "x", "MKL_THREADING_LAYER": "GNU", "MKL_DYNAMIC": "TRUE"}),
    Case("kmp-affinity", {"KMP_AFFINITY": "verbose,compact", "OMP_PROC_BIND": "spread", "OMP_PLACES": "x"}),
    Case("cuda-devices-of-another-node", {"CUDA_VISIBLE_DEVICES": "GPU-deadbeef,7"}),
    Case("cuda-devices-none", {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "NVIDIA_VISIBLE_DEVICES": "void"}),
    Case("nccl", {"NCCL_SOCKET_IFNAME": "ib77", "NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "x"}, ranks=2),
    Case(
        "gloo-interface",
        {"GLOO_SOCKET_IFNAME": "ib77"},
        refusal="GLOO_SOCKET_IFNAME=ib77",
        ranks=2,
        is_sampled=True,
    ),
    Case("torchrun-leftovers", TORCHRUN, ranks=2),
    Case("salloc-leftovers", SALLOC, ranks=2),
    Case(
        "torch-folders",
        {"TORCH_HOME": "/proc", "TORCHINDUCTOR_CACHE_DIR": "/proc/x"},
        refusal="TORCHINDUCTOR_CACHE_DIR",
    ),
    Case("torch-debug", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_SHOW_CPP_STACKTRACES": "1"}, ranks=2),
    Case("torch-debug-level", {"TORCH_DISTRIBUTED_DEBUG": "x"}, refusal="TORCH_DISTRIBUTED_DEBUG", ranks=2),
    Case("torch-logs", {"TORCH_LOGS": "no_such_log"}, refusal="TORCH_LOGS"),
    Case("torch-allocator", {"PYTORCH_CUDA_ALLOC_CONF": "x:y", "PYTORCH_ALLOC_CONF": "x:y"}),
    Case("proxies", dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY"), PROXY), ranks=2),
    Case("user-without-a-name", NAMELESS, as_user()),
    Case("path-minimal", {"PATH": "/nonexistent", "LD_LIBRARY_PATH": "/nonexistent"}),
    Case("time-zone", {"TZ": "Nowhere/Odd:99"}),
    Case("terminal-without-columns", {"COLUMNS": "0", "LINES": "0", "TERM": "no-such-terminal"}),
    Case("colors", {"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": None}),
    Case("preload-missing", {"LD_PRELOAD": "/nonexistent.so"}),
    # Resource limits.
    Case("files-64", {}, limit("--nofile=64:64"), "ulimit -n", may_train=True, workers=1, is_sampled=True),
    Case("files-72", {}, limit("--nofile=72:72"), workers=1),
    Case("files-64-two-ranks", {}, limit("--nofile=64:64"), ranks=2),
    Case("files-256", {}, limit("--nofile=256:256"), ranks=2, workers=2),
    Case("processes", {}, as_user(*limit("--nproc=3:3")), "ulimit -u", may_train=True, workers=1),
    Case("address-space-300-mb", {}, limit(f"--as={300 << 20}"), "ulimit -v", is_sampled=True),
    Case("address-space-1000-mb", {}, limit(f"--as={1000 << 20}"), "ulimit -v", may_train=True),
    Case("address-space-2000-mb", {}, limit(f"--as={2000 << 20}"), "ulimit -v", may_train=True, ranks=2),
    Case("address-space-3000-mb", {}, limit(f"--as={3000 << 20}"), "ulimit -v", may_train=True, ranks=2),
    Case("address-space-3500-mb", {}, limit(f"--as={3500 << 20}"), "ulimit -v", may_train=True),
    Case("file-size", {}, limit("--fsize=4096"), "ulimit -f"),
    Case("cpu-time", {}, limit("--cpu=2"), "ulimit -t|CPU time"),
    Case("stack-256-kb", {}, limit(f"--stack={256 << 10}")),
    Case("stack-unlimited", {}, limit("--stack=unlimited"), ranks=2),
    Case("no-core-no-locked-memory", {}, limit("--core=0", "--memlock=0:0", "--rss=1", "--sigpending=0")),
    Case("one-cpu", {}, ("taskset", "-c", "0", "nice", "-n", "19", "chrt", "-b", "0"), ranks=2, workers=1),
    # Mounts.
    Case("shm-missing", {}, mounts(NO_SHM), "/dev/shm", workers=1),
    Case("shm-missing-two-ranks", {}, mounts(NO_SHM), ranks=2),
    Case(
        "shm-read-only", {}, mounts("mount -t tmpfs -o ro x /dev/shm"), "/dev/shm", workers=1, is_sampled=True
    ),
    Case("shm-1-mb", {}, mounts("mount -t tmpfs -o size=1m x /dev/shm"), ranks=2, workers=1),
    Case("tmp-read-only", {}, mounts("mount --bind /tmp /tmp; mount -o remount,bind,ro /tmp"), workers=1),
    Case("code-read-only", {}, mounts("mount --bind . $PWD; mount -o remount,bind,ro $PWD")),
    Case("runs-on-50-mb", tmpfs="size=50m", ranks=2),
    Case("runs-on-200-kb", tmpfs="size=200k", refusal="disk is full"),
    Case("runs-noexec", tmpfs="noexec,nosuid,nodev", workers=1),
    Case("proc-missing", {}, mounts("umount -l /proc"), "/proc", is_sampled=True),
    Case("proc-hides-others", {}, (*mounts("mount -t proc -o hidepid=2 x /proc"), *as_user())),
    Case("sys-missing", {}, mounts("mount -t tmpfs x /sys"), ranks=2),
    # Locales.
    Case("locale-c", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, folder="läufe 文"),
    Case("locale-posix", {"LC_ALL": "POSIX", "LANG": None}, folder="läufe", workers=1),
    Case("locale-missing", {"LC_ALL": "en_US.ISO-8859-1", "LANG": "xx_YY", "LANGUAGE": "tlh"}),
    # Streams.
    Case("streams-closed", {}, shell("exec 0<&- 1>&-"), ranks=2),
    Case("stderr-full", {}, shell("exec 2>/dev/full")),
    Case("signals-ignored", {}, shell("trap '' PIPE CHLD HUP USR1 USR2"), ranks=2),
    # Refused system calls.
    Case("no-getaffinity", {}, NO_AFFINITY),
    Case("no-getaffinity-enosys", {}, refused("ENOSYS", "sched_getaffinity"), ranks=2, workers=1),
    Case("no-setsid", {}, refused("EPERM", "setsid"), ranks=2),
    Case("no-prlimit", {}, refused("EPERM", "prlimit64", "getrlimit", "setrlimit"), workers=1),
    Case("no-getrandom", {}, refused("ENOSYS", "getrandom")),
    Case("no-epoll", {}, refused("EPERM", "epoll_create1", "epoll_create"), "epoll_create1", ranks=2),
    Case("no-clone3", {}, refused("EPERM", "clone3"), "clone3", may_train=True, is_sampled=True),
    Case("clone3-enosys", {}, refused("ENOSYS", "clone3", "rseq", "faccessat2"), ranks=2, workers=1),
    Case("no-eventfd", {}, refused("EPERM", "eventfd2", "eventfd"), "eventfd2", ranks=2, workers=1),
    Case("no-madvise", {}, refused("EPERM", "madvise", "sysinfo", "prctl", "getcpu"), workers=1),
]
SAMPLED = [case for case in CASES if case.is_sampled or os.environ.get("HPC_TRAIN_ALL_PARALLEL")]


@pytest.fixture
def place(case: Case) -> Iterator[Path]:
    """A folder outside of /tmp and /dev/shm, over which cases mount something else."""
    if case.needs_root() and not CAN_MOUNT:
        pytest.skip("mounts and user ids need root")
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-", dir="/var/tmp"))
    folder.chmod(0o755)
    for name in ("ä b 文", "x" * 110, case.folder):
        (folder / name).mkdir(exist_ok=True)
    try:
        if case.tmpfs:
            (folder / "runs").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", case.tmpfs, "x", folder / "runs"], check=True)
        yield folder
    finally:
        if case.tmpfs:
            subprocess.run(["umount", "-l", folder / "runs"], check=True)
        shutil.rmtree(folder)


@pytest.mark.parametrize("case", SAMPLED, ids=[case.name for case in SAMPLED])
def test_a_run_resumes_bitwise_equal_or_is_refused_by_name(
    case: Case, place: Path, quiet_runs: QuietRuns
) -> None:
    home = place / case.folder
    before = [word.replace(PLACE, str(place)) for word in case.command()]
    values = {name: value.replace(PLACE, str(place)) for name, value in case.variables.items() if value}
    variables = {**values, "HPC_TRAIN_RUNS": str(home / "runs"), FRESH: "1"}
    overrides = (*SHORT, f"data.workers={case.workers}")
    with Hold(place, 5) as hold:
        local = ("--local", "--devices", str(case.ranks), hold.override)
        process = start(
            "submit", write_experiment(home), *overrides, *local, cwd=None, before=before, **variables
        )
        assert came_true(lambda: hold.is_reached() or process.poll() is not None, LIMIT_S), "hangs"
        if is_refused := process.poll() is not None:
            assert case.refusal, f"exit code {process.returncode}: {process.communicate()[1]}"
        else:
            kill_everything(process, only_run(home))
        out, err = process.communicate(timeout=LIMIT_S)
    # Loader processes of a killed rank may report that it is gone.
    _assert_no_traceback(out, err, *(_logs(home) if is_refused else []))
    if is_refused:
        assert process.returncode > 0
        assert re.search(case.refusal, err), err
        assert not any(rows(paths) for paths in found_runs(home)), "refused before the first step"
        return
    assert case.may_train or not case.refusal, "it trains"
    paths = only_run(home)
    done = hpc_train("resume", paths.folder, cwd=None, before=before, **variables)
    assert done.code == 0, done.err
    _assert_no_traceback(done.out, done.err, *_logs(home, attempt=2))
    assert_equal_to_the_bit(quiet_runs.of(*overrides, ranks=case.ranks), paths)


def _logs(home: Path, attempt: int = 1) -> list[str]:
    return [path.read_text(errors="replace") for path in home.rglob(f"attempts/{attempt}/rank-*.log")]


def _assert_no_traceback(*texts: str) -> None:
    for text in texts:
        assert "Traceback (most recent call last)" not in text, text
