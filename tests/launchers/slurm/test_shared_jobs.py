"""Jobs that several runs of a sweep share: which runs belong to a job, and who begins and ends them."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Program
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.launchers.slurm import job_refusals
from hpc_train.launchers.slurm.after import verdict_on_slots
from hpc_train.launchers.slurm.batch_job import MARK, BatchJob, output_of
from hpc_train.launchers.slurm.begin import begin_next
from hpc_train.launchers.slurm.queue_status import Folder, status_of
from hpc_train.launchers.slurm.script import batch, script_text
from hpc_train.launchers.slurm.submission import Sharing, sharing
from hpc_train.paths import RunPaths
from hpc_train.run.files import write_json
from hpc_train.run.processes import FOLDER_VARIABLE
from hpc_train.run.resource_limits import usable_cpus
from hpc_train.run.run_status import mark_cancelled, read_status, write_status
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import add_job, job, queued_run
from tests.launchers.slurm.scripts import experiment, fake_snapshot
from tests.plan.files import loaded
from tests.run.runs import record_of

_ENVIRON = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "HPC_TRAIN_HOSTS": "n1"}


@pytest.mark.parametrize(
    ("runs", "runs_per_job", "max_parallel", "expected"),
    [
        (32, 1, 4, Sharing(1, 1)),
        (1, 8, None, Sharing(1, 1)),  # a resumed run: a job of its own
        (32, 8, None, Sharing(8, 8)),
        (9, 4, None, Sharing(3, 3)),  # three jobs of three
        (10, 4, None, Sharing(4, 4)),
        (32, 8, 16, Sharing(8, 16)),  # two jobs
        (32, 8, 2, Sharing(2, 32)),  # one job
        (3, 8, None, Sharing(3, 3)),
    ],
)
def test_runs_are_divided_among_jobs(
    runs: int, runs_per_job: int, max_parallel: int | None, expected: Sharing
) -> None:
    assert sharing(runs, runs_per_job, max_parallel) == expected


def test_without_a_sweep_there_are_no_runs_to_share_a_job(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"exp.yaml:11:23: slurm.runs_per_job: 4 runs would share a job"):
        make_plan(loaded(tmp_path, more="slurm: {runs_per_job: 4}\n"))


def test_the_job_requests_what_its_slots_need_and_a_slot_its_share(tmp_path: Path) -> None:
    submission = tmp_path / "exp/.slurm/token"
    submission.mkdir(parents=True)
    snapshot = fake_snapshot(tmp_path / ".code/content")
    slurm = {"runs_per_job": 4, "gpus_per_node": 2, "gpu_type": "a100", "cpus_per_gpu": 3, "mem_gb": 10}
    asked = experiment(slurm=slurm)
    pyxis = experiment(slurm=slurm, environment={"container": {"image": "a/b", "runtime": "pyxis"}})
    program = Program.model_validate({"name": "exp", "program": {"command": ["python"]}, "slurm": slurm})
    steps = []
    for text in (
        script_text(batch(submission, file, snapshot=snapshot, search_path=[], sharing=Sharing(4, 6)), 12)
        for file in (program, pyxis, asked)
    ):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        steps += re.findall(r"^ +srun .*\\\n.*$", text, re.MULTILINE)
    for line in (
        "--array=0-1%2",
        "--ntasks-per-node=8",
        "--cpus-per-task=3",
        "--gpus-per-node=a100:8",
        "--mem=40G",
    ):
        assert re.search(f"^#SBATCH {line}$", text, re.MULTILINE), line
    _, in_container, step = steps
    for word in ("--exact", "--nodes=1", "--ntasks=2", "--gpus-per-node=a100:2", "--cpus-per-task=3"):
        assert f" {word} " in step, step
    assert step.endswith(' -u -m hpc_train.launchers.entry "$HPC_TRAIN_RUN_FOLDER"')
    assert not re.search("^srun", text, re.MULTILINE)
    assert " --exact " in in_container and " --container-image=a/b " in in_container, in_container
    assert in_container.endswith(' python3 -u -m hpc_train.launchers.entry "$HPC_TRAIN_RUN_FOLDER"')


def shared_gpu_script(tmp_path: Path) -> str:
    """Return the script of a job with three slots, of which two share each GPU."""
    submission = tmp_path / "exp/.slurm/token"
    submission.mkdir(parents=True)
    slurm = {"runs_per_job": 4, "runs_per_gpu": 2, "gpus_per_node": 1, "cpus_per_gpu": 3, "mem_gb": 10}
    snapshot = fake_snapshot(tmp_path / ".code/content")
    file = experiment(slurm=slurm)
    text = script_text(batch(submission, file, snapshot=snapshot, search_path=[], sharing=Sharing(3, 3)), 3)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def test_runs_that_share_gpus_request_each_gpu_once(tmp_path: Path) -> None:
    text = shared_gpu_script(tmp_path)
    for line in ("--ntasks-per-node=3", "--cpus-per-task=3", "--gpus-per-node=2", "--mem=30G"):
        assert re.search(f"^#SBATCH {line}$", text, re.MULTILINE), line
    (step,) = re.findall(r"^ +srun .*\\\n.*$", text, re.MULTILINE)
    for word in ("--overlap", "--nodes=1", "--ntasks=1", "--gpus-per-node=2"):
        assert f" {word} " in step, step
    assert "--exact" not in step and step.endswith(' -m hpc_train.launchers.entry "$HPC_TRAIN_RUN_FOLDER"')


_SHOW = 'echo "$CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE $(taskset --pid $$)"'


@pytest.mark.parametrize("is_confined", [True, False])
def test_each_slot_gets_its_part_of_the_gpus_and_cores(tmp_path: Path, is_confined: bool) -> None:
    _, _, after = shared_gpu_script(tmp_path).partition("hpc_train_part='\n")
    part, _, _ = after.partition("\n'\n")
    usable = sorted(usable_cpus())
    if len(usable) < 2:
        pytest.skip("one core can't be divided")
    count = len(usable) // 2
    environ = {
        "PATH": os.environ["PATH"],
        "CUDA_VISIBLE_DEVICES": "4,7",
        "SLURM_CPUS_ON_NODE": str(2 * count if is_confined else 4 * len(usable)),
    }
    masks = []
    for slot, gpu in enumerate(("4", "7")):
        command = ["taskset", "--cpu-list", ",".join(map(str, usable[: 2 * count]))]
        command += ["bash", "-c", part, "hpc-train", str(slot), "2", "bash", "-c", _SHOW]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        device, cpus, *_, mask = done.stdout.split()
        assert (device, cpus) == (gpu, str(count if is_confined else 2 * len(usable))), done.stdout
        masks.append(int(mask, 16))
    whole = sum(1 << cpu for cpu in usable[: 2 * count])
    if is_confined:
        assert [mask.bit_count() for mask in masks] == [count, count] and sum(masks) == whole
    else:
        assert masks == [whole, whole], "the cores of this job are unknown"


@pytest.mark.parametrize(
    ("programs", "notice"),
    [
        ({}, "nvidia-cuda-mps-control is not on this node"),
        (
            {"nvidia-cuda-mps-control": "exit 1", "nvidia-smi": "echo GPU-a"},
            "nvidia-cuda-mps-control -d ended",
        ),
        ({"nvidia-cuda-mps-control": "", "nvidia-smi": "exit 9"}, "nvidia-smi does not show the GPUs"),
    ],
)
def test_runs_share_gpus_without_mps_after_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], notice: str
) -> None:
    put = put_programs_first(tmp_path, monkeypatch)
    for name, text in programs.items():
        put.put(name, text)
    _, begin, after = shared_gpu_script(tmp_path).partition("hpc_train_begin_mps() {")
    functions = begin + after.partition("\n# Trains the next run")[0]
    (tmp_path / "tmp").mkdir()
    shown = "hpc_train_begin_mps; env; ls -A $TMPDIR; hpc_train_end_mps"
    environ = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "0,1", "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        ["bash", "-c", f"{functions}\n{shown}"], env=environ, capture_output=True, text=True, check=True
    )
    assert f"2 runs share each GPU and take turns on it, without MPS: {notice}" in done.stderr
    assert "CUDA_MPS" not in done.stdout and "HPC_TRAIN_GPUS" not in done.stdout
    assert not list((tmp_path / "tmp").iterdir())
    assert "" not in put.calls("nvidia-cuda-mps-control"), "there is no MPS to end"


@pytest.fixture
def jobs(tmp_path: Path) -> list[BatchJob]:
    """Job 12 with three runs, none of which has begun."""
    runs = [queued_run(tmp_path / "runs", "12", f"run{number}") for number in range(3)]
    submission = runs[0].siblings.submission("feed").folder
    submission.mkdir(parents=True, mode=0o700)
    record = {"version": 1, "runs": [run.folder.name for run in runs], "job_id": "12", "state": "released"}
    batch = {"submission": str(submission), "command": "x", "parameters": {}, "runs_per_task": 3}
    write_json(submission / "submission.json", record | {"batch": batch})
    return BatchJob.with_each_run(submission, _ENVIRON)


def begun(jobs: list[BatchJob], **more: str) -> str | None:
    line = begin_next(jobs, _ENVIRON | more)
    return None if line is None else Path(line.split("\t")[2]).name


def test_each_run_is_begun_once_per_start_of_the_job(jobs: list[BatchJob]) -> None:
    mark_cancelled(jobs[0].paths)
    add_job(jobs[1].paths, "13")  # resumed meanwhile
    assert [begun(jobs), begun(jobs)] == ["run2", None]
    assert record_of(jobs[2].paths.attempt(1)).ranks == 1
    again = [replace(entry, restart=1) for entry in jobs]
    assert [begun(again, SLURM_RESTART_COUNT="1"), begun(again)] == ["run2", None]
    assert record_of(jobs[2].paths.attempt(2)).restart == 1


def test_a_run_that_restarts_in_place_stays_in_its_slot(jobs: list[BatchJob]) -> None:
    assert begun(jobs) == "run0"
    in_place = {FOLDER_VARIABLE: str(jobs[0].paths.folder), "HPC_TRAIN_IN_PLACE": "1"}
    assert begun(jobs, **in_place) == "run0"
    assert [begun(jobs), begun(jobs), begun(jobs)] == ["run1", "run2", None]


@pytest.mark.parametrize(
    "shown",
    [
        "StartTime=2026-01-01T00:00:00 PreemptTime=2026-01-01T01:00:00",
        "StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T02:00:00",  # long ago
    ],
)
def test_no_run_begins_in_a_job_that_is_about_to_end(jobs: list[BatchJob], shown: str) -> None:
    assert begun(jobs) == "run0"
    jobs[0].note_verdict("stop 0")
    assert begun(jobs, HPC_TRAIN_JOB=f"JobId=12 {shown} Power=") is None
    jobs[0].stopping.touch()
    assert begun(jobs) is None
    assert verdict_on_slots(jobs, 0) == "requeue 75"


@pytest.mark.parametrize(
    ("verdicts", "slot_code", "expected"),
    [
        (["stop 0", "stop 0", "stop 0"], 0, "stop 0"),
        (["stop 0", "stop 1", "stop 0"], 0, "stop 1"),
        (["stop 65", "requeue 75 n2,n1", "requeue 75 n3"], 0, "requeue 75 n1,n2,n3"),
        (["stop 0", "requeue 75"], 0, "requeue 75"),
        (["stop 0", None], 0, "requeue 75"),  # no time was left for it
        ([None, None], 1, "stop 1"),  # no slot can begin anything
        (["stop 0", ""], 1, "stop 1"),  # the slot of the second run died
    ],
)
def test_the_jobs_verdict_is_composed_of_its_runs(
    jobs: list[BatchJob], verdicts: list[str | None], slot_code: int, expected: str
) -> None:
    jobs = jobs[: len(verdicts)]
    for entry, verdict in zip(jobs, verdicts, strict=True):
        if verdict is not None:
            assert entry.claim() and not entry.claim()
            entry.note_verdict(verdict)
    assert verdict_on_slots(jobs, slot_code) == expected


def test_the_output_of_a_run_is_its_part_of_a_slots_file(jobs: list[BatchJob]) -> None:
    folder = jobs[0].submission.folder
    lines = [f"{MARK} 1 of run run{number}, job 12, now\nof {number}\n" for number in (0, 2)]
    (folder / "12_slot0_log.out").write_text("".join(lines))
    (folder / "12_slot1_log.out").write_text(f"{MARK} 1 of run run1, job 12, now\nof 1\n")
    found = [output_of(folder, "12", 1, f"run{number}").split("\n")[1] for number in range(3)]
    assert found == ["of 0", "of 1", "of 2"]


def test_status_of_a_run_whose_job_runs_others(jobs: list[BatchJob]) -> None:
    paths = jobs[1].paths

    def shown(state: str = "RUNNING", restarts: int = 0) -> str | None:
        status = status_of(Folder.read(paths), job("12", state, restarts=restarts, nodes="n1"))
        return f"{status.state}: {status.reason}"

    assert shown() == "pending: waits for a slot of job 12"
    assert begun(jobs[1:]) == "run1"
    write_status(paths, replace(read_status(paths), state="requeued", reason="hang"))
    assert shown() == "requeued: hang; job 12 is requeued once its other runs have ended"
    assert shown(restarts=1) == "requeued: hang; waits for a slot of job 12"


def test_a_failed_run_stays_failed_when_its_job_is_requeued(jobs: list[BatchJob]) -> None:
    paths = jobs[1].paths
    write_status(paths, replace(read_status(paths), state="failed", reason="not trusted"))
    status = status_of(Folder.read(paths), job("12", "PENDING", restarts=1))
    assert (status.state, status.reason) == ("failed", "not trusted")


@pytest.mark.parametrize(
    ("limits", "queued", "remedy"),
    [
        (
            "vision|10",
            2,
            "and 2 are in the queue; slurm.runs_per_job: 4 makes 8 jobs of 32 runs",
        ),
        ("vision|20", 0, "you may have 20 jobs; slurm.runs_per_job: 2 makes 16 jobs of 32 runs"),
        ("vision|3", 3, "3 of your jobs are in the queue, and 3 may be; wait until others have ended"),
        ("vision|", 0, "or train several in one job: slurm.runs_per_job"),
    ],
)
def test_too_many_runs_for_the_site_would_fit_in_fewer_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, queued: int, remedy: str
) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("sacctmgr", f"case $* in *associations*) echo '{limits}' ;; esac")
    programs.put("squeue", f"seq 1 {queued}")
    (problem,) = job_refusals.refused("sbatch: error: AssocMaxSubmitJobLimit", experiment(), 32)
    assert problem.key == "slurm" and remedy in problem.remedy, problem.remedy


def test_more_runs_than_a_node_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("sinfo", "echo '16|64000|gpu:a100:4|(null)'")
    programs.put("scontrol", "echo PartitionName=low TotalNodes=1")
    slurm = {"runs_per_job": 4, "partition": "low", "gpus_per_node": 1, "cpus_per_gpu": 4, "mem_gb": 30}
    (problem,) = job_refusals.node_problems(experiment(slurm=slurm))
    assert problem.key == "slurm.runs_per_job"
    assert problem.message == "4 runs need 16 cores, 4 GPUs, 120 GB; a node has room for 2 of them"
    slurm |= {"runs_per_job": 12, "runs_per_gpu": 2, "cpus_per_gpu": 2, "mem_gb": 5}
    (problem,) = job_refusals.node_problems(experiment(slurm=slurm))
    assert problem.message == "12 runs need 24 cores, 6 GPUs, 60 GB; a node has room for 8 of them"


def test_a_run_of_another_job_is_not_this_jobs(jobs: list[BatchJob]) -> None:
    environ = _ENVIRON | {FOLDER_VARIABLE: str(RunPaths(jobs[0].paths.folder.parent / "other").folder)}
    with pytest.raises(Exception, match="'other' is not a run of job 12"):
        BatchJob.of(jobs[0].submission.folder, environ)
