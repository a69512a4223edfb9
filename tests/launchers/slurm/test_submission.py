from __future__ import annotations

import socket
import threading
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError, ExitCode, NoSchedulerError, UserError
from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.schema import SlurmConfig
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.launchers.base import StartRequest
from hpc_train.launchers.slurm import commands, job_arrays, job_refusals, sbatch
from hpc_train.launchers.slurm import submission as steps
from hpc_train.launchers.slurm.launcher import SlurmLauncher
from hpc_train.launchers.slurm.submission import Batch
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.attempts import claim_attempt, now, read_record, write_record
from hpc_train.run.code import snapshot
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, mark_cancelled, read_status, write_status
from tests.launchers.slurm.programs import Programs, put_programs_first
from tests.plan.files import loaded
from tests.run.code.trees import take
from tests.waiting import HANG_LIMIT_S

_SLURM = "slurm: {partition: low, nodes: 2, time_limit: 1h}\n"
_ELSEWHERE = Process("n1", "another boot", "pid:[1]", 1, 1)
_CONFIG = 'echo "MaxArraySize = 1001"'
_TOO_FEW = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
_POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)
_DENIED = "echo 'allocation failure: Access/permission denied' >&2; exit 1"


@pytest.fixture
def folder(tmp_path: Path) -> ExperimentPaths:
    return ExperimentPaths(tmp_path / "runs/tiny")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A Slurm that holds no job and takes all of them."""
    found = put_programs_first(tmp_path, monkeypatch)
    found.put("sbatch", "echo Submitted batch job 12")
    found.put("squeue", "true")
    found.put("scontrol", _CONFIG)
    found.put("srun", "true")
    found.put("scancel", "true")
    monkeypatch.setattr(commands, "_ATTEMPTS", 1)
    commands.config.cache_clear()
    commands.partition.cache_clear()
    return found


def _runs(tmp_path: Path, folder: ExperimentPaths, seeds: str = "[1, 2, 3]") -> list[StartRequest]:
    """Make the runs of a sweep, with their code."""
    (tmp_path / "here").mkdir(exist_ok=True)
    code = take(folder.snapshots, tmp_path / "here")
    file = loaded(tmp_path, f"sweep.grid={{seed: {seeds}}}", more=_SLURM)
    queued = []
    for run in make_plan(file).runs:
        paths = RunPaths(folder.folder / run.id)
        create_run(paths, run.experiment, run.id, run.total_steps, launcher="slurm", snapshot=code)
        queued.append(StartRequest(paths, run.experiment, file.problem))
    return queued


def _enqueue(folder: ExperimentPaths, runs: list[StartRequest]) -> None:
    slurm = SlurmLauncher()
    with slurm.submitting(folder):
        slurm.start(folder, runs)


def _finish(folder: ExperimentPaths) -> None:
    """Do what the next command does first."""
    with SlurmLauncher().submitting(folder):
        pass


def _jobs(runs: list[StartRequest]) -> list[list[str]]:
    return [(read_json(run.paths.run) or {})["slurm_job_ids"] for run in runs]


def test_a_record_is_read_as_it_was_written(folder: ExperimentPaths) -> None:
    paths = steps.new_paths(folder)
    batch = Batch(paths.folder, "python", {"time": 10, "setup": ["true"]})
    runs = [RunPaths(folder.folder / "abc")]
    written = steps.prepare(paths, runs, batch, max_parallel=2, stays_held=True)
    assert steps.read(paths) == written
    assert steps.unfinished(folder) == [(paths, written)]
    steps.write(paths, replace(written, state=steps.RELEASED))
    assert steps.unfinished(folder) == []


def test_a_broken_record_is_none(folder: ExperimentPaths) -> None:
    paths = steps.new_paths(folder)
    steps.make_private(paths.folder)
    write_json(paths.record, {"version": 1})
    assert steps.read(paths) is None


@pytest.mark.parametrize(
    ("creator", "age_s", "expected"),
    [
        (None, 0, False),
        (_ELSEWHERE, 0, True),
        (_ELSEWHERE, 3600, False),
        (replace(_ELSEWHERE, host=socket.gethostname()), 0, False),  # before this machine's last boot
        ("ours", 0, False),  # it would hold the lock
    ],
)
def test_an_unseen_command_may_work(creator: Process | str | None, age_s: float, expected: bool) -> None:
    process = Process.current() if creator == "ours" else creator
    assert not isinstance(process, str)
    created = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat()
    assert steps.may_be_at_work(process, created) is expected


def test_a_run_is_unsubmitted_until_a_submission_holds_it(tmp_path: Path, folder: ExperimentPaths) -> None:
    runs = _runs(tmp_path, folder)
    assert all(SlurmLauncher().is_unsubmitted(run.paths) for run in runs)
    paths = steps.new_paths(folder)
    recorded = [runs[0].paths]
    steps.prepare(paths, recorded, Batch(paths.folder, "python", {}), max_parallel=None, stays_held=False)
    claim_attempt(runs[1].paths, "local")
    assert [SlurmLauncher().is_unsubmitted(run.paths) for run in runs] == [False, False, True]
    facts = read_json(runs[2].paths.run)
    assert facts is not None
    write_json(runs[2].paths.run, facts | {"launcher": "local"})
    assert not SlurmLauncher().is_unsubmitted(runs[2].paths)


def test_a_refused_run_goes_unless_it_holds_something(tmp_path: Path, folder: ExperimentPaths) -> None:
    new, old, queued = (run.paths for run in _runs(tmp_path, folder))
    claim_attempt(old, "slurm")
    steps.note_job(queued, "12_1")
    for paths in (new, old, queued):
        steps.withdraw(paths, "Slurm refused it: no")
    assert not new.folder.exists()
    for paths in (old, queued):
        assert (read_status(paths).state, read_status(paths).reason) == ("failed", "Slurm refused it: no")


def test_a_job_is_noted_once(tmp_path: Path, folder: ExperimentPaths) -> None:
    paths = _runs(tmp_path, folder)[0].paths
    write_status(paths, RunStatus("failed", 5, 9, attempt=1, reason="broke"))
    for _ in range(2):
        steps.note_job(paths, "12_0")
    assert (read_json(paths.run) or {})["slurm_job_ids"] == ["12_0"]
    assert read_status(paths) == RunStatus("pending", 5, 9, attempt=1)


def test_runs_are_grouped_by_what_their_script_says(tmp_path: Path, folder: ExperimentPaths) -> None:
    runs = _runs(tmp_path, folder, "[1, 2, 3, 4]")
    slurm = runs[1].experiment.slurm
    assert slurm is not None
    other = runs[1].experiment.model_copy(update={"slurm": slurm.model_copy(update={"nodes": 1})})
    runs[1] = replace(runs[1], experiment=other)
    snapshot.link(runs[3].paths, folder.snapshots / "other")
    groups = job_arrays._groups(runs, 1000)
    assert groups == [[runs[0], runs[2]], [runs[1]], [runs[3]]]
    assert job_arrays._groups([runs[0], runs[2]], 1) == [[runs[0]], [runs[2]]]


def _with_a_bad_node(run: StartRequest) -> None:
    claim_attempt(run.paths)
    record = read_record(run.paths.attempt(1))
    assert record is not None
    bad = {"n2": "failed its check: hot"}
    write_record(run.paths.attempt(1), replace(record, end=now(), bad_nodes=bad))


@pytest.mark.fault(14)
@pytest.mark.parametrize(("test_only", "is_left_out"), [("true", True), (_TOO_FEW, False), (_DENIED, True)])
def test_a_run_that_goes_on_leaves_out_its_bad_nodes_where_it_can(
    tmp_path: Path,
    folder: ExperimentPaths,
    programs: Programs,
    capsys: pytest.CaptureFixture[str],
    test_only: str,
    is_left_out: bool,
) -> None:
    programs.put(
        "sbatch", f"[[ $1 != --test-only ]] || {{ {test_only}; exit; }}; echo Submitted batch job 12"
    )
    runs = _runs(tmp_path, folder, "[1, 2]")
    _with_a_bad_node(runs[1])
    _enqueue(folder, runs)
    batches = [record.batch for paths in folder.submission_folders() if (record := steps.read(paths))]
    excluded = [batch.parameters.get("exclude") for batch in batches if batch]
    assert sorted(excluded, key=str) == ([None, "n2"] if is_left_out else [None, None])
    assert ("can't exclude n2" in capsys.readouterr().err) != is_left_out
    assert len([call for call in programs.calls("sbatch") if "--test-only" in call]) == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("MaxArraySize = 1001", 1001),
        ("MaxArraySize = 0", 1),
        ("MaxArraySize = 1001\nSchedulerParameters = a,bf_max_job_test=7,max_array_tasks=50", 50),
        ("SlurmctldPort = 1", 1),
    ],
)
def test_an_array_is_bounded_by_what_slurm_says(programs: Programs, config: str, expected: int) -> None:
    programs.put("scontrol", f"cat <<'END'\n{config}\nEND")
    assert job_arrays.array_limit() == expected


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("sbatch: error: invalid partition specified: nope", "slurm.partition"),
        ("Invalid account or account/partition combination specified", "slurm.account"),
        ("Invalid qos specification", "slurm.qos"),
        ("Invalid feature specification", "slurm.constraint"),
        ("Requested reservation is invalid", "slurm.reservation"),
        ("Job dependency problem", "slurm.dependency"),
        ("Invalid node name specified", "slurm.exclude"),
        ("Invalid generic resource (gres) specification", "slurm.gpu_type"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "slurm.time_limit"),
        ("Memory specification can not be satisfied", "slurm.mem_gb"),
        ("Requested node configuration is not available", "slurm"),
        ("QOSMaxSubmitJobPerUserLimit", "slurm"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "slurm"),
        ("Invalid job array specification", "sweep.grid"),
        ("sbatch: unrecognized option '--foo-bar=1'", "slurm.extra.foo_bar"),
        ("Invalid --begin specification", "slurm.extra.begin"),
        ("something that nobody has heard of", "slurm"),
    ],
)
def test_what_slurm_refuses_is_about_a_key(tmp_path: Path, words: str, key: str) -> None:
    experiment = loaded(tmp_path, more="slurm: {extra: {foo_bar: 1, begin: now}}\n").experiment
    assert job_refusals.advice(words, experiment).key == key


@pytest.mark.parametrize(
    ("words", "section", "key", "remedy"),
    [
        ("You must give a time limit with --time", "{}", "time_limit", "write one"),
        ("Please specify a walltime", "{}", "time_limit", "write one"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "{}", "time_limit", "write one"),
        ("Requested time limit is invalid", "{time_limit: 1h}", "time_limit", "write less"),
        ("Your time limit must be a multiple of 10", "{time_limit: 1h}", "time_limit", "as these words"),
        (
            "Jobs of this partition use whole nodes: all 8 cores with --cpus-per-task",
            "{}",
            "cpus_per_gpu",
            "w",
        ),
        ("memory by node is not supported here. Use --mem-per-cpu.", "{mem_gb: 4}", "mem_gb", "take it out"),
        ("do not request --mem, use mem-per-cpu", "{mem_gb: 4}", "mem_gb", "as these words require"),
        ("lua: please choose an account (-A)", "{}", "account", "write one"),
        (
            "project p12 has used up its hours on partition gpu",
            "{account: p12}",
            "",
            "as these words require",
        ),
        (
            "You are not allowed in reservation course",
            "{reservation: course}",
            "reservation",
            "as these words",
        ),
        ("GPU jobs need --gres and --partition=gpu", "{}", "", "as these words require"),
        ("invalid partition for these users, use --qos=gpu", "{}", "qos", "write one; the file has none"),
        ("use --mem-per-cpu, not --mem", "{mem_gb: 4}", "mem_gb", "slurm.extra.mem-per-cpu"),
        ("--mem is refused, use --mem-per-cpu", "{mem_gb: 4}", "mem_gb", "slurm.extra.mem-per-cpu"),
        ("QOSMinGRES", "{}", "gpus_per_node", "at least the minimum"),
        ("QOSMinCpuNotSatisfied", "{}", "cpus_per_gpu", "at least the minimum"),
        # Slurm's sentence about the policy lists causes that need not apply.
        (f"QOSMaxWallDurationPerJobLimit; {_POLICY}", "{time_limit: 1h}", "time_limit", "request less"),
        (f"AssocMaxNodePerJobLimit; {_POLICY}", "{}", "nodes", "another slurm.account"),
        (f"QOSMaxGRESPerUser; {_POLICY}", "{}", "gpus_per_node", "request less"),
        (f"QOSGrpSubmitJobsLimit; {_POLICY}", "{}", "", "submit fewer at once"),
        (f"AssocGrpCPUMinutesLimit; {_POLICY}", "{}", "time_limit", "request less"),
        (f"requested timelimit exceeds max of 24 hours; {_POLICY}", "{time_limit: 2d}", "time_limit", "less"),
        (_POLICY, "{}", "", "jobs in the queue, their size or their time"),
        # What the file lacks is named only if the words ask for it.
        ("The account hpc01 has expired", "{}", "account", "as these words require"),
        ("the debug QoS allows 1 node", "{}", "qos", "as these words require"),
        ("Jobs must request GPUs (--gres=gpu:N)", "{}", "gpus_per_node", "as these words require"),
        ("No partition specified or system default partition", "{}", "partition", "write one"),
        ("Required partition not available (inactive or drain)", "{}", "partition", "wait until"),
        ("Job's account not permitted to use this partition", "{}", "account", "AllowAccounts"),
        ("Memory required by task is not available", "{}", "mem_gb", "write less"),
        ("Node count specification invalid", "{}", "nodes", "within the limits"),  # too few, or too many
        ("I/O error writing script/environment to file", "{}", "", "the file is not at fault"),
        ("Invalid Trackable RESource (TRES) specification", "{}", "gpu_type", "write GPUs"),
    ],
)
def test_remedies_fit_the_messages(tmp_path: Path, words: str, section: str, key: str, remedy: str) -> None:
    experiment = loaded(tmp_path, more=f"slurm: {section}\n").experiment
    text = words if _POLICY in words else f"{words}; Batch job submission failed: Unspecified error"
    found = job_refusals.advice(text, experiment)
    assert (found.key, remedy in found.remedy) == (f"slurm.{key}".rstrip("."), True)


def test_a_refusal_names_its_key(tmp_path: Path, folder: ExperimentPaths, programs: Programs) -> None:
    programs.put("sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    runs = _runs(tmp_path, folder)
    with pytest.raises(BadFileError, match=r"exp.yaml:11:8: slurm: Slurm refuses it: QOSMaxSubmit"):
        _enqueue(folder, runs)
    assert not any(run.paths.folder.exists() for run in runs)
    assert folder.submission_folders() == []


def test_a_refused_second_array(tmp_path: Path, folder: ExperimentPaths, programs: Programs) -> None:
    programs.put("scontrol", 'echo "MaxArraySize = 2"')
    count = programs.folder / "sbatch.calls"
    refuse = "echo 'sbatch: error: AssocMaxSubmitJobLimit' >&2; exit 1"
    programs.put("sbatch", f"[ $(wc -l < {count}) = 1 ] && echo Submitted batch job 12 || {{ {refuse}; }}")
    runs = _runs(tmp_path, folder)
    with pytest.raises(BadFileError, match="AssocMaxSubmitJobLimit"):
        _enqueue(folder, runs)
    assert programs.calls("scancel") == ["12"]
    assert not any(run.paths.folder.exists() for run in runs)


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("is_cancelled_then", "jobs"),
    [(False, [["13_0"], ["13_1"], ["13_2"]]), (True, [["13_0"], [], ["13_1"]])],
)
def test_a_slurm_that_never_answers_leaves_all_to_the_next_command(
    tmp_path: Path,
    folder: ExperimentPaths,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled_then: bool,
    jobs: list[list[str]],
) -> None:
    monkeypatch.setattr(sbatch, "LIMIT_S", 0.0)
    programs.put("sbatch", "echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1")
    runs = _runs(tmp_path, folder)
    with pytest.raises(
        NoSchedulerError, match="gave up after 0 s; what is made stays: submit the file again"
    ):
        _enqueue(folder, runs)
    assert not programs.calls("scancel")
    if is_cancelled_then:
        mark_cancelled(runs[1].paths)
    programs.put("sbatch", "echo Submitted batch job 13")
    _finish(folder)
    assert _jobs(runs) == jobs
    assert steps.unfinished(folder) == []


@pytest.mark.slow
@pytest.mark.fault(33)
def test_a_lost_answer_is_recovered(tmp_path: Path, folder: ExperimentPaths, programs: Programs) -> None:
    """Two jobs of ours where slurmctld heard both: the older counts."""
    programs.put("sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    script = "$(cd .. && find $PWD -name batch.sh)"
    programs.put(
        "squeue", f'cd {folder.submissions}; echo "14|{script}"; echo "13|{script}"; echo "12|/a/b.sh"'
    )
    runs = _runs(tmp_path, folder)
    _enqueue(folder, runs)
    assert len(programs.calls("sbatch")) == 1
    assert programs.calls("scancel") == ["14"]
    assert _jobs(runs) == [["13_0"], ["13_1"], ["13_2"]]


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("Submitted batch job 1234\n", "1234"),
        ("1234;big\n", "1234"),
        ("Submitted batch job 1234 on cluster big\n", "1234"),
        ("--- notice ---\nlargest charge of this job 48 units\n  1234  \n", "1234"),
        ("your job 48 ended\n17\nSubmitted batch job 1234\nSee job 3 for details\n", "1234"),
        ("48 hours are left\r\n1234\r\n", "1234"),
        ("1234\n1234\n", "1234"),
        ("48\n1234\n", None),
        ("Welcome, job 48\n", None),
        ("", None),
        ("12", None),
    ],
)
def test_the_number_is_read_from_sbatchs_own_line(output: str, number: str | None) -> None:
    assert sbatch.job_number(output) == number


def test_a_job_whose_number_is_unclear_is_looked_for_in_the_queue(
    tmp_path: Path, folder: ExperimentPaths, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """squeue lists it a moment later; sbatch runs once."""
    monkeypatch.setattr(sbatch.time, "sleep", lambda _: None)
    programs.put("sbatch", "echo 48; echo 1234")
    script = "$(cd .. && find $PWD -name batch.sh)"
    calls = programs.folder / "squeue.calls"
    programs.put(
        "squeue", f'cd {folder.submissions}; [ $(wc -l < {calls}) = 1 ] || echo "1234|{script}"; echo "48|/a"'
    )
    runs = _runs(tmp_path, folder)
    _enqueue(folder, runs)
    assert len(programs.calls("sbatch")) == 1
    assert _jobs(runs) == [["1234_0"], ["1234_1"], ["1234_2"]]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("constraint: h100", "slurm.constraint: h100, but no node has this feature (there are a100, nvme)"),
        ("mem_gb: 65", "slurm.mem_gb: 65, but a node has at most 62"),
        ("gpus_per_node: 8", "slurm.gpus_per_node: 8, but a node has at most 4"),
        ("{gpus_per_node: 1, gpu_type: h100}", "slurm.gpu_type: h100, but no node has such GPUs"),
        ("nodes: 3", "slurm.nodes: 3, but the partition has 2"),
        ("constraint: a100", "no node satisfies all of: slurm.nodes: 1, slurm.constraint: a100"),
    ],
)
def test_a_job_that_can_never_start_is_withdrawn_with_the_request_at_fault(
    tmp_path: Path, folder: ExperimentPaths, programs: Programs, asked: str, told: str
) -> None:
    programs.put("squeue", "echo '12|BadConstraints'")
    programs.put("sinfo", "echo '16|64000|gpu:a100:4(S:0-1)|a100,nvme'; echo '16|64000|(null)|(null)'")
    (run,) = _runs(tmp_path, folder, "[1]")
    slurm = read_value(f"{{{asked.strip('{}')}}}")[0]
    section = SlurmConfig.model_validate(slurm)
    experiment = run.experiment.model_copy(update={"slurm": section})
    with pytest.raises(BadFileError) as refused:
        _enqueue(folder, [replace(run, experiment=experiment)])
    assert told in str(refused.value)
    assert programs.calls("scancel") == ["12"]
    assert not run.paths.folder.exists() and folder.submission_folders() == []


def test_only_the_jobs_that_can_never_start_are_withdrawn(
    tmp_path: Path, folder: ExperimentPaths, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.put("scontrol", 'echo "MaxArraySize = 2"')
    calls = programs.folder / "sbatch.calls"
    programs.put("sbatch", f"echo Submitted batch job $((10 + $(wc -l < {calls})))")
    programs.put("squeue", "echo '11|Priority'; echo '12|MaxMemPerLimit'")
    runs = _runs(tmp_path, folder)
    launcher = SlurmLauncher()
    with launcher.submitting(folder):
        assert launcher.start(folder, runs) == ExitCode.BAD_FILE
    message = capsys.readouterr().err
    assert "job 11: an array of 2 runs" in message
    assert "exp.yaml:11:" in message and "slurm.mem_gb: Slurm accepts the job, but never" in message
    assert [run.paths.folder.exists() for run in runs] == [True, True, False]
    assert (programs.calls("scancel"), len(folder.submission_folders())) == (["12"], 1)


def test_a_withdrawn_resume_is_undone(tmp_path: Path, folder: ExperimentPaths, programs: Programs) -> None:
    (run,) = _runs(tmp_path, folder, "[1]")
    claim_attempt(run.paths, "slurm", job="7")
    before = [path.read_text() for path in (run.paths.run, run.paths.status)]
    programs.put("squeue", "echo '12|PartitionTimeLimit'")
    with pytest.raises(BadFileError, match=r"slurm\.time_limit: Slurm accepts the job, but never"):
        _enqueue(folder, [run])
    assert [path.read_text() for path in (run.paths.run, run.paths.status)] == before


@pytest.mark.parametrize(
    ("reason", "running", "partition", "is_withdrawn"),
    [
        ("Resources", "", "low", False),
        ("PartitionTimeLimit", "", "low", True),
        # Slurm gives the reason of one partition only.
        ("PartitionTimeLimit", "", "low,high", False),
        ("QOSMaxNodePerUserLimit", "", "low", True),
        ("QOSMaxNodePerUserLimit", "11", "low", False),
        ("AssocGrpCpuLimit", "", "low", False),
        ("Job's account not permitted to use this partition (low denies a including a)", "", "low", True),
    ],
)
def test_a_job_that_may_start_later_is_not_withdrawn(
    tmp_path: Path,
    folder: ExperimentPaths,
    programs: Programs,
    reason: str,
    running: str,
    partition: str,
    is_withdrawn: bool,
) -> None:
    programs.put("squeue", f"""case "$*" in *RUNNING*) echo {running};; *) echo "12|{reason}";; esac""")
    (run,) = _runs(tmp_path, folder, "[1]")
    assert run.experiment.slurm is not None
    section = run.experiment.slurm.model_copy(update={"partition": partition})
    run = replace(run, experiment=run.experiment.model_copy(update={"slurm": section}))
    with pytest.raises(BadFileError) if is_withdrawn else nullcontext():
        _enqueue(folder, [run])
    assert run.paths.folder.exists() is not is_withdrawn


def test_what_another_host_may_be_doing_is_left_to_it(
    tmp_path: Path, folder: ExperimentPaths, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = steps.new_paths(folder)
    runs = [run.paths for run in _runs(tmp_path, folder)]
    record = steps.prepare(paths, runs, Batch(paths.folder, "x", {}), max_parallel=None, stays_held=False)
    steps.write(paths, replace(record, creator=_ELSEWHERE))
    _finish(folder)
    assert "left to n1" in capsys.readouterr().err
    assert not programs.calls("sbatch")


@pytest.mark.parametrize(("cluster", "is_finished"), [("there", False), ("here", True), (None, True)])
def test_what_was_begun_on_another_cluster_is_left_to_it(
    cluster: str | None,
    is_finished: bool,
    tmp_path: Path,
    folder: ExperimentPaths,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands, "cluster_name", lambda: "here")
    paths = steps.new_paths(folder)
    (run,) = _runs(tmp_path, folder, "[1]")
    batch = Batch(paths.folder, "x", {"additional_parameters": {}})
    made = steps.prepare(paths, [run.paths], batch, max_parallel=None, stays_held=False, cluster=cluster)
    steps.write(paths, replace(made, job_id="12", state=steps.SUBMITTED, creator=None))
    _finish(folder)
    said = capsys.readouterr().err
    assert (f"submission {made.token}: left to cluster there, where it began" in said) != is_finished
    assert ("release 12" in programs.calls("scontrol")) == is_finished


def test_a_release_that_slurm_refuses_can_be_finished_later(
    tmp_path: Path, folder: ExperimentPaths, programs: Programs
) -> None:
    denied = 'case "$1" in release) echo "Access/permission denied for job 12" >&2; exit 1;; esac'
    programs.put("scontrol", f"{denied}; {_CONFIG}")
    programs.put("squeue", "echo '12|JobHeldUser'")
    with pytest.raises(UserError, match=r"permission denied for job 12; what is made stays: submit the file"):
        _enqueue(folder, _runs(tmp_path, folder, "[1]"))
    programs.put("scontrol", _CONFIG)
    _finish(folder)
    assert steps.unfinished(folder) == []


@pytest.mark.fault(37)
def test_one_command_at_a_time_submits(folder: ExperimentPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, entered = threading.Event(), threading.Event()
    monkeypatch.setattr(steps, "say", lambda words: waits.set())

    def enter() -> None:
        with steps.locked(folder):
            entered.set()

    second = threading.Thread(target=enter)
    with steps.locked(folder):
        second.start()
        assert waits.wait(HANG_LIMIT_S)
        assert not entered.wait(0.5)  # can't be so by chance: the lock is held
    assert entered.wait(HANG_LIMIT_S)
    second.join()


def test_no_files_without_slurm(
    folder: ExperimentPaths, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (programs.folder / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(programs.folder))
    with pytest.raises(NoSchedulerError, match="sbatch: no such program here"):
        _finish(folder)
    assert not folder.folder.exists()


def test_what_is_shown_names_no_file_that_is_there(tmp_path: Path, folder: ExperimentPaths) -> None:
    file = loaded(tmp_path, "sweep={grid: {seed: [1, 2]}, max_parallel: 1}", more=_SLURM)
    runs = [
        StartRequest(RunPaths(folder.folder / run.id), run.experiment, file.problem)
        for run in make_plan(file).runs
    ]
    (script,) = SlurmLauncher().scripts(folder, runs)
    assert "#SBATCH --array=0-1%1" in script
    assert f"{folder.submissions}/TOKEN" in script
    assert not folder.folder.exists()


def test_a_submission_without_a_recorded_cluster_is_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "cluster_name", lambda: "here")
    record = steps.Submission("token", now(), None, [])
    assert not steps.is_elsewhere(record)
    assert not steps.is_elsewhere(replace(record, cluster="here"))
    assert steps.is_elsewhere(replace(record, cluster="there"))
