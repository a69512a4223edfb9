"""Local ranks from their start to the end, however they end. Real processes, without torch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.errors import ExitCode, StorageError, UsageError, UserError
from hpc_train.launchers import local
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.local import choose_num_ranks
from hpc_train.launchers.outcome import log_tail
from hpc_train.run import resource_limits
from hpc_train.run.code.snapshot import link
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests import aborts, fake_cuda
from tests.launchers.fake_ranks import attempt_of, launch, new_request, record_of
from tests.run.code.trees import take, work_tree
from tests.waiting import HANG_LIMIT_S

#: Rank 0 loses its peer, once it has been told to end.
ELSE_LOSE_PEER = """
flag = signals.install()
wait_for(lambda: flag)
sys.exit(76)
"""
CRASH = (
    """
if rank == 1:
    fail("Traceback (most recent call last):\\n  File \\"x.py\\", line 1\\nValueError: a\\nsecond line\\n")
"""
    + ELSE_LOSE_PEER
)


@pytest.fixture
def pair(tmp_path: Path) -> LaunchRequest:
    """A request for two ranks."""
    return new_request(tmp_path)


@pytest.fixture
def single(tmp_path: Path) -> LaunchRequest:
    """A request for one rank."""
    return new_request(tmp_path, devices=1)


def test_ranks_that_finish_are_done(tmp_path: Path) -> None:
    request = new_request(tmp_path, devices=3)
    record_path = str(attempt_of(request).record)
    script = f"""
import json, time
print('rank', rank); sys.stderr.write('words')
while len(json.load(open({record_path!r}))['rank_processes']) < 3:  # one that is gone by then is left out
    time.sleep(0.01)
"""
    assert launch(request, script) == ExitCode.DONE
    record = record_of(request)
    assert (record.launcher, record.ranks, record.devices, record.exit_codes) == ("local", 3, 3, [0, 0, 0])
    assert record.launcher_process == Process.current()
    assert len(record.rank_processes) == 3
    assert record.end is not None
    assert record.reason is None
    assert [attempt_of(request).log(rank).read_text() for rank in range(3)] == [
        f"rank {rank}\nwords" for rank in range(3)
    ]


def test_rank_environment_is_not_stale(pair: LaunchRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PYTHONPATH", "own-modules")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(pair, "import json; print(json.dumps(dict(os.environ)))") == ExitCode.DONE
    first, second = (json.loads(attempt_of(pair).log(rank).read_text()) for rank in range(2))
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in (first, second)] == [("0", "0"), ("1", "1")]
    assert (second["WORLD_SIZE"], second["LOCAL_WORLD_SIZE"], second["HPC_TRAIN_ATTEMPT"]) == ("2", "2", "1")
    assert first["HPC_TRAIN_TOKEN"] == second["HPC_TRAIN_TOKEN"] != ""
    assert not {"SLURM_PROCID", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID"} & first.keys()
    assert first["PYTHONPATH"].split(os.pathsep)[:2] == [str(Path.cwd()), "own-modules"]
    assert first["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(first[name]).is_relative_to(pair.paths.cache)


def test_ranks_import_the_snapshot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = work_tree(tmp_path / "work", "sub/own.py")
    (tree / "sub" / "own.py").write_text("value = 'old'")
    request = new_request(tmp_path / "runs", devices=1)
    link(request.paths, take(request.paths.siblings.snapshots, tree / "sub"))
    (tree / "sub" / "own.py").write_text("value = 'new'")
    (tree / "sub" / "later.py").write_text("")
    monkeypatch.chdir(tree / "sub")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", str(tree / "sub"), "/elsewhere"]))
    script = """
import importlib.util, json, multiprocessing, own
signals.install()
with multiprocessing.get_context("spawn").Pool(1) as pool:
    own_in_child = pool.apply(eval, ("__import__('own').value",))
