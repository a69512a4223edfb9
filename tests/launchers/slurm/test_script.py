"""The batch script, run by bash on programs that replace Slurm's: what set-up and tear-down do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UsageError
from hpc_train.launchers.slurm import sbatch, script
from hpc_train.launchers.slurm.profiles import Profile
from hpc_train.launchers.slurm.script import script_text
from hpc_train.launchers.slurm.submission import Batch
from hpc_train.run.file_shapes import decoded, encoded
from tests.launchers.slurm.programs import Programs
from tests.launchers.slurm.scripts import experiment, fake_batch, make_it_print
from tests.waiting import HANG_LIMIT_S, came_true

#: Drops its own options and runs what is left, as task 0.
SRUN = """\
while [[ $1 == -* ]]; do [[ $1 == --output && $2 != -* ]] && shift; shift; done
SLURM_PROCID=0 exec "$@"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    programs = Programs(tmp_path / "bin")
    programs.put("srun", SRUN)
    programs.put("squeue", "echo RUNNING")
    programs.put("scontrol", "true")
    programs.put("sleep", "true")
    return programs


def run(batch: Batch, programs: Programs, **environment: str) -> subprocess.CompletedProcess[str]:
    path = programs.folder / "script.sh"
    path.write_text(script_text(batch))
    own = {"PATH": f"{programs.folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", path],
        env=own | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )


