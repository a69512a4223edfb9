"""Container runtimes and an image for tests: installed by apt, the image made by mmdebstrap.

No registry of images is reachable where the tests run. The image is Debian 12 with its Python 3.11, in a
folder that is made once (below ``HPC_TRAIN_TEST_IMAGES``, default ``/var/cache/hpc-train``, 0.2 GB). As a
shortcut the packages of this Python are mounted into containers, not installed in the image.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from tests.slurm.fixtures import leave_out

#: A file of the image alone: a process that sees it is in the container.
MARK = "etc/hpc-train-test-image"
#: A variable that the image sets; the stand-in of pyxis reads it.
IMAGE_VARIABLES = "PYTHONPATH=/of/the/image\nOF_THE_IMAGE=yes\n"
_SUITE, _PYTHON = "bookworm", (3, 11)
#: Where Debian's Python looks for packages of others.
_PACKAGES = "/usr/local/lib/python3.11/dist-packages"
_MIRROR = os.environ.get("HPC_TRAIN_DEBIAN_MIRROR", "http://deb.debian.org/debian")
_LIMIT_S = 1800


def install(*programs: str, packages: tuple[str, ...] = ()) -> None:
    """Install Debian's packages that have these programs, named as they are, and ``packages``.

    Skips the test if that is not possible, or fails it if tests of Slurm may not be skipped.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    installed = subprocess.run(["dpkg", "-s", *packages], capture_output=True, check=False).returncode == 0
    if not missing and (not packages or installed):
        return
    if os.geteuid() or shutil.which("apt-get") is None:
        leave_out(f"not installed: {', '.join(missing or packages)}, which takes root and apt-get")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    wanted = [*missing, *packages]
    with FileLock(Path(tempfile.gettempdir()) / "hpc-train-test-apt.lock"):
        for command in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *wanted]):
            done = subprocess.run(
                ["apt-get", *command],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=_LIMIT_S,
            )
        if done.returncode:
            leave_out(f"apt-get could not install {' '.join(wanted)}: {done.stderr[-300:]}")


def put_podman(folder: Path) -> None:
    """Install podman; write another ``podman`` into ``folder``, for PATH, if it can't run as it is.

    crun refuses machines with cgroups of both versions, as virtual machines of tests have: it must not see
    those of version 2.
    """
    install("podman", "crun", packages=("catatonit",))
    unified = Path("/sys/fs/cgroup/unified")
    if unified.is_dir():
        folder.mkdir()
        program = folder / "podman"
        inner = f'umount {unified} 2> /dev/null; exec {shutil.which("podman")} "$@"'
        program.write_text(
            f"#!/bin/bash\nexec unshare --mount --propagation private bash -c '{inner}' podman \"$@\"\n"
        )
        program.chmod(0o755)


def image() -> Path:
    """Return the folder of the image; make it if it is not there."""
    if sys.version_info[:2] != _PYTHON:
        leave_out(f"packages of this Python {sys.version_info[:2]} are not for that of Debian 12, {_PYTHON}")
    folder = Path(os.environ.get("HPC_TRAIN_TEST_IMAGES", "/var/cache/hpc-train")) / "image-debian-12"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / MARK).exists():
            install("mmdebstrap")
            shutil.rmtree(folder, ignore_errors=True)
            options = ("--quiet", "--variant=minbase", "--include=python3")
            command = ["mmdebstrap", *options, _SUITE, folder, _MIRROR]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                leave_out(f"mmdebstrap could not make the image: {done.stderr[-300:]}")
            (folder / MARK).write_text(IMAGE_VARIABLES)
    return folder


def packages() -> str:
    """Return the mount of this Python's packages."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return f"{Path(spec.origin).parents[1]}:{_PACKAGES}:ro"


def override(runtime: str, *folders: Path) -> str:
    """Return the override of a run in the image, which also sees this Python's packages and ``folders``."""
    container = {"image": str(image()), "runtime": runtime, "mounts": [packages(), *map(str, folders)]}
    return f"environment.container={json.dumps(container)}"


def is_inside(process: int) -> bool:
    """Return True if the process is in a container of the image."""
    return Path(f"/proc/{process}/root/{MARK}").exists()