found = [own.value, own_in_child, importlib.util.find_spec("later") is None, os.getcwd()]
print(json.dumps([found, os.environ["PYTHONPATH"].split(":"), sys.modules["hpc_train"].__file__]))
"""
    assert launch(request, script) == ExitCode.DONE
    found, path, package = json.loads(attempt_of(request).log(0).read_text())
    assert found == ["old", "old", True, str(tree / "sub")]
    snapshot = request.paths.code.resolve()
    assert path == [*(str(snapshot / part) for part in ("package", "tree/sub", "tree")), "/elsewhere"]
    assert Path(package).is_relative_to(snapshot / "package")


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_stdlib_is_not_replaced(has_snapshot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``types.py`` on PYTHONPATH no Python starts. Other modules are found, also in child processes."""
    monkeypatch.setenv("HPC_TRAIN_TEST_FRESH_RANKS", "1")
    own = ("own.py", "logging.py", "types.py", "queue.py", "random.py")
    tree = work_tree(tmp_path / "work", *own)
    for name in own:
        (tree / name).write_text("value = 'own'")
    request = new_request(tmp_path / "runs", devices=1)
    if has_snapshot:
        link(request.paths, take(request.paths.siblings.snapshots, tree))
    monkeypatch.chdir(tree)
    script = """
import json, logging, multiprocessing, own, queue, random, site, subprocess, types
signals.install()
with multiprocessing.get_context("spawn").Pool(1) as pool:
    found = [own.value, pool.apply(eval, ("__import__('own').value",))]
command = [sys.executable, "-c", "import hpc_train, own; print(own.value)"]
found.append(subprocess.check_output(command, text=True))
stdlib = os.path.dirname(os.__file__)
found += [os.path.relpath(module.__file__, stdlib) for module in (logging, queue, random, types)]
found.append(sys.path.index(os.path.dirname(own.__file__)) < sys.path.index(site.getsitepackages()[0]))
print(json.dumps(found))
"""
    assert launch(request, script) == ExitCode.DONE
    found = json.loads(attempt_of(request).log(0).read_text())
    modules = ["logging/__init__.py", "queue.py", "random.py", "types.py"]
    assert found == ["own", "own", "own\n", *modules, True]


def _damage(own: Path) -> None:
    own.chmod(0o600)
    own.write_bytes(bytes(own.stat().st_size))


def _pipe(own: Path) -> None:
    own.parent.chmod(0o700)
    own.unlink()
    os.mkfifo(own, 0o600)


def _open_to_others(own: Path) -> None:
    own.chmod(0o666)


@pytest.mark.timeout(HANG_LIMIT_S)
@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (_damage, StorageError, r"tree/own\.py: differs from what was written there"),
        (_pipe, UserError, r"own\.py"),  # it is not waited for
        (_open_to_others, UserError, r"own\.py: group or others may write it"),
    ],
)
def test_spoilt_code_is_not_run(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], words: str
) -> None:
    request = new_request(tmp_path / "runs", devices=1)
    code = take(request.paths.siblings.snapshots, work_tree(tmp_path / "work", "own.py"))
    link(request.paths, code)
    spoil(code / "tree/own.py")
    with pytest.raises(error, match=words):
        launch(request, "print('ran')")
    assert not attempt_of(request).log(0).exists()


@pytest.mark.timeout(HANG_LIMIT_S)
def test_a_pipe_in_place_of_a_log_is_refused_and_no_rank_stays(tmp_path: Path) -> None:
    request = new_request(tmp_path, devices=2)
    attempt_of(request).folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(attempt_of(request).log(1))
    with pytest.raises(StorageError, match=r"rank-1\.log: .*; move it away, then continue"):
        launch(request, "wait_for(lambda: False)")
    assert log_tail(attempt_of(request).log(1)) == ""


