"""Site profiles: where they are found, what they may say, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.launchers.slurm import profiles
from hpc_train.launchers.slurm.launcher import SlurmLauncher
from tests.launchers.slurm.scripts import experiment


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of $HPC_TRAIN_PROFILES; the user's own is out of the way."""
    folder = tmp_path / "profiles"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("HPC_TRAIN_PROFILES", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


def written(folder: Path, text: str, name: str = "site") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def lines_of(folder: Path, text: str) -> list[str]:
    path = written(folder, text)
    with pytest.raises(BadFileError) as caught:
        profiles.find("site")
    return [line.replace(str(path), "site.yaml") for line in caught.value.problems]


def test_the_suites_own_profiles_are_sound() -> None:
    names = [path.stem for path in (profiles.TEMPLATES / "profiles").glob("*.yaml")]
    assert "generic" in names and len(names) > 2
    assert all(profiles.find(name).description for name in names)


def test_the_first_folder_wins(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = tmp_path / "config/hpc-train/profiles"
    second.mkdir(parents=True, mode=0o755)
    written(second, "description: the user's\n", "generic")
    assert profiles.find("generic").description == "the user's"
    third = tmp_path / "third"
    third.mkdir(mode=0o755)
    written(third, "description: named last\n", "generic")
    monkeypatch.setenv("HPC_TRAIN_PROFILES", f"{own}:{third}")
    assert profiles.find("generic").description == "named last"
    written(own, "description: named first\n", "generic")
    assert profiles.find("generic").description == "named first"


def test_an_unknown_profile_is_placed_in_the_file_with_the_nearest_name(own: Path) -> None:
    written(own, "", "rivulet")
    with pytest.raises(BadFileError) as caught:
        profiles.find("rivulte", lambda key, message, remedy: f"exp.yaml:9:12: {key}: {message}; {remedy}")
    (line,) = caught.value.problems
    assert line.startswith(
        "exp.yaml:9:12: slurm.profile: no profile is called 'rivulte'; did you mean rivulet?"
    )
    assert str(own) in line and "/etc/hpc-train/profiles" in line


def test_an_empty_profile_says_nothing(own: Path) -> None:
    written(own, "# nothing yet\n")
    assert profiles.find("site") == profiles.Profile()


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("gpu: gres\n", "1:1: gpu", "did you mean gpus?"),
        ("gpus: gress\n", "1:7: gpus", "needs one of gpus_per_node, gres, got the text 'gress'"),
        ("setup: module purge\n", "1:8: setup", "needs a list"),
        ('setup: ["a\\nb"]\n', "1:9: setup[0]", "line break"),
        ("environment:\n  SLURM_JOB_ID: 1\n", "2:3: environment.SLURM_JOB_ID", "take it out"),
        ("environment:\n  PYTHONPATH: /x\n", "2:3: environment.PYTHONPATH", "take it out"),
        ("environment:\n  A B: 1\n", "2:3: environment.A B", "NCCL_DEBUG"),
        ('environment: {A: "a\\nb"}\n', "1:18: environment.A", "line break"),
        ("environment: {A: [1]}\n", "1:18: environment.A", "needs text or a whole number, got a list"),
        ("defaults: {nodes: 2}\n", "1:12: defaults.nodes", "leave it to the experiment file"),
        ("defaults: {partitoin: gpu}\n", "1:12: defaults.partitoin", "did you mean partition?"),
        ("defaults: {time_limit: 24}\n", "1:24: defaults.time_limit", "write 24h, or 24min"),
        ("defaults: {account: 'a b'}\n", "1:21: defaults.account", "needs one word"),
        ("sbatch: {array: 1-3}\n", "1:10: sbatch.array", "is set by hpc-train"),
        ("sbatch: {comment: $(id)}\n", "1:19: sbatch.comment", "one word"),
        ("sbatch: {No Name: 1}\n", "1:10: sbatch.No Name", "long name"),
        ("sbatch: {comment: [1]}\n", "1:19: sbatch.comment", "got a list"),
        ("srun_args: [-n 3]\n", "1:13: srun_args[0]", "one long option"),
        ("srun_args: ['--mpi=$(id)']\n", "1:13: srun_args[0]", "one long option"),
        ("network_interface: 'ib0; id'\n", "1:20: network_interface", "interfaces like ib0"),
        ("container_command: docker run; id\n", "1:20: container_command", "words like"),
        ("module_init: a b\n", "1:14: module_init", "a path without blanks"),
        ("gpus: [\n", "2:1: ", "not valid YAML"),
        ("- a\n", "1:1: ", "the file holds a list"),
    ],
)
def test_a_wrong_key_is_reported_at_its_place(own: Path, text: str, where: str, said: str) -> None:
    (line,) = lines_of(own, text)
    assert line.startswith(f"site.yaml:{where}") and said in line, line


