"""A forked process is like one that started as usual."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpc_train.launchers.rank_processes import _die_with
from tests import warm, warm_imports
from tests.waiting import HANG_LIMIT_S, came_true

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]

FACTS = [sys.executable, "-m", "tests.start_facts", "one", "two words"]
REPOSITORY = str(Path(__file__).parents[1])


class _Forked(warm._WarmPopen):
    """As in a launcher, for any module."""

    def _is_warm(self, command: Any) -> bool:
        return True


@pytest.fixture
def forked() -> type[_Forked]:
    return _Forked


def facts(start: type[subprocess.Popen[Any]], folder: Path, **variables: str) -> Any:
    """Start a process as a rank is started; return what it knows of that."""
    log = folder / "log"
    with log.open("wb") as output:
        process = start(
            FACTS,
            env=os.environ | {"PYTHONPATH": REPOSITORY} | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
            cwd=folder,
        )
    assert process.wait(HANG_LIMIT_S) == 7, log.read_text()
    return json.loads(log.read_text())


@pytest.mark.parametrize(
    "variables",
    [{"PYTHONUNBUFFERED": ""}, {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "3"}],
)
def test_a_forked_rank_is_like_a_fresh_one(
    variables: dict[str, str], forked: type[_Forked], tmp_path: Path
) -> None:
    fresh, found = facts(subprocess.Popen, tmp_path, **variables), facts(forked, tmp_path, **variables)
    assert not fresh.pop("has torch")
    assert found.pop("has torch")
    assert found == fresh


@pytest.mark.parametrize("changed", [None, "errors.py", "training/loop.py"])
def test_a_forked_rank_imports_the_package_that_a_fresh_one_does(
    changed: str | None, forked: type[_Forked], tmp_path: Path
) -> None:
    """From a snapshot, equal to the repository or not."""
    snapshot = tmp_path / "snapshot"
    shutil.copytree(warm_imports._OURS, snapshot / "hpc_train", ignore=shutil.ignore_patterns("__pycache__"))
    if changed:
        with (snapshot / "hpc_train" / changed).open("a") as file:
            file.write("\nPLANTED = 3\n")
    path = os.pathsep.join((str(snapshot), REPOSITORY))
    fresh, found = (
        facts(start, tmp_path, PYTHONPATH=path)["package"] for start in (subprocess.Popen, forked)
    )
    assert found == fresh
    assert found["planted"] == (3 if changed == "errors.py" else None)
    assert json.dumps(found).count(REPOSITORY) == 0, found


def test_each_module_that_is_forked_can_be_imported_first() -> None:
    """In a fork nearly all modules are imported already, in another order, which hides circular imports."""
    script = """if True:
        import importlib, os, sys, torch
        for name in sys.argv[1:]:
            if os.fork() == 0:
                importlib.import_module(name)
                os._exit(0)
            assert os.wait()[1] == 0, name
    """
    modules = ["hpc_train.cli.app", warm._PARALLEL_RUNS, *sorted(warm._WARM)]
    subprocess.run([sys.executable, "-c", script, *modules], check=True)


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "OMP_PROC_BIND", "TORCH_LOGS", warm.FRESH])
def test_a_rank_whose_environment_changes_its_start_is_fresh(
    variable: str, forked: type[_Forked], tmp_path: Path
) -> None:
    assert not facts(forked, tmp_path, **{variable: ""})["has torch"]


def test_a_signal_ends_a_forked_rank_as_it_would_a_fresh_one(forked: type[_Forked]) -> None:
    with forked([sys.executable, "-m", "tests.start_facts", "wait"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        assert process.wait(HANG_LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    "end",
    ["pass", "sys.exit(3)", "sys.exit('words')", "1 / 0", "raise KeyboardInterrupt", "print('kept', end='')"],
)
def test_a_forked_script_ends_as_a_fresh_one(end: str) -> None:
    script = f"import atexit, sys; atexit.register(print, sys.argv[1])\n{end}"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    found = []
    fresh = subprocess.Popen([sys.executable, "-c", script, "at exit"], **pipes)
    for process in (fresh, warm.start_script(script, "at exit", **pipes)):
        output, errors = process.communicate(timeout=HANG_LIMIT_S)
        found.append((process.returncode, output, errors.splitlines()[-1:]))
    assert found[0] == found[1]


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ or warm.FRESH in os.environ, reason="no worker was forked"
)
def test_a_worker_is_forked_and_has_a_fork_server_of_its_own() -> None:
    assert gc.get_freeze_count()
    assert psutil.Process(warm._server().pid).ppid() == os.getpid()
    assert warm._OWN_SERVER not in os.environ


def task(*words: str, output: Any, **variables: str) -> subprocess.Popen[Any]:
    """Start Python as srun does where tests/warm_site has it ask for a warm rank."""
    return subprocess.Popen(
        warm.forking_task([*FACTS[:1], "-u", *FACTS[1:3], *words]),
        env=os.environ | warm.for_jobs() | {"PYTHONPATH": REPOSITORY} | variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_a_rank_that_a_task_orders_is_like_a_fresh_one(tmp_path: Path) -> None:
    found = {}
    job = {"PYTHONUTF8": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)}
    for name, more in (("fresh", {warm.FRESH: "1"}), ("warm", {})):
        with (tmp_path / name).open("wb") as output:
            code = task("one", output=output, **job, **more).wait(HANG_LIMIT_S)
        assert code == 7, (tmp_path / name).read_text()
        found[name] = json.loads((tmp_path / name).read_text())
        assert found[name].pop("has torch") == (name == "warm")
        for varying in ("parent", "streams", "proc environ", "died with", "blocked"):
            found[name].pop(varying)
        for own in (warm.FRESH, warm.DOOR):
            found[name]["environ"].pop(own, None)
    assert found["warm"] == found["fresh"]


def test_a_task_passes_signals_on_and_ends_as_its_rank() -> None:
    with task("wait", output=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["has torch"]
        process.send_signal(signal.SIGUSR1)
        assert process.wait(HANG_LIMIT_S) == -signal.SIGUSR1


def test_a_task_that_is_killed_takes_its_rank_with_it() -> None:
    with task("wait", output=subprocess.PIPE) as process:
        assert process.stdout is not None
        supervisor = json.loads(process.stdout.readline())["parent"]
        (rank,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        process.kill()
        assert came_true(lambda: not Path(f"/proc/{rank}").exists(), HANG_LIMIT_S)


_TEN_THREADS = """if True:
    import json, subprocess, sys, threading
    from concurrent.futures import ThreadPoolExecutor
    from tests import warm

    together = threading.Barrier(10)

    def run(number):
        together.wait()
        script = "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[1]))"
        process = warm.start_script(script, str(number), stdout=subprocess.PIPE, text=True)
        return int(process.communicate()[0] or 0), process.returncode

    with ThreadPoolExecutor(10) as pool:
        print(json.dumps([list(pool.map(run, range(1, 11))) for _ in range(3)]))
    warm.close()
