"""The container of the ranks (``environment.container``): how each runtime is called on a node.

Only ranks run inside. ``begin`` and ``after`` run outside, with the Python of ``submit``: there they can call
Slurm's programs. If a node lacks that Python, Apptainer runs them in the image too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.container_section import ContainerConfig, mount_parts
from hpc_train.experiment.config.schema import Job
from hpc_train.experiment.workload import workload_of
from hpc_train.launchers.slurm.profiles import Profile

#: Called by srun for each rank, with podman's options, the image and the command. Used as one line, since the
#: script finds the ranks' command by its line.
#:
#: - Variables are passed by name, so that no value is in the process list, without those that describe the
#:   node's file system.
#: - podman's own limits are above those of many jobs and can't be raised; it lowers its own to pid_max.
#: - podman refuses two mounts on one folder.
#: - A process outside of the step removes the container once this shell has ended, by SIGKILL too: conmon,
#:   the container's parent, is not a child of the step. It waits for the end of a pipe that only this shell
#:   has open for writing.
#: - Slurm signals each process of the step. podman starts crun to pass a signal on; where the next one ends
#:   this crun, as SIGTERM after SIGCONT, podman passes on no more and may end itself (4.3, observed). So the
#:   shell outlives the signals and passes them on as well, follows the container where podman has left it,
#:   and ends as the rank did, or by the signal if the rank ended just before ``attach``, which then fails.
#: - A wait that a signal interrupts does not return the process's code, a second one does, or 127, or -1
#:   (bash 5.2, observed).
_PODMAN = """
options=();
while read -r name; do
  case $name in
    PATH|LD_*|PYTHONHOME|HOSTNAME|PWD|OLDPWD|SHLVL|_|XDG_*|BASH_*) ;;
    *) options+=(--env "$name") ;;
  esac;
done < <(compgen -e);
read -r most < /proc/sys/kernel/pid_max;
case $(ulimit -u) in unlimited) ;; *) [ "$(ulimit -u)" -gt "$most" ] || most=$(ulimit -u) ;; esac;
options+=(--ulimit "nofile=$(ulimit -Sn):$(ulimit -Hn)" --ulimit "nproc=$most:$most");
case "${HOME:-/}: $*: " in
  /:*|*":${HOME-}:"*|*":${HOME-} "*) ;;
  *) [ ! -d "$HOME" ] || options+=(--volume "$HOME:$HOME") ;;
esac;
[ ! -e /dev/infiniband ] || options+=(--device /dev/infiniband);
container="hpc-train-${SLURM_JOB_ID-}-${SLURM_PROCID-}-$$";
exec {open}> >(
  exec setsid --fork bash -c 'read -r; podman rm --force --ignore --time 0 "$0"' "$container" > /dev/null 2>&1
);
in_background() { (trap - INT; exec podman "$@") <&0 {open}>&- & };
follow() {
  while wait $!; code=$?; kill -0 $! 2> /dev/null; do :; done;
  wait $!; again=$?;
  case $again in 127|-*) ;; *) code=$again ;; esac;
};
for name in INT TERM USR2; do
  trap "podman kill --signal $name $container > /dev/null 2>&1" $name;
done;
in_background run --rm --interactive --name "$container" "${options[@]}" "$@";
follow;
while [ "$code" -gt 128 ] && [ "$(podman ps --quiet --filter "name=$container")" ]; do
  left=$code;
  in_background attach --no-stdin "$container";
  follow;
  case $code in 125|255) code=$left ;; esac;
done;
trap - INT TERM USR2;
[ "$code" -le 128 ] || kill -"$((code - 128))" $$;
exit $code
"""
_PODMAN_OPTIONS = (
    # Processes stay in the cgroup of the step, so that Slurm limits, signals and ends them.
    "--cgroups=disabled",
    # Ranks exchange data by the network of the node, and by its shared memory.
    "--network=host", "--ipc=host", "--uts=host",
    # The kernel ignores most signals to the first process of a container, which the rank must not be.
    "--init",
    "--security-opt=label=disable", "--log-driver=none", "--entrypoint=",
)  # fmt: skip
#: Variables that an image may define too, whose values of the job count.
_OUR_VARIABLES = (
    "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONUTF8", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)  # fmt: skip


def python_in(experiment: Job, profile: Profile, folders: Sequence[Path]) -> list[str]:
    """Return the command of Python in the container, which sees ``folders`` and works in the last one."""
    container = experiment.environment.container
    assert container is not None
    python = experiment.environment.python or "python3"
    work, mounts = str(folders[-1]), [*_mounts(experiment, container, folders)]
    if container.runtime == "pyxis":  # srun's options create the container
        return [python]
    if container.runtime == "podman":
        volumes = [word for mount in mounts for word in ("--volume", ":".join(mount))]
        gpus = ["--device=nvidia.com/gpu=all"] if _has_gpus(experiment) else []
        image = ["--rootfs", f"{container.image_name}:O"] if container.is_path else [container.image]
        options = [*_PODMAN_OPTIONS, *gpus, *volumes, "--workdir", work, *container.options, *image]
        return ["bash", "-c", " ".join(_PODMAN.split()), "podman", *options, python]
    binds = [
        word
        for source, target, mode in mounts
        for word in ("--bind", source if (target, mode) == (source, "rw") else f"{source}:{target}:{mode}")
    ]
    command = [*profile.container_command.split(), *binds, "--pwd", work]
    return [*command, *container.options, container.image_name, python]


def srun_args(experiment: Job, profile: Profile, folders: Sequence[Path]) -> list[str]:
    """Return srun's options that create the container: those of pyxis."""
    container = experiment.environment.container
    if container is None or container.runtime != "pyxis":
        return []
    mounts = [
        f"{source}:{target}{':ro' if mode == 'ro' else ''}"
        for source, target, mode in _mounts(experiment, container, folders)
    ]
    return [
        f"--container-image={container.image_name}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={folders[-1]}",
        f"--container-env={','.join(dict.fromkeys((*_OUR_VARIABLES, *profile.variables())))}",
        "--no-container-entrypoint",
        *container.options,
    ]


def needs(experiment: Job, profile: Profile) -> dict[str, Any] | None:
    """Return the program and paths to check on the first node; None without a container."""
    container = experiment.environment.container
    if container is None:
        return None
    paths = {".image": container.image_name} if container.is_path else {}
    paths |= {f".mounts[{index}]": mount_parts(mount)[0] for index, mount in enumerate(container.mounts)}
    program = profile.container_command.split()[0] if container.runtime == "apptainer" else container.runtime
    return {"runtime": container.runtime, "program": program, "paths": paths}


def _mounts(
    experiment: Job, container: ContainerConfig, folders: Sequence[Path]
) -> Iterator[tuple[str, str, str]]:
    """Yield source, target and mode of each mount. The file's replace ours on the same target."""
    data = workload_of(experiment).data_paths(experiment)
    seen = [*map(str, folders), *(str(Path(path).expanduser().absolute()) for path in data)]
    mounts = {path: (path, path, "rw") for path in seen}
    mounts |= {mount_parts(mount)[1]: mount_parts(mount) for mount in container.mounts}
    yield from mounts.values()


def _has_gpus(experiment: Job) -> bool:
    slurm = experiment.slurm
    return slurm is not None and (slurm.gpus_per_node > 0 or "gpu" in str(slurm.extra.get("gres", "")))