def run_like_slurm(batch: Batch, programs: Programs, **environment: str) -> tuple[int, str]:
    """Return the exit code and what the script printed to stderr, which is a file as Slurm's is."""
    path, errors = programs.folder / "script.sh", programs.folder / "script.err"
    path.write_text(script_text(batch))
    errors.write_text("ERROR: of an earlier start\n")
    own = {"PATH": f"{programs.folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with errors.open("a") as file:
        done = subprocess.run(
            ["bash", path], env=own | environment, stdout=subprocess.DEVNULL, stderr=file, check=False
        )
    return done.returncode, errors.read_text()


@dataclass
class Job:
    """A job's script, with what its begin, ranks and after answer, and the programs that replace Slurm's."""

    batch: Batch
    programs: Programs

    def write(self, name: str, text: str) -> None:
        (self.batch.submission / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.batch.submission / name).read_text()

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(self.batch, self.programs, **environment)

    def orders(self) -> list[str]:
        return asked(self.programs)


@pytest.fixture
def job(tmp_path: Path, programs: Programs) -> Job:
    return Job(fake_batch(tmp_path), programs)


def use(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
    """Let every experiment have the profile of these keys."""
    profile = Profile.model_validate(keys)
    monkeypatch.setattr("hpc_train.launchers.slurm.profiles.find", lambda *_: profile)


def test_the_ranks_run_between_begin_and_after(job: Job) -> None:
    done = job.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert job.read("ranks") == "0 0 -\n"
    assert job.read("code") == "0"
    assert "--kill-on-bad-exit=1 --export=ALL" in job.programs.calls("srun")[0]
    assert job.orders() == []


def test_the_job_of_an_evaluation_requests_what_one_rank_has(tmp_path: Path) -> None:
    extra = {"exclusive": True, "hold": True, "nice": 5}
    slurm = {
        "nodes": 2,
        "gpus_per_node": 4,
        "cpus_per_gpu": 3,
        "mem_gb": 10,
        "time_limit": "2h",
        "extra": extra,
    }
    text = fake_batch(tmp_path, slurm=slurm, evaluation={"as_job": True}).evaluation
    assert text is not None
    options = set(re.findall("^#SBATCH --(.*)$", text, re.M))
    wanted = {
        "nodes=1",
        "ntasks-per-node=1",
        "gpus-per-node=1",
        "cpus-per-task=3",
        "mem=3G",
        "time=60",
        "nice=5",
    }
    assert wanted | {"requeue"} <= options
    assert not {"exclusive", "hold"} & options
    assert "srun" not in text.split("hpc_train_command()")[1]
    assert fake_batch(tmp_path / "other").evaluation is None


def test_the_rank_is_started_as_a_file_and_starts_submitit(job: Job, tmp_path: Path) -> None:
    (line,) = [line for line in script_text(job.batch).split("\n") if line.startswith("srun ")]
    rank = tmp_path / ".code/content/package/hpc_train/launchers/slurm/rank.py"
    assert f" -I -S {rank} " in line
    assert line.endswith(f" -u -m submitit.core._submit {job.batch.submission}")


def test_a_job_whose_start_slurm_does_not_bring_forward_is_requeued(job: Job) -> None:
    """Slurm refuses changes of a job that lost a node while it waits for its database."""
    job.programs.put("scontrol", "case $1 in update) exit 1 ;; esac")
    job.write("rank", "75")
    assert job.run().returncode == 75
    assert "requeue 7" in job.programs.calls("scontrol")
    assert job.read("code") == "75", "it did not say that Slurm refused"


def processes_with(text: str) -> list[str]:
    """Return the command lines of the processes with this text in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.parametrize("code", [0, 75])
def test_the_watch_over_the_first_node_ends_with_the_script(
    programs: Programs, tmp_path: Path, code: int
) -> None:
    """Slurm may not find it. It is a loop in the background, in a step or between two."""
    programs.put("srun", f"case $* in *name=watch*) touch {tmp_path}/watch; exit 1 ;; esac\n{SRUN}")
    programs.put("sleep", f"touch {tmp_path}/asleep; exec /bin/sleep 600")
    job = Job(fake_batch(tmp_path, slurm={"nodes": 2, "spare_nodes": 1}), programs)
    job.write("begin", f"1\tabc\t{job.batch.submission}/the run\tn1,n2|0")
    job.write("rank", str(code))
    rank = tmp_path / ".code/content/package/hpc_train/launchers/slurm/rank.py"
    wait = f"while not pathlib.Path('{tmp_path}/asleep').exists(): time.sleep(0.01)\n"
    rank.write_text(f"import pathlib, time\n{wait}{rank.read_text()}")
    done = job.run(MARK=f"watched-{tmp_path}", SLURMD_NODENAME="n1")
    assert done.returncode == code, done.stderr
    assert (tmp_path / "watch").exists()
    came_true(lambda: not processes_with(f"MARK=watched-{tmp_path}"), HANG_LIMIT_S / 10)
    assert processes_with(f"MARK=watched-{tmp_path}") == []


GREETING = "import atexit; print('Welcome'); print('stop 1'); atexit.register(print, 'Goodbye')\n"


@pytest.mark.parametrize("code", [0, 75])
def test_what_a_sites_python_prints_is_no_answer(job: Job, tmp_path: Path, code: int) -> None:
    """`begin` and `after` answer through a file."""
    job.write("rank", str(code))
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(GREETING)
    done = job.run(PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == code, done.stderr
    assert job.read("ranks") == "0 0 -\n"
    assert job.read("code") == str(code)
    assert ("requeue 7" in job.programs.calls("scontrol")) == (code == 75)
    assert not list(job.batch.submission.glob("answer-*"))


@pytest.mark.parametrize("code", [0, 75])
def test_a_snapshot_of_0_2_prints_its_answers(job: Job, tmp_path: Path, code: int) -> None:
    make_it_print(tmp_path)
    job.write("rank", str(code))
    assert job.run().returncode == code
    assert job.read("code") == str(code)
    job.write("begin", "|0")
    (job.batch.submission / "code").unlink()
    assert job.run().returncode == 0
    assert not (job.batch.submission / "code").exists()


@pytest.mark.parametrize(
    ("names", "kept"), [("CPU NODE", ""), ("CPU GPU", ""), ("NODE", "NODE"), ("CPU", "CPU")]
)
def test_srun_gets_one_memory_variable(tmp_path: Path, programs: Programs, names: str, kept: str) -> None:
    programs.put("srun", "env")
    environ = {f"SLURM_MEM_PER_{name}": "100" for name in names.split()} | {"TMPDIR": str(tmp_path / "gone")}
    output = run(fake_batch(tmp_path), programs, **environ).stdout
    assert re.findall(r"^SLURM_MEM_PER_(\w+)=", output, re.MULTILINE) == kept.split()
    assert "TMPDIR=" not in output


@pytest.mark.fault(36)
@pytest.mark.parametrize(("begin", "code"), [("|0", 0), ("|65", 65), ("1\tabc\t/x|65", 65), ("|77", 1)])
def test_a_refused_start_starts_no_rank_and_is_not_repeated(job: Job, begin: str, code: int) -> None:
    job.write("begin", begin)
    assert job.run(SLURM_RESTART_COUNT="1").returncode == code
    assert job.orders() == [] and job.programs.calls("srun") == []


def test_ranks_find_their_attempt_and_the_snapshots_code(tmp_path: Path, programs: Programs) -> None:
    runs = tmp_path / 'a b\'c "d" $(touch x) ñ'
    batch = fake_batch(runs)
    programs.put("srun", "env")
    done = run(batch, programs, PYTHONPATH="/site", SQUEUE_FORMAT="%A", SUBMITIT_PREEMPT_SIGNAL="USR1")
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    folder = f"{batch.submission}/the run"
    assert (told["HPC_TRAIN_ATTEMPT"], told["HPC_TRAIN_TOKEN"]) == ("1", "abc")
    assert told["HPC_TRAIN_RUN_FOLDER"] == folder
    assert told["PYTHONPATH"] == f"{runs}/.code/content/package:/site"
    assert [told[f"PYTHON{name}"] for name in ("SAFEPATH", "UNBUFFERED", "UTF8")] == ["1", "1", "1"]
    assert told["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/cache/inductor"
    assert told["SUBMITIT_EXECUTOR"] == "slurm"
    assert not {"SQUEUE_FORMAT", "SUBMITIT_PREEMPT_SIGNAL"} & set(told)
    assert not Path("x").exists() and not (tmp_path / "x").exists()


def test_the_profile_comes_first(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, setup=["export MARK=$((40 + 2))"], environment={"A": "$HOME 'x'", "NCCL_IB_DISABLE": 1})
    programs.put("srun", "env")
    told = run(fake_batch(tmp_path), programs).stdout.splitlines()
    assert {"MARK=42", "A=$HOME 'x'", "NCCL_IB_DISABLE=1"} <= set(told)


def test_the_caches_of_compiled_code_are_where_the_profile_or_the_user_wants_them(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, environment={"TORCHINDUCTOR_CACHE_DIR": "/node/inductor"})
    programs.put("srun", "env")
    told = run(fake_batch(tmp_path), programs, TRITON_CACHE_DIR="/node/triton").stdout.splitlines()
    assert {"TORCHINDUCTOR_CACHE_DIR=/node/inductor", "TRITON_CACHE_DIR=/node/triton"} <= set(told)


def test_without_modules_on_the_node_the_job_ends_and_says_why(tmp_path: Path, programs: Programs) -> None:
    modules = {"python": "/usr/bin/python3", "modules": ["cuda/12.8"]}
    nowhere = {"LMOD_PKG": str(tmp_path), "MODULESHOME": str(tmp_path)}
    done = run(fake_batch(tmp_path, environment=modules), programs, **nowhere)
    if shutil.which("modulecmd") is None:
        assert done.returncode == 1 and "this node knows no `module`" in done.stderr
        assert programs.calls("srun") == []


def test_modules_load_in_order(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    init = tmp_path / "init.sh"
    init.write_text(f'module() {{ echo "$*" >> {tmp_path}/loaded; [ "$2" != bad/1 ]; }}\n')
    use(monkeypatch, module_init=str(init))
    batch = fake_batch(tmp_path / "good", environment={"python": "/usr/bin/python3", "modules": ["a/1", "b"]})
    assert run(batch, programs).returncode == 0
    assert (tmp_path / "loaded").read_text() == "load a/1\nload b\n"
    modules = {"python": "/usr/bin/python3", "modules": ["bad/1", "b"]}
    done = run(fake_batch(tmp_path / "bad", environment=modules), programs)
    assert done.returncode == 1 and "`module load bad/1` failed" in done.stderr
    assert len(programs.calls("srun")) == 1


#: Environment Modules 3.2, and 5 with false_rendered, return 0 for a module that does not exist.
MODULES = """\
LOADEDMODULES=
module() {
  case $2 in
    tcl3/9) echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for '$2'" >&2 ;;
    tcl5/9) echo "ERROR: Unable to locate a modulefile for '$2'" >&2 ;;
    lmod/9) echo "Lmod has detected the following error: The following module(s) are unknown" >&2 ;;
    silent/9) ;;
    half/9) echo "ERROR: Unable to locate a modulefile for 'lib/2'" >&2; LOADEDMODULES=$LOADEDMODULES:$2 ;;
    gcc/12) LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}gcc/12.3 ;;
    swap) LOADEDMODULES=${LOADEDMODULES/gcc\\/12.3/swap\\/1} ;;
    alias) LOADEDMODULES=$LOADEDMODULES:other/1 ;;
    noisy/1) echo "this module has 3 known errors, see ERRORS.txt" >&2; LOADEDMODULES=$LOADEDMODULES:$2 ;;
    */*) LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$2 ;;
    *) LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$2/12.3 ;;
  esac
  return 0
}
"""


@pytest.mark.parametrize(
    ("modules", "failed"),
    [
        ("gcc a/1 alias noisy/1", None),
        ("gcc gcc/12 gcc/12.3", None),
        ("gcc tcl3/9", "`module load tcl3/9` failed"),
        ("gcc tcl5/9", "`module load tcl5/9` failed"),
        ("lmod/9 gcc", "`module load lmod/9` failed"),
        ("gcc silent/9", "`module load silent/9` failed"),
        ("silent/9", "`module load silent/9` failed"),
        ("gcc half/9", "`module load half/9` failed"),
        ("gcc/12 swap", "gcc/12 was unloaded by a later one"),
        ("gcc swap", "gcc was unloaded by a later one"),
    ],
)
def test_a_module_that_is_not_loaded_has_failed_whatever_the_exit_code(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch, modules: str, failed: str | None
) -> None:
    (tmp_path / "init.sh").write_text(MODULES)
    use(monkeypatch, module_init=str(tmp_path / "init.sh"))
    batch = fake_batch(tmp_path, environment={"python": "/usr/bin/python3", "modules": modules.split()})
    done = run(batch, programs)
    assert done.returncode == (failed is not None), done.stderr
    assert len(programs.calls("srun")) == (failed is None)
    assert failed is None or failed in done.stderr


#: Commands as set-up lines know them: some fail with exit code 0.
SETUP = """\
module() {
  case $* in
    "load there/1" | "restore there" | "use "*) MODULEPATH=${MODULEPATH:+$MODULEPATH:}$2; return 0 ;;
    "load "*) echo "ERROR: Unable to locate a modulefile for '$2'" >&2; return 0 ;;
    "restore "*) echo 'Lmod has detected the following error:  User module collection: "x" ...' >&2 ;;
  esac
  return 1
}
conda() { echo "EnvironmentNameNotFound: Could not find conda environment: $2" >&2; return 1; }
micromamba() { echo "critical libmamba Cannot activate, prefix does not exist" >&2; return 0; }
spack() { echo "==> Error: Spec '$2' matches no installed packages." >&2; return 0; }
"""


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ("module use /not/there", "`module use /not/there`: no such folder"),
        ("module load nope/1", "a line printed an error"),
        ("module restore nope", "`module restore nope` ended with exit code 1"),
        ("conda activate nope", "`conda activate nope` ended with exit code 1"),
        ("source activate nope", "a line printed an error"),
        ("micromamba activate nope", "a line printed an error"),
        ("spack load nope", "a line printed an error"),
        ("source /not/there", "`source /not/there` ended with exit code 1"),
        (". /not/there", "`. /not/there` ended with exit code 1"),
        (". inner.sh", "a line printed an error"),
        ("for i in 1; do\n  nosuchcommand $i\ndone", "`nosuchcommand $i` ended with exit code 127"),
        ("cd /not/there && module load there/1", None),
        (". harmless.sh", None),
        ("[ -d /not/there ] && module load there/1", None),
        ("if false; then module load nope/1; fi", None),
        ("module load there/1; module restore there", None),
        ("module load nope/1 2> /dev/null || true", None),
        ("export MODULEPATH=/usr:/of/the/site", None),
        ("echo it has 3 errors, see ERRORS.txt >&2", None),
    ],
)
def test_a_set_up_line_that_fails_ends_the_job_and_is_named(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch, line: str, failed: str | None
) -> None:
    (tmp_path / "init.sh").write_text(SETUP)
    (programs.folder / "activate").write_text("conda activate $1\ntrue\n")
    (programs.folder / "inner.sh").write_text("module load nope/1\ntrue\n")
    (programs.folder / "harmless.sh").write_text("true\n[ -f /not/there ] && echo there\n")
    lines = [f". {tmp_path}/init.sh", *line.split("\n"), "export MARK=set"]
    use(monkeypatch, setup=lines)
    code, errors = run_like_slurm(fake_batch(tmp_path), programs)
    assert code == (failed is not None), errors
    assert len(programs.calls("srun")) == (failed is None)
    if failed is not None:
        assert f"hpc-train: profile generic: setup: {failed}" in errors
    assert ("MODULEPATH: /of/the/site does not exist" in errors) == ("/of/the/site" in line)


def test_set_up_without_stderr(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, setup=["false"])
    done = run(fake_batch(tmp_path), programs)
    assert done.returncode == 1 and "`false` ended with exit code 1, see above" in done.stderr


def test_a_profiles_trap_stays(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, setup=["trap 'echo theirs >&2' ERR", "false"])
    done = run(fake_batch(tmp_path), programs)
    assert done.returncode == 0 and done.stderr.startswith("theirs\n")


#: Runs the command that follows the image.
APPTAINER = 'while [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"'
PODMAN = '[ "$1" = run ] || exit 0; while [[ $1 != */image:O ]]; do shift; done; shift; exec "$@"'
#: Its container outlives it: a signal for the shell and for podman ends podman.
LEAVING_PODMAN = """
cd {folder}
case $1 in
  run) bash -c 'trap "echo 75 > new; mv new code; exit" TERM; touch ready; while sleep 0.05; do :; done' &
    echo $! > pid; until [ -e ready ]; do sleep 0.05; done; kill -TERM $PPID $$; sleep 60 ;;
  kill) [ "$2 $3" = "--signal TERM" ] && kill -TERM "$(< pid)" ;;
  ps) [ -e left ] || echo 0123abcd; touch left ;;
  attach) until [ -e code ]; do sleep 0.05; done; exit {attached} ;;
esac
"""
PYXIS = f'[ "$*" = --help ] && echo "  --container-image=IMAGE" && exit\n{SRUN}'


