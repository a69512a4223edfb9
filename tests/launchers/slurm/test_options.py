"""From the experiment to sbatch's options, read off the script that submitit makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment, SlurmConfig
from hpc_train.launchers.slurm.options import lead_s, sbatch_parameters, shape
from hpc_train.launchers.slurm.profiles import Profile, find
from hpc_train.launchers.slurm.script import script_text
from hpc_train.launchers.slurm.submission import Batch
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.attempts import AttemptRecord, now, write_record
from tests.launchers.slurm.scripts import experiment

ALWAYS = {
    "job-name=exp", "nodes=1", "ntasks-per-node=1", "open-mode=append", "output=/r/%j_0_log.out",
    "propagate=NONE", "requeue", "signal=USR2@120", "hold",
}  # fmt: skip
GENERIC = Profile()


def options_of(asked: Experiment, profile: Profile = GENERIC, *, runs: int = 1, **how: Any) -> set[str]:
    """Return the lines of the script that sbatch reads."""
    given = {"lead_s": 120, "max_parallel": None} | how
    text = script_text(Batch(Path("/r"), "python", sbatch_parameters(asked, profile, **given)), runs)
    return {line.removeprefix("#SBATCH --") for line in text.split("\n") if line.startswith("#SBATCH --")}


def test_a_plain_file_asks_for_nothing_but_a_job_that_comes_back() -> None:
    # No time limit (submitit would send 5 minutes), no wckey, no partition.
    assert options_of(experiment()) == ALWAYS


@pytest.mark.parametrize(
    ("slurm", "lines"),
    [
        ({"nodes": 3}, {"nodes=3"}),
        ({"nodes": 3, "spare_nodes": 2}, {"nodes=5", "no-kill"}),
        ({"time_limit": "90min"}, {"time=90"}),
        ({"gpus_per_node": 4}, {"gpus-per-node=4", "ntasks-per-node=4"}),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, {"gpus-per-node=a100:4", "ntasks-per-node=4"}),
        ({"gpus_per_node": 4, "ranks_per_node": 2}, {"gpus-per-node=4", "ntasks-per-node=2"}),
        (
            {"gpus_per_node": 4, "ranks_per_node": 2, "cpus_per_gpu": 3},
            {"gpus-per-node=4", "ntasks-per-node=2", "cpus-per-task=6"},
        ),
        ({"ranks_per_node": 2, "cpus_per_gpu": 3}, {"ntasks-per-node=2", "cpus-per-task=3"}),
        ({"mem_gb": 64}, {"mem=64G"}),
        ({"mail": "a+b@c.org"}, {"mail-user=a+b@c.org", "mail-type=END,FAIL"}),
        ({"partition": "a,b"}, {"partition=a,b"}),
        ({"account": "x"}, {"account=x"}),
        ({"qos": "high"}, {"qos=high"}),
        ({"constraint": "[a*2&b]|c"}, {"constraint='[a*2&b]|c'"}),
        ({"exclude": "n[1-3],n7"}, {"exclude='n[1-3],n7'"}),
        ({"reservation": "course"}, {"reservation=course"}),
        ({"dependency": "afterok:12?afterany:13_4"}, {"dependency='afterok:12?afterany:13_4'"}),
        (
            {"extra": {"exclusive": True, "nice": -5, "mem_bind": "local"}},
            {"exclusive", "nice=-5", "mem-bind=local"},
        ),
        ({"extra": {"hold": True}}, set()),
    ],
)
def test_each_key_reaches_sbatch(slurm: dict[str, Any], lines: set[str]) -> None:
    replaced = {line.partition("=")[0] for line in lines}
    kept = {line for line in ALWAYS if line.partition("=")[0] not in replaced}
    assert options_of(experiment(slurm=slurm)) == kept | lines


@pytest.mark.parametrize(
    ("slurm", "cores"),
    [
        ({}, {"mincpus=1"}),
        ({"gpus_per_node": 4, "ranks_per_node": 2}, {"mincpus=2", "gpus-per-node=4"}),
        ({"ranks_per_node": 2, "cpus_per_gpu": 3}, {"mincpus=6", "cpus-per-task=3"}),
        ({"extra": {"mincpus": 8}}, {"mincpus=8"}),
    ],
)
def test_a_range_of_nodes_requests_cores_not_tasks(slurm: dict[str, Any], cores: set[str]) -> None:
    kept = ALWAYS - {"nodes=1", "ntasks-per-node=1"}
    assert options_of(experiment(slurm={"nodes": "2-4"} | slurm)) == kept | {"nodes=2-4"} | cores


def test_an_array_is_throttled_only_where_the_file_says_so() -> None:
    assert "array=0-299%300" in options_of(experiment(), runs=300)
    assert "array=0-299%2" in options_of(experiment(), runs=300, max_parallel=2)
    assert not any(line.startswith("array") for line in options_of(experiment(), runs=1, max_parallel=2))


def test_the_warnings_lead_is_ours_whatever_submitits_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("submitit.slurm.slurm.SlurmJobEnvironment.USR_SIG", "USR1")
    assert "signal=USR2@77" in options_of(experiment(), lead_s=77)


def test_a_job_is_held_unless_told_otherwise() -> None:
    assert "hold" not in options_of(experiment(), held=False)


def test_gres_asks_for_gpus_as_a_generic_resource_beside_others() -> None:
    profile = Profile(gpus="gres")
    assert "gres=gpu:2" in options_of(experiment(slurm={"gpus_per_node": 2}), profile)
    slurm = {"gpus_per_node": 2, "gpu_type": "a100", "extra": {"gres": "lscratch:100"}}
    assert "gres=gpu:a100:2,lscratch:100" in options_of(experiment(slurm=slurm), profile)


def test_the_profiles_options_go_behind_the_files() -> None:
    profile = Profile(
        sbatch={"exclusive": True, "nice": 5}, defaults=SlurmConfig(partition="gpu", account="x")
    )
    lines = options_of(experiment(slurm={"account": "mine", "extra": {"nice": 9}}), profile)
    assert {"exclusive", "nice=9", "partition=gpu", "account=mine"} <= lines


def test_srun_is_told_what_it_does_not_inherit() -> None:
    asked = experiment(slurm={"ranks_per_node": 2, "cpus_per_gpu": 3})
    parameters = sbatch_parameters(asked, Profile(srun_args=["--mpi=none"]), lead_s=9, max_parallel=None)
    words = parameters["srun_args"]
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=3", "--export=ALL"} <= set(words)
    assert words[-1] == "--mpi=none"


def test_parameters_are_json() -> None:
    slurm = {"nodes": "2-4", "gpus_per_node": 2, "time_limit": "2h", "extra": {"exclusive": True}}
    parameters = sbatch_parameters(experiment(slurm=slurm), find("infiniband"), lead_s=9, max_parallel=3)
    assert json.loads(json.dumps(parameters)) == parameters


@pytest.mark.parametrize(
    "key", ["partition", "account", "qos", "constraint", "exclude", "reservation", "mail"]
)
@pytest.mark.parametrize(
    "bad",
    ["a\nid", "a b", "a'b", 'a"b', "$(id)", "`id`", "a;b", "a\u2028b", "a\x85b", "a\x00b", "-x", "--wrap=id",
     "a\\", "a#b", "ä", ""],
)  # fmt: skip
def test_a_value_that_slipped_past_the_file_is_refused_here(key: str, bad: str) -> None:
    slurm = SlurmConfig().model_copy(update={key: bad})
    with pytest.raises(BadFileError, match=r"slurm\.mail_user|slurm\." + key):
        sbatch_parameters(
            experiment().model_copy(update={"slurm": slurm}), Profile(), lead_s=9, max_parallel=None
        )


@pytest.mark.parametrize(
    "update",
    [
        {"extra": {"comment": "a\nid"}},
        {"extra": {"array": "1-3"}},
        {"extra": {"sig": "USR1"}},
        {"nodes": "1-2\nid"},
        {"gpu_type": "a:b\nid", "gpus_per_node": 1},
        {"cpus_per_gpu": 3, "gpus_per_node": 1, "ranks_per_node": 2},
    ],
)
def test_more_that_slipped_past_the_file_is_refused_here(update: dict[str, Any]) -> None:
    asked = experiment().model_copy(update={"slurm": SlurmConfig().model_copy(update=update)})
    with pytest.raises(BadFileError, match=r"^slurm\."):
        sbatch_parameters(asked, Profile(), lead_s=9, max_parallel=None)


def test_runs_share_an_array_where_their_scripts_are_the_same() -> None:
    one, generic = experiment(seed=1), Profile()
    assert shape(one, generic) == shape(experiment(seed=2), generic)
    for sections in ({"slurm": {"nodes": 2}}, {"environment": {"modules": ["cuda"]}}, {"name": "other"}):
        assert shape(one, generic) != shape(experiment(**sections), generic)
    assert shape(one, generic) != shape(one, Profile(setup=["ulimit -l unlimited"]))


def saved_in(folder: Path, run: str, *saves_s: float | None) -> None:
    for number, save_s in enumerate(saves_s, start=1):
        attempt = RunPaths(folder / run).attempt(number)
        attempt.folder.mkdir(parents=True)
        record = AttemptRecord(number, now(), [], None)
        write_record(attempt, replace(record, save_s=save_s))


def test_the_lead_follows_the_longest_save_within_half_the_time_limit(tmp_path: Path) -> None:
    folder = ExperimentPaths(tmp_path / "exp")
    plain = experiment()
    assert lead_s(plain, folder) == 120
    saved_in(folder.folder, "aaaa", None, 10.0)
    saved_in(folder.folder, "bbbb", 50.2, 3.0)
    saved_in(folder.folder, ".slurm", 5000.0)
    assert lead_s(plain, folder) == 211
    assert lead_s(experiment(slurm={"time_limit": "5min"}), folder) == 150
    for signal_lead_s, lead in ((299, 299), (300, 150), (301, 150)):
        slurm = SlurmConfig.model_validate({"time_limit": "5min"}).model_copy(
            update={"signal_lead_s": signal_lead_s}
        )
        assert lead_s(experiment().model_copy(update={"slurm": slurm}), folder) == lead
    assert lead_s(experiment(slurm={"signal_lead_s": 7}), folder) == 7
    saved_in(folder.folder, "cccc", 1e6)
    assert lead_s(plain, folder) == 65535  # what Slurm can keep


def test_a_runs_excluded_nodes_are_added_to_the_files() -> None:
    def excluded(asked: str | None) -> list[str]:
        lines = options_of(experiment(slurm={"exclude": asked}), exclude=["n2", "n3"])
        return [line.replace("'", "") for line in lines if line.startswith("exclude=")]

    assert excluded(None) == ["exclude=n2,n3"]
    assert excluded("n[7-9]") == ["exclude=n[7-9],n2,n3"]
    assert excluded("/etc/bad") == ["exclude=/etc/bad"], "sbatch reads a file, or names"
    many = [f"node{number:05d}" for number in range(500)]
    assert any(line.endswith("node00499") for line in options_of(experiment(), exclude=many))
    with pytest.raises(BadFileError):
        options_of(experiment(), exclude=["n1;id"])