def test_all_problems_are_reported_at_once(own: Path) -> None:
    lines = lines_of(own, "gpu: gres\ndescription: 3\nsetup: [1]\n")
    assert [line.split(": ")[1] for line in lines] == ["gpu", "description", "setup[0]"]


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_profile_that_others_can_write_is_refused(own: Path, mode: int) -> None:
    written(own, "description: mine\n").chmod(mode)
    with pytest.raises(BadFileError, match="others than its owner can write it"):
        profiles.find("site")


def test_a_profile_in_a_folder_that_others_can_write_is_refused(own: Path) -> None:
    written(own, "description: mine\n")
    own.chmod(0o777)
    with pytest.raises(BadFileError, match=f"{own}: others than its owner"):
        profiles.find("site")
    own.chmod(0o1777)  # as /tmp: nobody replaces a file of another
    assert profiles.find("site").description == "mine"


def test_a_profile_that_cannot_be_read_is_reported(own: Path) -> None:
    path = written(own, "")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadFileError, match="no profile is called 'site'"):
        profiles.find("site")  # no plain file: not opened, where it would hang


def test_defaults_fill_in_only_what_the_file_omits() -> None:
    profile = profiles.Profile.model_validate(
        {"defaults": {"partition": "gpu", "time_limit": "2h", "qos": "q"}}
    )
    slurm = profile.applied(experiment(slurm={"partition": "mine", "nodes": 3})).slurm
    assert slurm is not None
    assert (slurm.partition, slurm.time_limit, slurm.qos, slurm.nodes) == ("mine", 120, "q", 3)


def test_defaults_count_for_the_size_the_time_and_the_budget_of_a_run(own: Path) -> None:
    written(own, "defaults: {time_limit: 24h, cpus_per_gpu: 8, gpu_type: a100}")
    slurm = {"profile": "site", "gpus_per_node": 4, "signal_lead_s": 120}
    wanted = experiment(slurm=slurm, device="cuda")
    launcher = SlurmLauncher()
    size = launcher.ranks(wanted, None)
    assert (size.gpu_hours, size.cores, size.attempt_s) == (96.0, 32, 24 * 3600 - 120)
    device = launcher.device(wanted, size)
    assert device is not None and "a100" in device.name.lower()
    written(own, "defaults: {time_limit: 2h}")
    assert launcher.ranks(wanted, None).gpu_hours == 8.0
    slurm |= {"nodes": 2, "spare_nodes": 1}
    size = launcher.ranks(experiment(slurm=slurm, device="cuda"), None)
    assert (size.gpu_hours, size.gpus, size.most) == (24.0, 12, 8), "spare nodes have a price and no ranks"


def test_a_profile_that_is_gone_leaves_the_file_as_written(own: Path) -> None:
    wanted = experiment(slurm={"profile": "gone", "time_limit": "3h", "gpus_per_node": 1})
    assert SlurmLauncher().ranks(wanted, None).gpu_hours == 3.0
    assert profiles.slurm_of(experiment(slurm=None)) is None


def test_the_interface_goes_to_nccl_and_gloo_unless_the_environment_says_otherwise() -> None:
    said = {"network_interface": "ib0", "environment": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"}}
    assert profiles.Profile.model_validate(said).variables() == {
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "WARN",
    }
