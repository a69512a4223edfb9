#!/usr/bin/env bash
# Installs hpc-train into /opt/hpc-train of a Debian or Ubuntu image; Dockerfile and apptainer.def run it.
#
#     envs/install.sh dependencies           packages of Debian and of PyPI
#     envs/install.sh package                hpc-train itself, from the files of the repository
#     envs/install.sh wheels FOLDER PYTHON   downloads the wheels into FOLDER, for builds without an index
#
# CONSTRAINTS is the file of envs/ with the versions. pip reads its own variables, such as PIP_INDEX_URL.
set -euo pipefail
cd "$(dirname "$0")/.."

target=/opt/hpc-train
constraints=envs/${CONSTRAINTS:-constraints-cuda.txt}
# A compiler and Python's headers are what torch.compile needs; git gives run.json the commit of the user's code.
packages=(g++ git python3-dev python3-venv)
# Where builds mount FOLDER: Debian's images have this folder, and it is empty.
mounted=/mnt

read_requirements() { # PYTHON
    local lines
    lines=$("$1" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print(*project["project"]["dependencies"], *project["build-system"]["requires"], sep="\n")')
    mapfile -t requirements <<<"$lines"
}

case "$*" in
    dependencies)
        if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
            apt-get update
            DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"
            rm -rf /var/lib/apt/lists/*
        fi
        python3 -m venv "$target"
        read_requirements "$target/bin/python"
        "$target/bin/pip" install --no-cache-dir -c "$constraints" "${requirements[@]}"
        ;;
    package)
        "$target/bin/pip" install --no-cache-dir --no-deps --no-build-isolation .
        rm -rf build ./*.egg-info
        "$target/bin/pip" check
        # Builds of PyTorch's packages for CUDA and for CPUs don't import together.
        "$target/bin/python" -c 'import torch, torchvision, timm, hpc_train.cli.app'
        ;;
    "wheels "*" "*)
        read_requirements "$3"
        "$3" -m pip download --only-binary=:all: -c "$constraints" -d "$2" "${requirements[@]}"
        printf '[global]\nno-index = true\nfind-links = %s\n' "$mounted" >"$2/pip.conf"
        ;;
    *)
        sed -n '4,6p' "$0" >&2
        exit 2
        ;;
esac