def in_container(tmp_path: Path, **keys: Any) -> Batch:
    """Return the script of an experiment whose paths contain a blank, in a container with this Python."""
    environment = {"container": keys, "python": shutil.which("python3")}
    return fake_batch(
        tmp_path / "ru ns",
        environment=environment,
        data={"name": "digits", "root": "da ta", "cache": "packs"},
    )


def test_ranks_run_in_apptainer_which_sees_the_folders(tmp_path: Path, programs: Programs) -> None:
    programs.put("apptainer", APPTAINER)
    (tmp_path / "x.sif").touch()
    mounts = [str(tmp_path), f"{tmp_path}:/data:ro"]
    batch = in_container(tmp_path, image=f"{tmp_path}/x.sif", mounts=mounts, options=["--writable-tmpfs"])
    done = run(batch, programs)
    assert done.returncode == 0, done.stderr
    (call,) = programs.calls("apptainer")
    assert call.startswith(
        f"exec --nv --bind {tmp_path}/ru ns --bind {Path.cwd()} --bind {Path.cwd()}/da ta "
    )
    assert f"/packs --bind {tmp_path} --bind {tmp_path}:/data:ro --pwd {Path.cwd()} --writable-tmpfs " in call
    assert "rank.py" in call


def test_without_this_python_begin_and_after_run_in_apptainer(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.put("apptainer", APPTAINER)
    programs.put("scontrol", "printf 'n1\\nn2\\n'")
    (tmp_path / "x.sif").touch()
    monkeypatch.setattr("sys.executable", "/not/on/nodes/python")
    assert run(in_container(tmp_path, image=f"{tmp_path}/x.sif"), programs).returncode == 0
    calls = programs.calls("apptainer")
    assert len(calls) == 3, "begin, one rank, after"
    assert "-m hpc_train.launchers.slurm.begin" in calls[0] and "rank.py" in calls[1]
    done = run(in_container(tmp_path / "2", image=str(tmp_path), runtime="pyxis"), programs)
    assert done.returncode == 1 and "pyxis is not installed" in done.stderr
    programs.put("srun", PYXIS)
    done = run(in_container(tmp_path / "3", image=str(tmp_path), runtime="pyxis"), programs)
    assert done.returncode == 1 and "there is no /not/on/nodes/python on this node" in done.stderr


@pytest.mark.parametrize(("code", "ended_by"), [(0, 0), (75, 75), (137, -9), (143, -15)])
def test_ranks_run_in_podman_with_the_variables_of_the_job(
    tmp_path: Path, programs: Programs, code: int, ended_by: int
) -> None:
    """No value is on the command line. A rank that a signal ended is reported to Slurm as ended by it."""
    programs.put("podman", PODMAN)
    programs.put("srun", f"{SRUN.replace('exec ', '')}echo $? > {tmp_path}/code")
    (tmp_path / "image").mkdir()
    batch = in_container(tmp_path, image=f"{tmp_path}/image", runtime="podman")
    (batch.submission / "rank").write_text(str(code))
    done = run(batch, programs, TOKEN="secret", LD_LIBRARY_PATH="/of/the/node")
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "code").read_text()) == (128 - ended_by if ended_by < 0 else code)
    call, *_ = programs.calls("podman")
    assert call.startswith("run --rm --interactive --name hpc-train-7-0-")
    assert " --env TOKEN " in call and "secret" not in call and "LD_LIBRARY_PATH" not in call
    assert f" --workdir {Path.cwd()} --rootfs {tmp_path}/image:O {shutil.which('python3')} -I -S " in call
    assert "nvidia.com" not in call


