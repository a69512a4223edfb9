from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.status import RunRow
from hpc_train.console import fitted
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.attempts import claim_attempt, claim_exactly, now, tell_end
from hpc_train.run.files import write_json
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.cli.commands import hpc_train, stderr_of, succeeded
from tests.report.made_runs import made_sweep
from tests.run.runs import change_facts, change_launcher, change_record, small_run, write_rows
from tests.run.test_checkpoints import begin_attempt, change_manifest, write_checkpoint
from tests.terminals import on_terminal


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return small_run(tmp_path / "runs")


def test_without_runs_there_is_nothing_on_stdout() -> None:
    done = hpc_train("status")
    assert (done.code, done.out) == (0, "")
    assert json.loads(hpc_train("status", "--json").out) == {"version": 1, "runs": []}


def test_columns_are_plain_where_nobody_watches(paths: RunPaths) -> None:
    heads, row = hpc_train("status").out.splitlines()
    assert heads.split() == ["run", "experiment", "state", "step"]
    assert row.split() == ["abc", "small", "pending", "0/10"]


def test_a_run_whose_launcher_died_is_corrected(paths: RunPaths) -> None:
    claim_attempt(paths)
    change_record(paths.attempt(1), launcher="local")
    change_launcher(paths.attempt(1), start_ticks=0)
    write_status(paths, RunStatus(state="running", step=4, attempt=1))
    (run,) = json.loads(hpc_train("status", "--json").out)["runs"]
    assert (run["state"], run["reason"], run["step"]) == ("failed", "launcher died", 4)
    assert read_status(paths).reason == "launcher died", "written"
    assert "launcher died: `hpc-train resume abc` continues from step 0\n" in hpc_train("status").err
    write_checkpoint(paths, 4, attempt=1)
    assert "`hpc-train resume abc` continues from step 4\n" in hpc_train("status", "abc").err


def test_markup_and_escapes_of_a_reason_are_shown_as_text_on_a_terminal(paths: RunPaths) -> None:
    write_status(paths, RunStatus(state="failed", reason="[red]x[/red] \x1b]0;title\x07\nsecond"))
    shown = on_terminal("status", columns=200)
    assert r"[red]x[/red] \x1b]0;title\x07\nsecond" in shown
    assert "\x1b]" not in shown


def test_a_failed_run_by_itself_shows_where_it_failed_and_which_log_has_the_rest(
    paths: RunPaths, tmp_path: Path
) -> None:
    claim_attempt(paths, "slurm")
    long = "\n".join(f"  line {number}" for number in range(100))
    paths.attempt(1).error(0).write_text("lost a peer")
    paths.attempt(1).error(1).write_text(
        f"Traceback (most recent call last):\n{long}\nValueError: \x1b[1mtwo\n"
    )
    write_status(paths, RunStatus(state="failed", attempt=1, reason="rank 1: ValueError: two"))
    shown = hpc_train("status", "abc").out
    end = f"  line 99\nValueError: \\x1b[1mtwo\nthe rest is in {paths.attempt(1).log(1)}\n"
    assert shown.endswith(end)
    assert "line 80" not in shown and "lost a peer" not in shown
    small_run(tmp_path / "runs", "def")
    assert len(hpc_train("status").out.splitlines()) == 3, "of several runs, a line each"


def _attempt(paths: RunPaths, cause: str | None, **events: str) -> None:
    number = claim_attempt(paths, "slurm", job="12_3")
    times = {name: f"2026-11-21T06:{minute}+00:00" for name, minute in events.items()}
    change_record(paths.attempt(number), cause=cause, events=times)


def test_json_has_the_parts_of_the_newest_interruption(paths: RunPaths) -> None:
    _attempt(paths, "completed", begin="00:01.000", first_step="00:02.000")
    assert _row()["restart"] is None, "a first attempt was not interrupted"
    _attempt(paths, "preemption", signal="00:10.000", saved="00:11.250", requeue="00:13.000")
    times = ("signal_to_saved_s", "saved_to_requeue_s", "requeue_to_begin_s", "begin_to_first_step_s")
    none = dict.fromkeys(("cause", *times)) | {"in_place": False}
    parts = none | {"cause": "preemption", "signal_to_saved_s": 1.25, "saved_to_requeue_s": 1.75}
    assert _row()["restart"] == parts
    _attempt(paths, None, begin="00:20.000")
    assert _row()["restart"] == parts | {"requeue_to_begin_s": 7.0}
    _attempt(paths, "completed", begin="01:20.000", first_step="01:22.500")
    assert _row()["restart"] == none | {"begin_to_first_step_s": 2.5}


