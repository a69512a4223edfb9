"""A real Slurm of some nodes on this machine, in a folder of its own: for tests, demos and benchmarks.

``python -m tests.slurm.cluster up FOLDER`` starts one and prints how to reach it, ``down FOLDER`` ends it.
Each cluster has its own munge, ports and files, so several run side by side. Needs root and Debian's
slurmctld, slurmd, slurm-client, munge; for accounting slurmdbd and mariadb-server (tests/slurm/install.sh).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.slurm import configuration, processes
from tests.slurm.configuration import NUM_PORTS, PARTITIONS, Settings
from tests.slurm.host import claimed_ports, clean_environment, program_path, succeeds, why_not
from tests.waiting import HANG_LIMIT_S, came_true

REPOSITORY = Path(__file__).parents[2]
#: io_uring takes locked memory, of which a few servers side by side have too little.
_AIO = "--innodb-use-native-aio=0"
_START_LIMIT_S = HANG_LIMIT_S
_COMMAND_LIMIT_S = HANG_LIMIT_S
_DEFAULTS = Settings()
#: A socket's path has at most 107 bytes.
_LONGEST_FOLDER = 107 - len("/mariadb.socket")


class Cluster:
    """Daemons and files of one cluster. A node's daemon is named ``slurmd-n1``, others as their program."""

    def __init__(self, folder: Path, settings: Settings = _DEFAULTS) -> None:
        self.folder = folder
        self.settings = settings
        self.conf = folder / "slurm.conf"
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: list[int] = []
        self._claim: socket.socket | None = None
        #: Whether slurmctld has, since the last ``clear``.
        self._has_restarted = False

    @property
    def environment(self) -> dict[str, str]:
        """What commands of Slurm need to find this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    @property
    def daemons(self) -> list[str]:
        """The names of Slurm's daemons in this cluster."""
        return [
            *(["slurmdbd"] if self.settings.accounting else []),
            "slurmctld",
            *(f"slurmd-{node}" for node in self.settings.nodes),
        ]

    def up(self) -> None:
        """Start all daemons; return once every node is idle. Raises RuntimeError with the logs' ends."""
        if len(os.fsencode(self.folder)) > _LONGEST_FOLDER:
            raise RuntimeError(
                f"{self.folder}: too long for a socket's path; name one of at most {_LONGEST_FOLDER} bytes"
            )
        try:
            self._claim, self._ports = claimed_ports()
            configuration.write(self.folder, self.settings, self._ports)
            self._start_munge()
            if self.settings.accounting:
                self._start_accounting()
            for name in self.daemons:
                if name != "slurmdbd":
                    self._launch(name)
            for name in self.daemons:
                self.wait(lambda name=name: self._answers(name), name)  # type: ignore[misc]
            self.wait(self._nodes_are_idle, f"{self.settings.num_nodes} idle nodes")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Kill all that this cluster started, jobs included, as a power cut does."""
        processes.kill_all(lambda: processes.daemons(self.folder) + processes.of_jobs(self.conf))
        for popen in self._started.values():
            popen.wait(_COMMAND_LIMIT_S)
        self._started.clear()
        if self._claim:
            self._claim.close()

    def start(self, name: str) -> None:
        """Start (again) a daemon of Slurm; return once it answers."""
        self._has_restarted |= name == "slurmctld"
        self._launch(name)
        self.wait(lambda: self._answers(name), name)

    def kill(self, name: str, by: signal.Signals = signal.SIGKILL) -> None:
        """End a daemon of Slurm. A slurmctld that is killed forgets what it was told in the last seconds."""
        pid = self._pid(name)
        if pid is None:
            raise RuntimeError(f"{name} does not run")
        os.kill(pid, by)
        if popen := self._started.pop(name, None):
            popen.wait(_COMMAND_LIMIT_S)
        self.wait(lambda: self._pid(name) is None, f"end of {name}")

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """A while in which a daemon of Slurm is stopped, as by an administrator: its port refuses."""
        self.kill(name, by=signal.SIGTERM)
        try:
            yield
        finally:
            self.start(name)

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """A while in which a daemon of Slurm accepts connections and never answers."""
        pid = self._pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill_node(self, node: str, with_jobs: bool = False) -> None:
        """Kill a node's slurmd and step daemons; ``with_jobs``, as a power cut does, its jobs' processes too.

        Without, batch scripts and ranks live on as orphans, as when a node hangs and comes back.
        """
        self.kill(f"slurmd-{node}")
        log = f"slurmd-{node}.log"
        processes.kill_all(lambda: processes.daemons(self.folder, log))
        if with_jobs:
            processes.kill_all(lambda: processes.of_jobs(self.conf, node))

    def start_node(self, node: str) -> None:
        """Start a node that was killed; its slurmd answers then, and tells the controller."""
        self.start(f"slurmd-{node}")

    def clear(self) -> None:
        """Cancel and kill all jobs, start daemons that were killed; return once all nodes are idle.

        After a restart of slurmctld, partitions are as at the start: it may have come back with a closed one.
        """
        for name in self.daemons:
            if pid := self._pid(name):
                os.kill(pid, signal.SIGCONT)
            else:
                self.start(name)
        self.wait(self._is_clear, "the end of all jobs")
        if self._has_restarted:
            self._reset_partitions()
        self.wait(self._is_usable, f"{self.settings.num_nodes} idle nodes")

    def run(
        self,
        *command: str,
        check: bool = True,
        user: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command on this cluster (as another user, with more variables); return its output."""
        as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}
        done = subprocess.run(
            command,
            env=clean_environment() | self.environment | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_LIMIT_S,
            **as_user,  # type: ignore[call-overload]
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}{done.stdout}")
        return str(done.stdout)

    def add_user(self, name: str) -> None:
        """Let a user of this machine submit: where accounting is enforced, unknown ones are refused."""
        if self.settings.accounting:
            self.run("sacctmgr", "-i", "add", "user", name, "account=test", check=False)
            shown = self.run("sacctmgr", "-n", "-P", "show", "assoc", f"user={name}", "format=account")
            assert "test" in shown.split(), f"no association of {name}: {shown}"

    def wait(self, is_so: Callable[[], bool], what: str, limit_s: float = _START_LIMIT_S) -> None:
        """Wait for a condition of the cluster. Raises RuntimeError with the logs' ends."""
        if not came_true(is_so, limit_s):
            raise RuntimeError(f"not within {limit_s:g} s: {what}\n{self._log_ends()}")

    def _start_munge(self) -> None:
        files = {what: str(self.folder / f"munge.{what}") for what in ("key", "socket", "pid", "log", "seed")}
        self._daemon("munged", "--foreground", "--force", *(f"--{what}-file={files[what]}" for what in
                     ("key", "pid", "log", "seed")), f"--socket={files['socket']}")  # fmt: skip
        self.wait(lambda: Path(files["socket"]).exists(), "munge's socket")

    def _start_accounting(self) -> None:
        data, sock = self.folder / "mariadb", self.folder / "mariadb.socket"
        # A mariadbd that starts removes all "#sql…" files of its tmpdir: in /tmp, those of other clusters.
        (temporary := self.folder / "mariadb.tmp").mkdir()
        tmpdir = f"--tmpdir={temporary}"
        self.run(
            program_path("mariadb-install-db"), "--no-defaults", "--user=root", f"--datadir={data}",
            "--auth-root-authentication-method=normal", "--skip-test-db", _AIO, tmpdir,
        )  # fmt: skip
        self._daemon(
            "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={sock}",
            "--skip-networking", _AIO, tmpdir, "--skip-grant-tables",
            "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self.wait(lambda: succeeds("mariadb-admin", "--no-defaults", f"--socket={sock}", "ping"), "MariaDB")
        self.start("slurmdbd")
        user = pwd.getpwuid(os.getuid()).pw_name
        for what in (
            ("cluster", "test"),
            ("account", "test"),
            ("user", user, "account=test", "defaultaccount=test"),
        ):
            self.run("sacctmgr", "-i", "add", *what, check=False)

    def _launch(self, name: str) -> None:
        """Start a daemon of Slurm."""
        if name == "slurmdbd":
            self._daemon(name, "-D", MYSQL_UNIX_PORT=str(self.folder / "mariadb.socket"))
        elif name == "slurmctld":
            self._daemon(name, "-D", "-f", str(self.conf), *self._recovery())
        else:
            program, _, node = name.partition("-")
            self._daemon(name, "-D", "-N", node, "-f", str(self.conf), program=program)

    def _recovery(self) -> list[str]:
        """Partitions stay as tests set them; without ``-i`` slurmctld 25 and later do not start if they were
        killed before they first saved the usage.
        """
        return ["-R"] if (self.folder / "state" / "assoc_usage").exists() else ["-R", "-i"]

    def _daemon(self, name: str, *arguments: str, program: str = "", **environment: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            popen = subprocess.Popen(
                [program_path(program or name), *arguments],
                env=clean_environment() | self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started[name] = popen
        (self.folder / "pids" / name).write_text(str(popen.pid))

    def _pid(self, name: str) -> int | None:
        """Return a living daemon's process."""
        with contextlib.suppress(FileNotFoundError):
            pid = int((self.folder / "pids" / name).read_text())
            if pid in processes.daemons(self.folder, f"{name}.out"):
                return pid
        return None

    def _answers(self, name: str) -> bool:
        if name == "slurmdbd":
            return succeeds("sacctmgr", "-n", "show", "cluster", **self.environment)
        if name == "slurmctld":
            return succeeds("scontrol", "ping", **self.environment)
        node = self.settings.nodes.index(name.removeprefix("slurmd-"))
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port(2 + node)), 1):
            return True
        return False

    def _port(self, number: int) -> int:
        if not self._ports:
            line = next(
                line for line in self.conf.read_text().splitlines() if line.startswith("SlurmctldPort=")
            )
            first = int(line.partition("=")[2])
            self._ports = list(range(first, first + NUM_PORTS))
        return self._ports[number]

    def _is_clear(self) -> bool:
        """Cancel what is there; tell whether nothing was. A job may just be requeueing itself."""
        jobs = self.run("squeue", "-h", "-o", "%F", check=False).split()
        if jobs:
            self.run("scancel", *set(jobs), check=False)
        # Killed at once, they need no KillWait; cancelled before, no requeue.
        processes.kill_all(lambda: processes.of_jobs(self.conf))
        return not jobs

    def _nodes_are_idle(self) -> bool:
        states = self._node_states()
        return len(states) == self.settings.num_nodes and set(states.values()) == {"idle"}

    def _is_usable(self) -> bool:
        """Resume nodes that a test has drained or downed; tell whether all are idle."""
        states = self._node_states()
        drained = [node for node, state in states.items() if state.startswith(("drain", "down", "fail"))]
        if drained:
            self.run("scontrol", "update", f"NodeName={','.join(drained)}", "State=RESUME", check=False)
        return self._nodes_are_idle()

    def _reset_partitions(self) -> None:
        for partition in PARTITIONS:
            grace = f"GraceTime={self.settings.grace_s if partition == 'low' else 0}"
            self.run("scontrol", "update", f"PartitionName={partition}", "State=UP", grace)
        self._has_restarted = False

    def _node_states(self) -> dict[str, str]:
        shown = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T", check=False)
        return dict(line.split() for line in shown.splitlines())

    def _log_ends(self) -> str:
        # Slurm's daemons write the same to both.
        outputs = [path for path in self.folder.glob("*.out") if not path.with_suffix(".log").exists()]
        logs = sorted([*self.folder.glob("*.log"), *outputs])
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@contextlib.contextmanager
def running(settings: Settings = _DEFAULTS) -> Iterator[Cluster]:
    """A cluster in a temporary folder; it ends with this process, even one that is killed."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-slurm-"))
    # Ordinary users may enter: they read slurm.conf and talk to munge.
    folder.chmod(0o755)
    guard = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.cluster", "guard", str(folder)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    cluster = Cluster(folder, settings)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        guard.communicate(timeout=_COMMAND_LIMIT_S)


def _up(folder: Path, settings: Settings) -> None:
    """Start a cluster anew in a folder that is empty or holds an earlier one's files."""
    if processes.daemons(folder):
        print(f"a cluster runs in {folder} already", file=sys.stderr)
    else:
        _remove(folder)
        try:
            Cluster(folder, settings).up()
        except RuntimeError as error:
            raise SystemExit(str(error)) from None
    print(f"export SLURM_CONF={folder / 'slurm.conf'}")


def _remove(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "munge.key").exists():
        raise SystemExit(f"{folder} holds something else than a cluster; name a new folder")
    shutil.rmtree(folder)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="A real Slurm of four nodes on this machine.")
    parser.add_argument("what", choices=["up", "down", "guard"], help="guard: down, once stdin ends")
    parser.add_argument("folder", type=lambda word: Path(word).resolve())
    parser.add_argument("--no-accounting", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.what == "up":
        if why := why_not(not arguments.no_accounting):
            raise SystemExit(f"can't start Slurm here: {why}")
        _up(arguments.folder, Settings(accounting=not arguments.no_accounting))
        return
    if arguments.what == "guard":
        sys.stdin.read()
    Cluster(arguments.folder).down()
    _remove(arguments.folder)


if __name__ == "__main__":
    main(sys.argv[1:])