@pytest.mark.parametrize(("attached", "code"), [(75, 75), (125, 128 + 15)], ids=["followed", "ended before"])
def test_a_rank_that_podman_leaves_at_a_signal_gets_it_and_is_followed(
    tmp_path: Path, programs: Programs, attached: int, code: int
) -> None:
    folder = tmp_path / "podman"
    folder.mkdir()
    programs.put("podman", LEAVING_PODMAN.format(folder=folder, attached=attached))
    programs.put("srun", f"{SRUN.replace('exec ', '')}echo $? > {tmp_path}/code")
    (tmp_path / "image").mkdir()
    done = run(in_container(tmp_path, image=f"{tmp_path}/image", runtime="podman"), programs)
    assert done.returncode == 0, done.stderr
    assert (folder / "code").read_text() == "75\n", "the rank got the signal"
    assert int((tmp_path / "code").read_text()) == code, done.stderr


def test_podman_gets_the_gpus_of_a_job_that_requests_some(tmp_path: Path) -> None:
    for number, keys in enumerate(({"gpus_per_node": 1}, {"extra": {"gres": "gpu:2"}})):
        container = {"image": "nvcr.io/nvidia/pytorch:25.01-py3", "runtime": "podman"}
        text = script_text(
            fake_batch(tmp_path / str(number), slurm=keys, environment={"container": container})
        )
        assert "--device=nvidia.com/gpu=all" in text and " nvcr.io/nvidia/pytorch:25.01-py3 python3 " in text


def test_ranks_run_in_pyxis_by_options_of_srun(tmp_path: Path, programs: Programs) -> None:
    programs.put("srun", PYXIS)
    batch = in_container(tmp_path, image="nvcr.io#nvidia/pytorch:25.01-py3", runtime="pyxis",
                         mounts=["/:/host:ro"], options=["--container-writable"])  # fmt: skip
    done = run(batch, programs)
    assert done.returncode == 0, done.stderr
    _, call = programs.calls("srun")
    folders = [f"{tmp_path}/ru ns", str(Path.cwd()), f"{Path.cwd()}/da ta", f"{Path.cwd()}/packs"]
    mounts = ",".join(f"{folder}:{folder}" for folder in folders)
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01-py3" in call
    assert f"--container-mounts={mounts},/:/host:ro --container-workdir={Path.cwd()} " in call
    assert "--container-env=PYTHONPATH," in call
    assert "--no-container-entrypoint --container-writable" in call


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"image": "/no/x.sif"}, ".image: there is no /no/x.sif on this node; correct the path"),
        ({"image": "docker://a", "mounts": ["/no/a:/b"]}, ".mounts[0]: there is no /no/a on this node"),
        (
            {"image": "docker://a", "options": ["--rocm"]},
            ".runtime: there is no program absent on this node; load",
        ),
        ({"image": "a", "runtime": "pyxis"}, ".runtime: srun has no option --container-image on this node"),
    ],
)
def test_a_node_that_cannot_run_the_container_is_named(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch, container: dict[str, Any], words: str
) -> None:
    programs.put("present", APPTAINER)
    use(monkeypatch, container_command="absent exec" if "options" in container else "present exec")
    done = run(in_container(tmp_path, **container), programs)
    assert done.returncode == 1 and f"hpc-train: environment.container{words}" in done.stderr, done.stderr
    assert not [call for call in programs.calls("srun") if call != "--help"]