"""


def test_ten_threads_get_ten_commands_each_with_an_exit_code_of_its_own() -> None:
    """Also at the first call, in which one of them starts the fork server."""
    script = [sys.executable, "-c", _TEN_THREADS]
    environment = os.environ | {"PYTHONPATH": REPOSITORY}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == 3 * [[[number, number] for number in range(1, 11)]]


def test_pytests_workers_are_forked(pytestconfig: pytest.Config) -> None:
    """One that ends as it starts is replaced by a usual one without a word, and imports torch itself."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ and warm.FRESH not in os.environ
    if not is_worker or pytestconfig.getoption("cov_source", None):
        pytest.skip("no worker that could have been forked")
    assert warm.is_forked(os.getpid())


_INTERRUPTED = """if True:
    import os, signal, subprocess
    from tests import warm

    def run():
        process = warm.start_script("import sys; sys.exit(7)")
        return process.wait()

    run()
    signal.signal(signal.SIGALRM, lambda number, frame: 1 / 0)
    os.kill(warm.server_pid(), signal.SIGSTOP)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        run()
    except ZeroDivisionError:
        os.kill(warm.server_pid(), signal.SIGCONT)
        print([run(), run()], end="")
    warm.close()
"""


def test_an_order_that_is_interrupted_leaves_the_next_ones_their_own_answers() -> None:
    script = [sys.executable, "-c", _INTERRUPTED]
    environment = os.environ | {"PYTHONPATH": REPOSITORY}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[7, 7]", done.stderr


@pytest.mark.parametrize("ask", [lambda process: process.wait(HANG_LIMIT_S), lambda process: process.poll()])
def test_a_lost_exit_status_is_an_error(ask: Any) -> None:
    process = warm.start_script("pass")
    os.waitpid(process.pid, 0)
    with pytest.raises(ChildProcessError):
        ask(process)
    process.returncode = 0