def test_json_shows_a_restart_in_place_of_a_local_run_and_no_resume(paths: RunPaths) -> None:
    for number, in_place in ((1, False), (2, True)):
        assert claim_exactly(paths, number, "local", in_place=in_place)
        start, first_step = (f"2026-11-21T06:0{number}:{second}+00:00" for second in ("00", "02.500"))
        change_record(paths.attempt(number), start=start, cause="crash", events={"first_step": first_step})
        assert (_row()["restart"] is not None) == in_place
    restart = {key: value for key, value in _row()["restart"].items() if value is not None}
    assert restart == {"cause": "crash", "in_place": True, "begin_to_first_step_s": 2.5}
    assert claim_exactly(paths, 3, "local")
    assert _row()["restart"] is None


def test_no_code_of_others_is_imported(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    change_facts(paths, launcher="trap:Launcher")
    paths.folder.parent.chmod(0o777)
    assert hpc_train("status").code == 0
    assert not Path("sprung").exists()


def _on_slurm(tmp_path: Path, **recovery: int) -> RunPaths:
    paths = small_run(tmp_path / "runs", slurm={}, recovery=recovery)
    change_facts(paths, launcher="slurm", slurm_job_ids=["9"])
    return paths


def _ended(paths: RunPaths, cause: str, job: str = "9", **facts: Any) -> None:
    attempt = paths.attempt(claim_attempt(paths, "slurm", job=job))
    change_record(attempt, end=now(), cause=cause, saved_step=0, events={"first_step": "…"}, **facts)


def _row() -> dict[str, Any]:
    (run,) = json.loads(hpc_train("status", "--json").out)["runs"]
    assert isinstance(run, dict)
    return run


@pytest.mark.fault(36)
def test_json_has_what_is_left_of_the_newest_jobs_budget(tmp_path: Path) -> None:
    paths = _on_slurm(tmp_path)
    write_status(paths, RunStatus(state="failed"))
    assert _row()["budget"] == {"crashes_left": 3, "preemptions_left": None, "without_progress_left": 2}
    _ended(paths, "crash", job="8")
    _ended(paths, "hang")
    _ended(paths, "time limit")
    assert _row()["budget"] == {"crashes_left": 2, "preemptions_left": None, "without_progress_left": 1}


def test_the_budget_is_what_the_file_and_later_changes_say(tmp_path: Path) -> None:
    paths = _on_slurm(tmp_path, max_preemptions=5, max_crashes=1)
    write_status(paths, RunStatus(state="failed"))
    _ended(paths, "preemption")
    assert _row()["budget"] == {"crashes_left": 1, "preemptions_left": 4, "without_progress_left": 1}
    change_facts(paths, changes={"2": ["recovery.max_crashes=7"]})
    assert _row()["budget"]["crashes_left"] == 7
    tell_end(paths.attempt(claim_attempt(paths, "slurm", job="9")), 0, 65)
    assert _row()["budget"]["crashes_left"] == 1, "the ranks refused what was changed"


@pytest.mark.fault(14)
def test_excluded_nodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no Slurm here: the folder's word
    paths = _on_slurm(tmp_path)
    how = "failed its check: no memory"
    _ended(paths, "bad node", bad_nodes={"n2": how})
    write_status(paths, RunStatus(state="requeued", attempt=1, reason="crash 1 of 3: so it was"))
    run = _row()
    assert run["excluded_nodes"] == {"n2": how}
    assert run["reason"] == f"crash 1 of 3: so it was; excludes n2 ({how})"
    assert f"excludes n2 ({how})" in hpc_train("status").out
    paths.attempt(1).kept_nodes.write_text("n2\n")
    assert "can't exclude these nodes, since too few would be left: " in _row()["reason"]
    write_status(paths, RunStatus(state="completed", attempt=1))
    assert _row()["reason"] is None, "nothing comes after"


def test_a_node_without_a_heartbeat_is_shown(paths: RunPaths) -> None:
    number = claim_attempt(paths, "slurm")
    write_status(paths, RunStatus(state="running", attempt=number))
    for node, age_s in (("n1", 10), ("n2", 300)):
        path = paths.attempt(number).heartbeat(node)
        write_json(path, {"node": node})
        os.utime(path, (time.time() - age_s,) * 2)
    assert _row()["reason"] == "no sign of life from n2 for 5 min"
    write_status(paths, RunStatus(state="failed", attempt=number))
    assert _row()["reason"] is None


def _training(paths: RunPaths, *, attempt_s: float) -> None:
    """Have the run train for so long, at two steps a second, now at step 40 of 100."""
    number = claim_attempt(paths, "local")
    start = datetime.fromtimestamp(time.time() - attempt_s, UTC).isoformat()
    change_record(paths.attempt(number), start=start, launcher="slurm")
    write_status(paths, RunStatus(state="running", step=40, total_steps=100, attempt=number))
    rows: list[dict[str, Any]] = [
        {
            "time": time.time() - (40 - step) / 2,
            "attempt": number,
            "split": "train",
            "step": step,
            "loss": 2.5,
        }
        for step in (20, 30, 40)
    ]
    rows.insert(1, {**rows[0], "split": "val", "loss": 0.5, "accuracy": 0.75})
    write_rows(paths, rows)


def test_a_line_has_job_elapsed_time_remaining_time_and_last_metric(paths: RunPaths) -> None:
    _training(paths, attempt_s=3725)
    change_facts(paths, slurm_job_ids=["9", "12_3"])
    heads, row = hpc_train("status").out.splitlines()
    assert " ".join(heads.split()) == "run experiment state step job elapsed ETA last metric or reason"
    assert row.split()[:6] == ["abc", "small", "running", "40/100", "12_3", "1h02m"]
    assert row.split()[6] in {"29s", "30s"} and row.split()[7:] == ["accuracy", "0.75"]
    found = _row()
    assert found["job"] == "12_3", "the newest"
    assert found["elapsed_s"] == pytest.approx(3725, abs=60) and found["eta_s"] == pytest.approx(30, abs=30)
    assert found["last_metric"] == {"split": "val", "name": "accuracy", "value": 0.75, "step": 20}
    status = read_status(paths)
    assert RunRow.at(paths, status).eta_s is not None
    for reason in ("suspended by Slurm", "being cancelled"):
        assert RunRow.at(paths, replace(status, reason=reason)).eta_s is None


def _attempts(paths: RunPaths, *times: tuple[str, str]) -> None:
    """Record attempts from the first to the second time of day."""
    for start, end in times:
        attempt = paths.attempt(claim_attempt(paths, "slurm"))
        change_record(attempt, start=f"2026-11-21T{start}+00:00", end=f"2026-11-21T{end}+00:00")


def test_attempts_add_up_and_queues_do_not_count(paths: RunPaths) -> None:
    _attempts(paths, ("06:00:00", "06:10:00"), ("09:00:00", "09:00:30"))
    write_status(paths, RunStatus(state="completed", attempt=2))
    assert (_row()["elapsed_s"], _row()["eta_s"]) == (630.0, None)
    assert "10m30s" in hpc_train("status").out


def test_goodput_counts_each_step_once(paths: RunPaths) -> None:
    """Two attempts of 100 s; the second repeats steps 30 to 40. Of each step half a second is a wait
    for data.
    """
    _attempts(paths, ("06:00:00", "06:01:40"), ("09:00:00", "09:01:40"))
    rows = [(1, 10, None), (1, 20, 1.5), (1, 30, 1.5), (2, 40, None), (2, 50, 2.5), (2, 60, 2.5)]
    write_rows(
        paths,
        (
            {"attempt": attempt, "split": "train", "step": step}
            | ({} if step_s is None else {"step_s": step_s, "data_wait_s": 0.5})
            for attempt, step, step_s in rows
        ),
    )
    write_status(paths, RunStatus(state="completed", step=60, total_steps=60, attempt=2))
    assert _row()["goodput"] == (30 * 1 + 30 * 2) / 200
    shown = [" ".join(line.split()) for line in hpc_train("status", "abc").out.splitlines()]
    assert "goodput 45.0% of 3m20s" in shown
    # Step 60 was not saved.
    write_status(paths, RunStatus(state="failed", step=60, total_steps=60, attempt=2))
    paths.checkpoint(50).folder.mkdir(parents=True)
    assert _row()["goodput"] == (30 * 1 + 20 * 2) / 200


def test_a_run_by_name_has_its_details(paths: RunPaths) -> None:
    _training(paths, attempt_s=10)
    change_facts(paths, values={"optimization.optimizer.lr": 0.1}, ranks=1)
    lines = [" ".join(line.split()) for line in hpc_train("status", "abc").out.splitlines()]
    assert {
        "attempt 1",
        "metric accuracy 0.75 at step 20 (val)",
        "values lr=0.1",
        f"folder {paths.folder}",
        "step 8 samples per step: 2 micro-batches of 4, 2 per rank, 1 rank, fp32",
    } <= set(lines)
    assert len(hpc_train("status").out.splitlines()) == 2


def test_the_best_checkpoint_is_shown(paths: RunPaths) -> None:
    begin_attempt(paths, 1)
    checkpoint = write_checkpoint(paths, 20, attempt=1)
    change_manifest(checkpoint, best={"metric": "accuracy", "value": 0.75, "step": 10})
    assert _row()["best"] == {"metric": "accuracy", "value": 0.75, "step": 10}
    lines = [" ".join(line.split()) for line in hpc_train("status", "abc").out.splitlines()]
    assert "best accuracy 0.75 at step 10" in lines
    change_manifest(checkpoint, version=99)
    assert _row()["best"] is None


def test_the_metric_that_decides_is_shown_with_its_best_value(paths: RunPaths) -> None:
    own_task = {"split": "val", "step": 10, "epoch": 1.0, "dice": 0.8}
    write_rows(paths, [own_task, {"split": "train", "step": 20, "loss": 0.1}])
    assert "dice 0.8" in hpc_train("status").out, "not the training loss"
    rows = [
        {"split": "val", "step": 10, "loss": 0.5, "dice": 0.8},
        {"split": "val", "step": 20, "loss": 0.4, "dice": 0.7},
        {"split": "train", "step": 30, "loss": 0.1},
    ]
    write_rows(paths, rows)
    best = {"metric": "dice", "value": 0.8, "step": 10}
    write_status(paths, RunStatus(state="completed", step=30, total_steps=30, attempt=1, best=best))
    assert "dice 0.7 (best 0.8 at 10)" in hpc_train("status").out
    assert _row()["best_metric"] == best and _row()["last_metric"]["value"] == 0.7
    lines = [" ".join(line.split()) for line in hpc_train("status", "abc").out.splitlines()]
    assert {"metric dice 0.7 at step 20 (val)", "best dice 0.8 at step 10"} <= set(lines)
    write_status(paths, RunStatus(best={"metric": "dice", "value": 0.7, "step": 20}))
    assert "dice 0.7 (best)" in hpc_train("status").out
    write_status(paths, RunStatus(best={"metric": "loss"}))
    assert "loss 0.4" in hpc_train("status").out and _row()["best_metric"] is None


def test_a_nan_is_shown_and_is_valid_json(paths: RunPaths) -> None:
    for word in ("NaN", "null"):  # rows have null
        row = '{"split": "val", "step": %d, "loss": %s}\n'
        paths.metrics.write_text(row % (3, "0.5") + row % (4, word))
        assert "loss nan" in hpc_train("status").out
        assert _row()["last_metric"] == {"split": "val", "name": "loss", "value": None, "step": 4}


# The table of ``status`` for sweeps: groups, order, failed runs, swept values.


_RATES = (0.1, 1e-3, 0.02, 0.3, 5.0, 0.004)


@pytest.fixture
def sweep() -> list[RunPaths]:
    """Six runs over the learning rate, the last of which has failed."""
    runs = made_sweep(runs_root(), 6, steps=50)
    for paths, rate in zip(runs, _RATES, strict=True):
        change_facts(paths, values={"optimization.optimizer.lr": rate})
    return runs


def _ids(*words: str) -> list[str]:
    done = succeeded("status", *words)
    return [line.split()[0] for line in done.out.splitlines()[1:] if not line.startswith("sweep:")]


@pytest.mark.usefixtures("sweep")
def test_a_sweep_has_a_line_with_its_runs_by_state_and_the_swept_values() -> None:
    small_run(runs_root())
    lines = hpc_train("status").out.splitlines()
    assert "sweep: 6 runs: 5 completed, 1 failed" in lines
    assert not any(line.startswith("small:") for line in lines), "no sweep"
    assert "lr=0.02" in next(line for line in lines if line.startswith("0000000002"))


def test_runs_are_sorted_by_a_swept_key_or_a_column(sweep: list[RunPaths]) -> None:
    by_rate = [sweep[place].folder.name for place in (1, 5, 2, 0, 3, 4)]
    assert _ids("--sort", "lr") == _ids("--sort", "optimization.optimizer.lr") == by_rate
    assert _ids("--sort", "state")[-1] == sweep[5].folder.name
    rows = json.loads(hpc_train("status", "--json", "--sort", "metric").out)["runs"]
    values = [row["last_metric"]["value"] for row in rows]
    assert values == sorted(values)
    assert rows[0]["usage"]["time"]["training"] > 0
    assert "did you mean state?" in stderr_of(2, "status", "--sort", "stat")


def test_only_failed_runs(sweep: list[RunPaths]) -> None:
    assert _ids("--failed") == [sweep[5].folder.name]
    assert hpc_train("status", "--failed", sweep[0].folder.name).err == "no run has failed\n"


def test_one_run_shows_what_it_used(sweep: list[RunPaths]) -> None:
    out = hpc_train("status", sweep[0].folder.name).out
    assert "  time lost  starts " in out and "  memory     peak 21.4 GiB on a GPU" in out


def test_values_are_cut_to_80_columns() -> None:
    heads = ["run", "experiment", "state", "step", "elapsed", "values", "last metric or reason"]
    row = ["0123456789", "imagenet", "completed", "1000/1000", "1h02m", "lr=0.1 wd=0.05 " * 4, "loss 0.75"]
    lines = fitted([heads, row], 80)
    assert max(map(len, lines)) <= 80 and "lr=0.1" in lines[1]