def asked(programs: Programs) -> list[str]:
    """Return what scontrol was asked to do, without what it was only asked."""
    questions = ("--oneliner show job", "show config", "--version")
    return [call for call in programs.calls("scontrol") if not call.startswith(questions)]


def test_a_failed_start_on_another_node_is_requeued(job: Job) -> None:
    begin = job.batch.submission / "begin"
    begin.write_text("|1")
    assert job.run().returncode == 1
    assert job.orders() == [], "at the first start it is the environment that is wrong"
    for code in (65, 74):
        begin.write_text(f"|{code}")
        assert job.run(SLURM_RESTART_COUNT="1").returncode == code
        assert job.orders() == [], "a person's mistake and a full disk are the same on every node"
    begin.write_text("|1")
    for number in range(1, 5):
        done = job.run(SLURM_RESTART_COUNT=str(number))
        assert done.returncode == 1 and job.programs.calls("srun") == []
        assert len(job.orders()) == 2 * min(number, 3), done.stderr
    begin.unlink()
    job.run(SLURM_RESTART_COUNT="6")
    assert not list(job.batch.submission.glob("cannot-start-*")), "a start that went well counts anew"


#: scontrol of a version, and what it says of the job.
SCONTROL = """\
[ "$1" != --version ] || echo '{version}'
[ "$2" != show ] || echo 'JobId=7 Requeue=1 Restarts={restarts} BatchFlag=1 {preempted} TimeMin=N/A'
"""
NOT_PREEMPTED = "PreemptEligibleTime=2026-11-22T22:01:40 PreemptTime=None"
PREEMPTED = "PreemptEligibleTime=2026-11-22T22:01:40 PreemptTime=2026-11-22T22:01:46"


@pytest.mark.fault(1, 36)
@pytest.mark.parametrize(
    ("version", "restart", "preempted", "is_told"),
    [
        ("slurm-wlm 24.11.5", 1, NOT_PREEMPTED, True),
        ("slurm 26.05.3", 1, "", True),
        ("slurm 24.05.0-0rc1", 2, NOT_PREEMPTED, True),
        ("slurm-wlm 24.11.5", 0, PREEMPTED, True),
        ("slurm-wlm 24.11.5", 0, NOT_PREEMPTED, False),
        ("slurm-wlm 24.11.5", 0, "", False),
        ("slurm-wlm 22.05.8", 1, PREEMPTED, False),
        ("slurm 23.11.10", 1, PREEMPTED, False),
        ("", 1, PREEMPTED, False),
    ],
)
def test_a_run_that_has_ended_is_not_left_to_slurms_own_requeue(
    job: Job, version: str, restart: int, preempted: str, is_told: bool
) -> None:
    job.write("after", "stop 65")
    job.programs.put("scontrol", SCONTROL.format(version=version, restarts=restart, preempted=preempted))
    assert job.run(SLURM_RESTART_COUNT=str(restart)).returncode == 65
    assert job.orders() == (["update JobId=7 Requeue=0"] if is_told else [])


@pytest.mark.parametrize("begin", ["|0", "|65", "|77"])
def test_slurm_does_not_requeue_an_ended_run(job: Job, begin: str) -> None:
    job.write("begin", begin)
    job.programs.put("scontrol", SCONTROL.format(version="slurm 24.11.5", restarts=1, preempted=""))
    job.run(SLURM_RESTART_COUNT="1")
    assert job.orders() == ["update JobId=7 Requeue=0"]


REQUEUE_EXIT = """\
[ "$*" != "show config" ] ||
  printf 'RequeueExit             = {codes}\\nRequeueExitHold         = {held}\\n'
"""


@pytest.mark.parametrize(
    ("codes", "held", "code"),
    [
        ("(null)", "(null)", 65),
        ("1,65-67", "(null)", 3),
        ("(null)", "60-70", 1),
        ("1-5,65", "7", 6),
        ("66", "1", 65),
    ],
)
def test_the_exit_code_is_not_in_requeue_exit(job: Job, codes: str, held: str, code: int) -> None:
    job.write("after", "stop 65")
    job.programs.put("scontrol", REQUEUE_EXIT.format(codes=codes, held=held))
    assert job.run().returncode == code
    assert job.orders() == [], "a requeue by hand is possible"


def test_without_listed_codes_requeue_is_turned_off(job: Job) -> None:
    job.write("after", "stop 65")
    job.programs.put("scontrol", 'case "$*" in "show config") echo "KillWait = 30 sec";; esac')
    assert job.run().returncode == 65
    assert job.orders() == ["update JobId=7 Requeue=0"]
    job.programs.put("scontrol", "exit 1")  # of a Slurm that does not answer nothing is known
    assert job.run().returncode == 65
    assert job.orders() == ["update JobId=7 Requeue=0"]


