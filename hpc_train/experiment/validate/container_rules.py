"""Rules on ``environment.container``, and which of its paths are missing on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from hpc_train.experiment.config.container_section import ContainerConfig, mount_parts
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.schema import Job
from hpc_train.experiment.validate.base import rule
from hpc_train.experiment.validate.slurm_rules import ranks_on_each_node
from hpc_train.registry import nearest

_KEY: KeyPath = ("environment", "container")
_MOUNTS = "write environment.container.mounts"
_VISIBLE = "take it out: the process list would show its values; ranks receive all variables of the job"
_NEEDED = "take it out: ranks need the variables of Slurm, which it hides"
_SET = "take it out"
#: Runtime → option that hpc-train sets itself, or that ranks can't have → remedy.
_OWNED = {
    "apptainer": {
        "bind": _MOUNTS,
        "mount": _MOUNTS,
        "env": _VISIBLE,
        "env-file": _VISIBLE,
        "cleanenv": _NEEDED,
        "containall": _NEEDED,
        "pid": "take it out: the health checks of ranks need the processes of the node",
        "ipc": "take it out: ranks of a node exchange data in shared memory",
    }
    | dict.fromkeys(("pwd", "cwd", "net", "network"), _SET),
    "podman": {"volume": _MOUNTS, "mount": _MOUNTS}
    | dict.fromkeys(("env", "env-file", "env-host", "unsetenv-all"), _VISIBLE)
    | dict.fromkeys(
        (
            "rm", "name", "replace", "cgroups", "network", "net", "pid", "ipc", "uts", "entrypoint",
            "workdir", "interactive", "tty", "detach", "rootfs", "log-driver", "restart", "sig-proxy", "init",
        ),
        _SET,
    ),
    "pyxis": {"container-mounts": _MOUNTS}
    | dict.fromkeys(
        (
            "container-image", "container-workdir", "container-env", "container-entrypoint",
            "no-container-entrypoint", "container-name",
        ),
        _SET,
    ),
}  # fmt: skip
#: Of srun's options, those of pyxis.
_OF_PYXIS = ("container-", "no-container-")


@rule("container.option", "environment.container")
def options_are_free(experiment: Job) -> Iterator[Problem]:
    """``options`` must not contain options that hpc-train sets, nor others of srun."""
    container = experiment.environment.container
    for index, option in enumerate(container.options if container else ()):
        assert container is not None
        path, name = (*_KEY, "options", index), option.removeprefix("--").partition("=")[0]
        if remedy := _OWNED[container.runtime].get(name):
            yield Problem(path, f"--{name} is not allowed, since hpc-train prepares the container", remedy)
        elif container.runtime == "pyxis" and not name.startswith(_OF_PYXIS):
            message = f"--{name} is not an option of pyxis, which begin with --container or --no-container"
            yield Problem(path, message, "write an option of srun as srun_args of a profile")


@rule(
    "container.several-gpus", "environment.container", "slurm.gpus_per_node", "slurm.ranks_per_node", "device"
)
def podman_has_one_gpu_rank_on_a_node(experiment: Job) -> Iterator[Problem]:
    """Ranks in podman have process ids of their own, by which NCCL and CUDA can't share memory."""
    container, slurm = experiment.environment.container, experiment.slurm
    if container is None or slurm is None or container.runtime != "podman" or experiment.device == "cpu":
        return
    if (count := min(slurm.gpus_per_node, ranks_on_each_node(slurm))) > 1:
        message = (
            f"podman is not supported for {count} ranks with GPUs on one node, whose containers are apart"
        )
        yield Problem((*_KEY, "runtime"), message, "write apptainer or pyxis, or slurm.gpus_per_node: 1")


@rule("container.mount", "environment.container")
def mounts_have_places_of_their_own(experiment: Job) -> Iterator[Problem]:
    """Each of ``mounts`` needs a target that no other one has, below the root."""
    container = experiment.environment.container
    targets: dict[str, int] = {}
    for index, mount in enumerate(container.mounts if container else ()):
        path, target = (*_KEY, "mounts", index), str(Path(mount_parts(mount)[1]))
        if target == "/":
            yield Problem(path, "would hide the image's own files", "write a target like /data")
        elif (first := targets.setdefault(target, index)) != index:
            message = f"is mounted on {target}, as environment.container.mounts[{first}] is"
            yield Problem(path, message, "write another target, SOURCE:TARGET, or take one of them out")


def missing_paths(container: ContainerConfig) -> Iterator[Problem]:
    """Yield a remark on each path of the container that does not exist on this machine."""
    paths: dict[KeyPath, str] = {("image",): container.image_name} if container.is_path else {}
    paths |= {("mounts", index): mount_parts(mount)[0] for index, mount in enumerate(container.mounts)}
    for path, text in paths.items():
        file = Path(text)
        try:
            if file.exists():
                continue
            entries = islice(file.parent.iterdir(), 1000) if file.parent.is_dir() else ()
            names = [entry.name for entry in entries]
        except OSError:  # the nodes may be able to read it
            continue
        close = nearest(file.name, names)
        remedy = f"did you mean {file.with_name(close)}? " if close else ""
        remedy += "make sure that the nodes have it; submitting nevertheless"
        yield Problem(
            (*_KEY, *path), f"{file} does not exist on this machine", remedy, code="container.absent"
        )