def test_a_thread_count_of_the_users_stays(single: LaunchRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch(single, "print(os.environ['OMP_NUM_THREADS'])") == ExitCode.DONE
    assert attempt_of(single).log(0).read_text() == "5\n"


def test_a_rank_leads_a_session_with_signals_held_back(single: LaunchRequest) -> None:
    script = """
held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(os.getsid(0) == os.getpid(), set(signals.STOP_SIGNALS) <= held)
"""
    assert launch(single, script) == ExitCode.DONE
    assert attempt_of(single).log(0).read_text() == "True True\n"


def test_the_old_reason_is_gone_once_a_new_attempt_begins(single: LaunchRequest) -> None:
    write_status(single.paths, RunStatus("failed", attempt=0, reason="older"))
    assert launch(single, "print(run.status.read_text())") == ExitCode.DONE
    seen = json.loads(attempt_of(single).log(0).read_text())
    assert (seen["state"], seen["attempt"], seen["reason"]) == ("pending", 1, None)


def test_a_launcher_that_was_given_up_leaves_the_state_to_the_attempt_after(single: LaunchRequest) -> None:
    """It may come back: a machine that slept, or was cut off."""
    script = """
from hpc_train.run.attempts import claim_attempt
claim_attempt(run)
sys.exit(1)
"""
    write_status(single.paths, RunStatus("running", attempt=2))
    assert launch(single, script) == ExitCode.FAILED
    assert read_status(single.paths).state != "failed"
    assert record_of(single).end is not None


def test_poll_is_called_while_ranks_run(single: LaunchRequest) -> None:
    from tests.launchers.fake_ranks import launcher

    go = single.paths.folder / "go"
    calls = 0

    def poll() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            go.touch()

    script = "wait_for((run.folder / 'go').exists)"
    assert launcher(script, single.paths).launch(single, poll) == ExitCode.DONE
    assert calls >= 3


@pytest.mark.fault(16)
def test_a_crash_ends_all_ranks(
    pair: LaunchRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_FAILURE_GRACE_S", 60.0)  # longer than rank 0 would wait in vain
    assert launch(pair, CRASH) == ExitCode.FAILED
    status = read_status(pair.paths)
    assert (status.state, status.attempt, status.reason) == ("failed", 1, "rank 1: ValueError: a")
    assert record_of(pair).exit_codes == [76, 1], "rank 0 was not asked to end"
    assert record_of(pair).reason == status.reason
    shown = capsys.readouterr().err
    assert 'File "x.py", line 1\nValueError: a\nsecond line\nrank 1: ValueError: a\n' in shown


_ASKED = """
if rank == {asked}:
    tell("left")
    leave(75)
wait_for((run.folder / "left-{asked}").exists)
leave(76)
"""
#: A rank's connections close before it has ended: with much memory on a GPU, seconds before.
_PEER_ENDS_LAST = """
pid = run.folder / "pid"
if rank == 1:
    wait_for(pid.exists)
    wait_for(lambda: not Path("/proc", pid.read_text()).exists())  # the launcher knows how it ended
    leave(75)
(run.folder / "new").write_text(str(os.getpid()))
(run.folder / "new").rename(pid)
leave(76)
"""
_HUNG = """
if rank == 1: signals.install(); wait_for(lambda: False)
attempt.error(1).write_text("HangError: rank 1 on here made no progress for 300 s")
attempt.exit(1).write_text("79 here")
sys.exit(76)
"""
_COMPLETED = """
if rank == 0:
    write_status(run, RunStatus("completed", 10, 10, 1.0, 1))
else:
    wait_for(lambda: "completed" in run.status.read_text())
"""
_DEVICE_ERROR = """
from tests import aborts
aborts.abort_as(aborts.DEVICE if rank == 1 else aborts.PEER)
"""
_PEER_ABORTS = """
if rank == 0:
    os.abort()
wait_for(lambda: (run.folder / "attempts/1/attempt.json").exists())
fail("ValueError: the cause")
"""
_LOST_EACH_OTHER = """
if rank == 0:
    wait_for(attempt.error(1).exists)
    leave(76)
fail("a peer is gone, or NCCL fails on this node: no /dev/shm", 76)
"""


@pytest.mark.fault(16, 17, 51)
@pytest.mark.parametrize(
    ("script", "graces", "code", "end"),
    [
        (
            "if rank == 1: fail('ValueError: b')\nsignals.install(); wait_for(lambda: False)",
            {"_FAILURE_GRACE_S": 0.2},
            ExitCode.FAILED,
            "failed: rank 1: ValueError: b [-9, 1]",
        ),
        (
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)" + ELSE_LOSE_PEER,
            {},
            ExitCode.FAILED,
            "failed: rank 1: killed by SIGKILL; out of memory?",
        ),
        ("sys.exit(75)", {}, ExitCode.TRY_AGAIN, "interrupted: its ranks were asked to stop"),
        # Before the first step a rank that is asked to stop leaves at once.
        (_ASKED.format(asked=0), {}, ExitCode.TRY_AGAIN, "interrupted: "),
        (_ASKED.format(asked=1), {}, ExitCode.TRY_AGAIN, "interrupted: "),
        (_PEER_ENDS_LAST, {"_CAUSE_GRACE_S": HANG_LIMIT_S}, ExitCode.TRY_AGAIN, "interrupted: "),
        # A rank that the launcher asks to stop after a peer was lost is no excuse.
        (
            "if rank == 0: leave(76)\nflag = signals.install(); wait_for(lambda: flag); leave(75)",
            {},
            ExitCode.FAILED,
            "failed: ",
        ),
        (
            _HUNG,
            {"_FAILURE_GRACE_S": 0.2},
            ExitCode.FAILED,
            "failed: rank 1 on here made no progress for 300 s",
        ),
        (f"{_COMPLETED}    os.abort()", {}, ExitCode.DONE, "completed: "),
        (f"{_COMPLETED}    sys.exit(76)", {}, ExitCode.DONE, "completed: "),
        # A rank may be slow to start.
        (
            _DEVICE_ERROR,
            {"_FAILURE_GRACE_S": HANG_LIMIT_S},
            ExitCode.FAILED,
            f"failed: rank 1: killed by SIGABRT: {aborts.DEVICE_LINE}",
        ),
        (_PEER_ABORTS, {"_FAILURE_GRACE_S": 60.0}, ExitCode.FAILED, "failed: rank 1: ValueError: the cause"),
        (
            _LOST_EACH_OTHER,
            {},
            ExitCode.FAILED,
            "failed: rank 1: a peer is gone, or NCCL fails on this node: no /dev/shm",
        ),
        (
            "if rank == 1: wait_for(lambda: False)",
            {"_LEAVE_GRACE_S": 0.2},
            ExitCode.FAILED,
            "failed: rank 0: ended, but 1 others did not and were killed [0, -9]",
        ),
    ],
)
def test_the_end_of_two_ranks(
    pair: LaunchRequest,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    graces: dict[str, float],
    code: ExitCode,
    end: str,
) -> None:
    for name, seconds in graces.items():
        monkeypatch.setattr(local, name, seconds)
    assert launch(pair, script) == code
    status = read_status(pair.paths)
    actual = f"{status.state}: {status.reason or ''} {record_of(pair).exit_codes}"
    assert actual.startswith(end)


def test_the_limit_that_ended_a_rank_is_named(pair: LaunchRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits, "current", lambda: {"-v": "memory is limited to 9 MiB"})
    script = (
        "if rank == 1: print('std::bad_alloc\\nbye', flush=True); os.kill(os.getpid(), signal.SIGABRT)"
        + ELSE_LOSE_PEER
    )
    assert launch(pair, script) == ExitCode.FAILED
    reason = read_status(pair.paths).reason or ""
    assert reason.startswith("rank 1: killed by SIGABRT: std::bad_alloc; memory is limited to 9 MiB: ")


@pytest.mark.parametrize("code", [ExitCode.BAD_FILE, ExitCode.IO])
def test_user_errors_keep_codes(
    pair: LaunchRequest, capsys: pytest.CaptureFixture[str], code: ExitCode
) -> None:
    script = (
        f"if rank == 0: fail('data.root: nothing there\\nmodel.args: too many', {int(code)})" + ELSE_LOSE_PEER
    )
    assert launch(pair, script) == code
    assert read_status(pair.paths).reason == "data.root: nothing there; model.args: too many"
    assert capsys.readouterr().err == "data.root: nothing there\nmodel.args: too many\n"


@pytest.mark.fault(20)
def test_divergence_prints_no_traceback(pair: LaunchRequest, capsys: pytest.CaptureFixture[str]) -> None:
    text = "Traceback (most recent call last):\\n  …\\nhpc_train.errors.NonFiniteError: loss is NaN at step 7"
    assert launch(pair, f"fail('{text}', 77)") == ExitCode.FAILED
    assert read_status(pair.paths).reason == "loss is NaN at step 7"
    assert capsys.readouterr().err == "loss is NaN at step 7\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ExitCode.BAD_NODE, "the node of rank 1 failed its check: its memory is held by another"),
        (ExitCode.HUNG, "rank 1: its memory is held by another"),
    ],
)
def test_an_unfit_node_is_reported_in_its_own_words(pair: LaunchRequest, code: ExitCode, words: str) -> None:
    script = f"if rank == 1: fail('BadNodeError: its memory is held by another', {int(code)})"
    assert launch(pair, script + ELSE_LOSE_PEER) == ExitCode.FAILED
    assert read_status(pair.paths).reason == words