def test_a_requeue_that_slurm_refuses_is_written_down_and_not_repeated(job: Job) -> None:
    job.write("rank", "75")
    job.programs.put("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    done = job.run()
    assert done.returncode == 75
    assert "Slurm refuses to requeue job 7: Requested operation is presently disabled" in done.stderr
    told = job.read("code")
    assert told == "refused Slurm refuses to requeue job 7: Requested operation is presently disabled"
    assert len(job.orders()) == 1


def test_times_of_the_job_are_in_utc(job: Job) -> None:
    """A container may lack the node's time zone."""
    job.programs.put("scontrol", 'echo Welcome; echo "JobId=7 EndTime=$(date -d @0 +%FT%T)"')
    job.run(TZ="IST-5:30", SLURM_TIME_FORMAT="%s")
    assert job.read("shown") == "TimeZone=UTC JobId=7 EndTime=1970-01-01T00:00:00"


def test_a_lost_nodes_script_leaves_the_next_start(job: Job) -> None:
    job.write("after", "stop 1")
    job.programs.put("scontrol", SCONTROL.format(version="slurm 24.11.5", restarts=2, preempted=""))
    job.run(SLURM_RESTART_COUNT="1")
    assert job.orders() == []


@pytest.mark.parametrize(
    ("dependency", "code", "is_told"),
    [
        ("afterok:7(unfulfilled)", 0, False),
        ("afterany:3(unfulfilled),aftercorr:7(unfulfilled)", 0, False),
        ("afterok:77(unfulfilled)", 0, True),
        ("afterany:7(unfulfilled)", 0, True),
        ("afterok:7(unfulfilled)", 1, True),
        ("(null)", 0, True),
    ],
)
def test_dependent_jobs_see_success(job: Job, dependency: str, code: int, is_told: bool) -> None:
    """Slurm calls a job that it may not requeue PREEMPTED, so ``afterok`` would never be fulfilled."""
    job.write("after", f"stop {code}")
    job.programs.put("scontrol", SCONTROL.format(version="slurm 24.11.5", restarts=1, preempted=""))
    job.programs.put("squeue", f"echo '(null)'; echo '{dependency}'")
    job.run(SLURM_RESTART_COUNT="1")
    assert job.orders() == (["update JobId=7 Requeue=0"] if is_told else [])


def test_a_slurm_that_may_start_an_ended_job_again_is_told_of(job: Job) -> None:
    answers = SCONTROL.format(version="slurm 24.11.5", restarts=1, preempted="")
    job.programs.put("scontrol", f"{answers}[ $1 != update ] || {{ echo 'connect failure' >&2; exit 1; }}")
    done = job.run(SLURM_RESTART_COUNT="1")
    assert "Slurm may start job 7 again though it has ended: connect failure" in done.stderr
    assert job.programs.calls("sleep") == ["1", "2", "4", "8", "0"]


def told_of(excluded: str) -> str:
    """Return a scontrol whose job excludes these nodes."""
    return f"[ $2 != show ] || echo 'JobId=7 Restarts=0 ExcNodeList={excluded} NodeList=n1'"


def leaving_out(tmp_path: Path, programs: Programs, excluded: str = "(null)", **slurm: Any) -> Batch:
    batch = fake_batch(tmp_path, slurm=slurm)
    (batch.submission / "after").write_text("requeue 75 n2,n3")
    (batch.submission / "the run/attempts/1").mkdir(parents=True)
    programs.put("sbatch", "true")
    programs.put("scontrol", told_of(excluded))
    return batch


@pytest.mark.fault(14)
@pytest.mark.parametrize(("own", "nodes"), [(None, "n2,n3"), ("n[7-9]", "n[7-9],n2,n3")])
def test_a_requeue_excludes_nodes(tmp_path: Path, programs: Programs, own: str | None, nodes: str) -> None:
    done = run(leaving_out(tmp_path, programs, exclude=own), programs)
    assert done.returncode == 75, done.stderr
    changes = [f"update JobId=7 ExcNodeList={nodes}", "update JobId=7 StartTime=now+5"]
    assert asked(programs) == ["requeue 7", *changes]
    assert programs.calls("sbatch")[0].startswith(f"--test-only --exclude={nodes} /")


def test_nodes_whose_time_is_over_are_given_back(tmp_path: Path, programs: Programs) -> None:
    batch = leaving_out(tmp_path, programs, excluded="n2,n9", exclude="n9")
    (batch.submission / "after").write_text("requeue 75")
    assert run(batch, programs).returncode == 75
    assert "update JobId=7 ExcNodeList=n9" in asked(programs)
    programs.put("scontrol", told_of("n9"))
    assert run(batch, programs).returncode == 75
    assert asked(programs)[-2:] == ["requeue 7", "update JobId=7 StartTime=now+5"], "as it is already"


def test_a_file_of_nodes_is_known_by_slurms_own_list(tmp_path: Path, programs: Programs) -> None:
    batch = leaving_out(tmp_path, programs, excluded="n9", exclude="/etc/bad")
    run(batch, programs)
    assert "update JobId=7 ExcNodeList=n9,n2,n3" in asked(programs)


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("refusal", "free", "is_left_out"),
    [
        ("allocation failure: Requested node configuration is not available", 99, False),
        ("allocation failure: Invalid node name specified", 99, False),
        ("allocation failure: Access/permission denied", 4, True),
        ("allocation failure: Access/permission denied", 3, False),
    ],
)
def test_nodes_are_not_excluded_if_none_remain(
    tmp_path: Path, programs: Programs, refusal: str, free: int, is_left_out: bool
) -> None:
    batch = leaving_out(tmp_path, programs)
    programs.put("sbatch", f"echo '{refusal}' >&2; exit 1")
    programs.put("sinfo", f"echo 1; echo {free - 1}")
    done = run(batch, programs, SLURM_JOB_NUM_NODES="2", SLURM_JOB_PARTITION="low")
    assert done.returncode == 75
    assert ("update JobId=7 ExcNodeList=n2,n3" in asked(programs)) == is_left_out
    assert asked(programs)[0] == "requeue 7"
    kept = batch.submission / "the run/attempts/1/kept-nodes"
    assert kept.exists() != is_left_out
    assert ("can't exclude n2,n3" in done.stderr) != is_left_out


def test_slurms_refusal_to_leave_nodes_out_is_told_and_harmless(tmp_path: Path, programs: Programs) -> None:
    batch = leaving_out(tmp_path, programs)
    programs.put(
        "scontrol", f"{told_of('(null)')}\n[[ $3 != Exc* ]] || {{ echo 'Access denied' >&2; exit 1; }}"
    )
    done = run(batch, programs)
    assert done.returncode == 75
    assert "Slurm refuses to exclude n2,n3: Access denied" in done.stderr
    assert asked(programs)[-1] == "update JobId=7 StartTime=now+5"


@pytest.mark.fault(14)
def test_a_job_on_an_excluded_node_requests_another(tmp_path: Path, programs: Programs) -> None:
    batch = leaving_out(tmp_path, programs)
    (batch.submission / "begin").write_text("n2|78")
    done = run(batch, programs)
    assert done.returncode == 75, done.stderr
    assert programs.calls("srun") == []
    changes = ["update JobId=7 ExcNodeList=n2", "update JobId=7 StartTime=now+5"]
    assert asked(programs) == ["requeue 7", *changes]


