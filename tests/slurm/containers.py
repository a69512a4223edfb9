"""Container runtimes and images for tests: installed by apt, the images made by mmdebstrap and podman.

No registry of images is reachable where the tests run. The image is Debian 12 with its Python 3.11, in a
folder that is made once (below ``HPC_TRAIN_TEST_IMAGES``, default ``/var/cache/hpc-train``, 0.2 GB). As a
shortcut the packages of this Python are mounted into containers, not installed in the image. The image of
``envs/``, with all packages, is built upon it by one test (``build``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from filelock import FileLock

from tests.slurm.fixtures import leave_out
from tests.wheels import REPOSITORY

#: A file of the image alone: a process that sees it is in the container.
MARK = "etc/hpc-train-test-image"
#: A variable that the image sets; the stand-in of pyxis reads it.
IMAGE_VARIABLES = "PYTHONPATH=/of/the/image\nOF_THE_IMAGE=yes\n"
_SUITE, _PYTHON = "bookworm", (3, 11)
#: Where Debian's Python looks for packages of others.
_PACKAGES = "/usr/local/lib/python3.11/dist-packages"
_MIRROR = os.environ.get("HPC_TRAIN_DEBIAN_MIRROR", "http://deb.debian.org/debian")
_LIMIT_S = 1800
#: The image of ``envs/``.
BUILT = "localhost/hpc-train-test:latest"
#: Wheels, layers, and podman's copy of a layer while it is written.
_BUILD_GB = 25
BUILD_LIMIT_S = 7200


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


def _folder() -> Path:
    folder = Path(os.environ.get("HPC_TRAIN_TEST_IMAGES", "/var/cache/hpc-train"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def image() -> Path:
    """Return the folder of the image; make it if it is not there."""
    if sys.version_info[:2] != _PYTHON:
        leave_out(f"packages of this Python {sys.version_info[:2]} are not for that of Debian 12, {_PYTHON}")
    folder = _folder() / "image-debian-12"
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


def build() -> str:
    """Return the name of the image of ``envs/`` in podman's storage, built without a package index.

    Wheels are downloaded once, into a folder beside that of ``image`` (3 GB). podman reuses the layers of the
    last build: after a change of the package alone, only hpc-train is installed again.
    """
    free_gb = shutil.disk_usage(_folder()).free / 1e9
    if free_gb < _BUILD_GB:
        leave_out(f"building the image takes {_BUILD_GB} GB of disk, of which {free_gb:.0f} are free")
    wheels = _wheels()
    options = ("--network=host", f"--volume={wheels}:/mnt:ro")
    arguments = (f"--build-arg=BASE={_base()}", "--build-arg=PIP_CONFIG_FILE=/mnt/pip.conf")
    file = REPOSITORY / "envs" / "Dockerfile"
    previous = _podman("image", "ls", "--quiet", "--no-trunc", BUILT).split()
    _podman("build", "--quiet", *options, *arguments, "--tag", BUILT, "--file", str(file), str(REPOSITORY))
    if previous and previous != _podman("image", "ls", "--quiet", "--no-trunc", BUILT).split():
        _podman("image", "rm", "--force", *previous)
    return BUILT


def _base() -> str:
    """Return the name of the folder's image in podman's storage; import it if it is not there."""
    folder = image()
    packages = hashlib.sha256((folder / "var/lib/dpkg/status").read_bytes()).hexdigest()[:12]
    name = f"localhost/hpc-train-test-debian:{packages}"
    if subprocess.run(["podman", "image", "exists", name], check=False).returncode:
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            subprocess.run(["tar", "-C", folder, "-cf", archive.name, "."], check=True)
            _podman("import", "--quiet", archive.name, name)
    return name


def _wheels() -> Path:
    """Return the folder with the wheels of the image; download those that are not there."""
    constraints = (REPOSITORY / "envs" / "constraints-cuda.txt").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = "\n".join([constraints, *project["dependencies"]])
    folder = _folder() / "wheels"
    downloaded = folder / "downloaded"
    with FileLock(f"{folder}.lock"):
        if not downloaded.exists() or downloaded.read_text() != wanted:
            command = ["bash", REPOSITORY / "envs" / "install.sh", "wheels", folder, sys.executable]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S)
            if done.returncode:
                leave_out(f"pip could not download the wheels: {done.stderr[-300:]}")
            downloaded.write_text(wanted)
    return folder


def _podman(*words: str) -> str:
    done = subprocess.run(
        ["podman", *words], capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S
    )
    assert done.returncode == 0, f"podman {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def packages() -> str:
    """Return the mount of this Python's packages."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return f"{Path(spec.origin).parents[1]}:{_PACKAGES}:ro"


def override(runtime: str, *folders: Path, built: str = "") -> str:
    """Return the override of a run in the image, which also sees this Python's packages and ``folders``.

    ``built``: the name of another image, which has packages.
    """
    mounts = [str(folder) for folder in folders]
    if not built:
        mounts = [packages(), *mounts]
    container = {"image": built or str(image()), "runtime": runtime, "mounts": mounts}
    return f"environment.container={json.dumps(container)}"


def is_inside(process: int) -> bool:
    """Return True if the process is in a container of the image."""
    return Path(f"/proc/{process}/root/{MARK}").exists()