def test_a_silent_rank_shows_its_log(single: LaunchRequest, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(single, "print('\\n'.join(map(str, range(1000)))); sys.exit(3)") == ExitCode.FAILED
    shown = capsys.readouterr().err
    assert "\n998\n999\nrank 0: ended with exit code 3: 999\n" in shown
    assert "\n900\n" not in shown


def test_rank_messages_are_escaped(single: LaunchRequest, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(single, "fail('ValueError: \\x1b[2J\\u202e')") == ExitCode.FAILED
    assert read_status(single.paths).reason == r"rank 0: ValueError: \x1b[2J\u202e"
    assert "\x1b" not in capsys.readouterr().err


def test_an_abort_before_completion_is_a_failure(single: LaunchRequest) -> None:
    script = "write_status(run, RunStatus('completed', 10, 10, 1.0, 7)); os.abort()"
    assert launch(single, script) == ExitCode.FAILED
    assert read_status(single.paths).reason == "rank 0: killed by SIGABRT"


@pytest.mark.fault(48)
def test_ranks_do_not_outlive_an_error_of_the_launcher(pair: LaunchRequest) -> None:
    from tests.launchers.fake_ranks import launcher

    def poll() -> None:
        raise RuntimeError("progress")

    with pytest.raises(RuntimeError, match="progress"):
        launcher("wait_for(lambda: False)", pair.paths).launch(pair, poll)
    assert [rank.is_alive() for rank in record_of(pair).rank_processes] == [False, False]


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in local._STOP_SIGNALS]
    launch(new_request(tmp_path, devices=1), "")
    assert [signal.getsignal(number) for number in local._STOP_SIGNALS] == before


def test_one_rank_a_gpu_or_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert choose_num_ranks(None, "auto") == choose_num_ranks(None, "cuda") == 3
    assert choose_num_ranks(None, "cpu") == 1
    assert choose_num_ranks(2, "cuda") == 2
    assert choose_num_ranks(8, "cpu") == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_num_ranks(None, "auto") == 1
    assert choose_num_ranks(4, "auto") == 4
    with pytest.raises(UsageError, match=r"^device: cuda needs a GPU, .* none; write device=cpu"):
        choose_num_ranks(None, "cuda")


@pytest.mark.parametrize(
    ("visible", "devices", "device"), [("0,1", 4, "cuda"), ("", 1, "cuda"), ("0", 2, "auto"), ("", 0, "cpu")]
)
def test_too_many_ranks(monkeypatch: pytest.MonkeyPatch, visible: str, devices: int, device: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv(fake_cuda.BACKEND, raising=False)
    with pytest.raises(UsageError, match=rf"^--devices: {devices} .*; write "):
        choose_num_ranks(devices, device)


def test_a_gpu_that_is_not_there_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match=r"shows none \(device: cuda\); write device=cpu") as refused:
        choose_num_ranks(1, "cuda")
    assert "write --devices" not in str(refused.value)
    assert choose_num_ranks(1, "auto") == choose_num_ranks(1, "cpu") == 1


class _FastClock:
    """A second passes at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1.0


class _StubbornRanks:
    """Rank 1 has crashed; rank 0 runs until it is killed."""

    def __init__(self) -> None:
        self.ended = [local.RankProcess(1, None, 1)]  # type: ignore[arg-type]
        self.are_running = True

    def collect(self) -> None:
        pass

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.are_running = False


@pytest.mark.fault(16)
def test_a_crash_ends_the_other_ranks_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's own grace: other tests change it."""
    clock = _FastClock()
    monkeypatch.setattr(local, "time", clock)
    local._Follower(new_request(tmp_path), _StubbornRanks(), []).follow(lambda: None)  # type: ignore[arg-type]
    assert clock.now < 10