def test_a_job_that_can_have_no_other_nodes_takes_what_it_has(tmp_path: Path, programs: Programs) -> None:
    batch = leaving_out(tmp_path, programs)
    programs.put("sbatch", "echo Requested node configuration is not available >&2; exit 1")
    begin = tmp_path / ".code/content/package/hpc_train/launchers/slurm/begin.py"
    any_node = "import os\nif 'HPC_TRAIN_ANY_NODE' not in os.environ: print('n2'); raise SystemExit(78)\n"
    begin.write_text(any_node + begin.read_text())
    (batch.submission / "after").write_text("stop 0")
    done = run(batch, programs)
    assert done.returncode == 0, done.stderr
    assert asked(programs) == [] and len(programs.calls("srun")) == 1


#: `after`, which gives one answer after the other.
ANSWERS = """\
import os, pathlib, sys
answers = pathlib.Path(sys.argv[1], "answers")
first, _, rest = answers.read_text().partition("\\n")
answers.write_text(rest)
pathlib.Path(os.environ["HPC_TRAIN_ANSWER"]).write_text(first + "\\n")
"""


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize(
    ("answers", "code", "attempts"),
    [
        (["again 0 2\tdef\tFOLDER/run 1", "stop 0"], 0, ["1 abc", "2 def"]),
        (["again", "stop 0"], 0, ["1 abc", "1 abc"]),  # of a snapshot whose `after` does not begin an attempt
        (["again 0 2\tdef\tFOLDER/run 1", "again 77"], 1, ["1 abc", "2 def"]),
        (["again 65"], 65, ["1 abc"]),
        (["again 0"], 0, ["1 abc"]),  # cancelled meanwhile
    ],
)
def test_the_next_attempt_begins_in_place(
    tmp_path: Path, programs: Programs, answers: list[str], code: int, attempts: list[str], standby: bool
) -> None:
    """The fake snapshot's ranks know no standby, as those of an older version."""
    batch = fake_batch(tmp_path, recovery={"standby": standby})
    (batch.submission / "answers").write_text("\n".join(answers).replace("FOLDER", str(batch.submission)))
    (tmp_path / ".code/content/package/hpc_train/launchers/slurm/after.py").write_text(ANSWERS)
    started = batch.submission / "started"
    programs.put("srun", f'echo "$HPC_TRAIN_ATTEMPT $HPC_TRAIN_TOKEN" >> {started}')
    done = run(batch, programs)
    assert (done.returncode, done.stderr) == (code, ""), done.stderr
    assert started.read_text().splitlines() == attempts


_REQUEUED = ["requeue 7", "update JobId=7 StartTime=now+5"]
_BANNER = "echo 'NOTICE: Restarts=9 soon'; echo 'JobId=7 Restarts=0 BatchFlag=1'"
_NEXT_START = "echo ' JobId=7 Requeue=1 Restarts=1 BatchFlag=1'"
_LOST = '[ "$1" != requeue ] || { touch {done}; exit 1; }'
_LISTED = "echo 'JobId=7 JobName=x JobState=RUNNING Reason=None Restarts=0 BatchFlag=1'"


@pytest.mark.parametrize(
    ("squeue", "scontrol", "orders", "message"),
    [
        ("echo RUNNING", "true", _REQUEUED, ""),
        ("echo 'Welcome to slurm 24.11'; echo; echo 'RUNNING '; echo '-- use it --'", _BANNER, _REQUEUED, ""),
        ("true", _LISTED, _REQUEUED, ""),  # only scontrol lists the job
        ("[ $(wc -l < {calls}) -gt 2 ] && echo RUNNING || echo SIGNALING", "true", _REQUEUED, ""),
        ("[ $(wc -l < {calls}) -gt 2 ] && echo RUNNING || echo RESIZING", "true", _REQUEUED, ""),
        ("[ $(wc -l < {calls}) -gt 2 ] && echo RUNNING || echo SUSPENDED", "true", _REQUEUED, ""),
        # The answer to the requeue was lost.
        ("[ -e {done} ] && echo PENDING || echo RUNNING", _LOST, _REQUEUED, ""),
        # The script of a lost node leaves the job's next start alone.
        ("echo RUNNING", _NEXT_START, [], "continues as its restart 1"),
        ("echo RUNNING", f"echo 'NOTICE: Restarts=0 soon'; {_NEXT_START}", [], "continues as its restart 1"),
        ("echo CANCELLED", "true", [], "is not requeued, it is CANCELLED"),
        ("echo COMPLETING", "true", [], "is not requeued, it is COMPLETING"),
        ("echo PENDING", "true", [], "is not requeued, it is PENDING"),
    ],
)
def test_a_preempted_job_is_requeued_if_it_runs(
    tmp_path: Path, job: Job, squeue: str, scontrol: str, orders: list[str], message: str
) -> None:
    job.write("rank", "75")
    files = {"calls": f"{job.programs.folder}/squeue.calls", "done": tmp_path / "done"}
    job.programs.put("squeue", squeue.format(**files))
    job.programs.put("scontrol", scontrol.replace("{done}", str(files["done"])))
    done = job.run()
    assert done.returncode == 75 and message in done.stderr
    assert job.orders() == orders
    assert job.read("code") == "75"
    assert scontrol != _LOST or done.stderr == ""
    assert scontrol != _LISTED or job.programs.calls("sleep") == []


def test_an_arrays_task_is_requeued_by_its_own_name(job: Job) -> None:
    job.write("rank", "75")
    job.run(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert job.programs.calls("squeue") == ["--noheader --format=%T --jobs=7_3"]
    assert job.orders()[0] == "requeue 7_3"


def test_the_requeues_own_signal_does_not_end_the_script(job: Job) -> None:
    job.write("rank", "75")
    job.programs.put("scontrol", '[ "$1" = requeue ] && kill -TERM $PPID $$; true')
    done = job.run()
    assert done.returncode == 75
    assert len(job.orders()) == 2


@pytest.mark.parametrize(
    "words",
    [
        "Unable to contact slurm controller (connect failure)",
        "Slurm backup controller in standby mode",
        "Protocol authentication error",
    ],
)
def test_the_requeue_waits_for_a_slurm_that_does_not_answer(job: Job, words: str) -> None:
    job.write("rank", "75")
    count = f"$(wc -l < {job.programs.folder}"
    job.programs.put("squeue", f"[ {count}/squeue.calls) -gt 3 ] && echo RUNNING || exit 1")
    refusal = f"echo 'slurm_requeue error: {words}' >&2; exit 1"
    requeues = f"$(grep -c ^requeue {job.programs.folder}/scontrol.calls)"
    job.programs.put("scontrol", f"[ $1 != requeue ] || [ {requeues} -gt 2 ] || {{ {refusal}; }}")
    assert job.run().returncode == 75
    assert job.programs.calls("sleep") == ["1", "2", "4", "8", "16"]
    assert job.orders()[-2:] == ["requeue 7", "update JobId=7 StartTime=now+5"]


@pytest.mark.parametrize(
    ("verdict", "code"), [("stop 0", 0), ("stop 65", 65), ("", 1), ("requeue", 1), ("x 3", 1)]
)
def test_the_script_ends_as_the_verdict_says(job: Job, verdict: str, code: int) -> None:
    job.write("after", verdict)
    done = job.run()
    assert done.returncode == code
    assert job.orders() == []
    assert ("no verdict" in done.stderr) == (not verdict.startswith("stop"))


@pytest.mark.parametrize("name", ["a%j", "a\\b", "a\nb", "a\tb", "a\x1bb", "a\u2028b", "a:b"])
def test_paths_that_no_script_can_hold_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="set HPC_TRAIN_RUNS to another folder"):
        fake_batch(tmp_path / name)


def test_a_container_takes_no_commas_in_paths(tmp_path: Path) -> None:
    fake_batch(tmp_path / "a,b")
    with pytest.raises(UsageError, match="','"):
        fake_batch(tmp_path / "c,d", environment={"container": "x.sif"})


def test_every_kind_of_script_is_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections: list[dict[str, Any]] = [
        {},
        {"slurm": {"nodes": "2-4", "gpus_per_node": 2, "cpus_per_gpu": 3, "extra": {"exclusive": True}}},
        {"environment": {"modules": ["a/1"], "container": "docker://a/b:c"}},
        {"environment": {"container": {"image": "a/b:c", "runtime": "podman", "mounts": ["/a:/b:ro"]}}},
        {"environment": {"container": {"image": "a/b:c", "runtime": "pyxis"}}},
    ]
    for number, keys in enumerate(sections * 2):
        if number == len(sections):
            use(monkeypatch, module_init="/x", setup=["true"], environment={"A": 1}, network_interface="ib0")
        text = script_text(fake_batch(tmp_path / f"{number} '"[:-1], **keys), 3)
        path = tmp_path / "script.sh"
        path.write_text(text)
        assert subprocess.run(["bash", "-n", path], check=False, capture_output=True).stderr == b""
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "--exclude=SC1090,SC1091", path], check=True)


def test_what_is_inserted_is_quoted_and_nothing_is_left_out() -> None:
    assert script.quoted(["a b", "c'd", 3]) == "'a b' 'c'\"'\"'d' 3"
    with pytest.raises(TypeError):
        script.quoted({"a": 1})


def test_a_batch_survives_its_record(job: Job) -> None:
    assert decoded(Batch, json.loads(json.dumps(encoded(job.batch)))) == job.batch


def test_callers_variables_are_hidden(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.put("sbatch", f"env > {tmp_path}/seen; echo Submitted batch job 12")
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    for name in ("PARTITION", "ACCOUNT", "EXPORT", "ARRAY_INX"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    for name in ("JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "CONF"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    # torchrun's of the shell that submits: ranks of all runs would meet there.
    for name in ("HPC_TRAIN_ATTEMPT", "MASTER_ADDR", "MASTER_PORT", "MINE"):
        monkeypatch.setenv(name, "1")
    before = dict(os.environ)
    batch = fake_batch(tmp_path, slurm={"partition": "gpu"})
    sbatch.sbatch(batch)
    assert dict(os.environ) == before
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    names = {name for name in seen if name.startswith(("SBATCH", "SLURM", "HPC_TRAIN_A", "MASTER", "MINE"))}
    assert names == {"SBATCH_ACCOUNT", "SLURM_CONF", "MINE"}
    assert "CUDA_VISIBLE_DEVICES" not in seen


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_NTASKS", "SLURM_NTASKS_PER_GPU",
        "SLURM_CPUS_PER_TASK",
        "SLURM_TRES_PER_TASK", "SLURM_EXPORT_ENV", "SLURM_CPU_BIND", "SLURM_WORKING_DIR",
        "SRUN_CPUS_PER_TASK",
        "SLURM_JOBID", "TORCHELASTIC_USE_AGENT_STORE",
    ],
)  # fmt: skip
def test_a_variable_that_only_srun_or_torch_reads_is_hidden_in_any_shell(tmp_path: Path, name: str) -> None:
    parameters = fake_batch(tmp_path).parameters
    environ = {name: "1", "SLURM_CONF": "a", "SLURM_CLUSTERS": "b", "CUDA_VISIBLE_DEVICES": "0"}
    kept = environ.keys() - {name}
    assert script.job_environment(parameters, environ).keys() == kept


def test_the_cluster_is_sbatchs(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.put("sbatch", f"echo $SLURM_CLUSTERS > {tmp_path}/seen; echo Submitted batch job 12")
    programs.put("squeue", f"echo ${{SLURM_CLUSTERS-own}} >> {tmp_path}/seen; echo RUNNING")
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CLUSTERS", "big")
    batch = fake_batch(tmp_path)
    sbatch.sbatch(batch)
    (batch.submission / "rank").write_text("75")
    run(batch, programs, SLURM_CLUSTERS="big")
    assert (tmp_path / "seen").read_text().split() == ["big", "own"]


def test_array_with_a_node_range(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.put("sbatch", "echo Submitted batch job 12")
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    assert sbatch.sbatch(fake_batch(tmp_path, slurm={"nodes": "2-4"}), 2) == "12"
    assert len(programs.calls("sbatch")) == 1


def test_a_script_is_shown_where_there_is_no_slurm(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "#SBATCH --job-name=exp" in script_text(job.batch)
    assert experiment().slurm is not None
