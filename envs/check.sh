#!/usr/bin/env bash
# Resolves or builds each environment of this folder where this machine can; says why it can't elsewhere.
#
#     envs/check.sh [PYTHON]        exit code 1 where one failed
#
# Nothing is installed: pip only resolves, conda only solves, and images that were built are removed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python=${1:-python3}
failed=0

report() { # NAME STATE WORDS
    echo "$1: $2${3:+: $3}"
    [ "$2" != failed ] || failed=1
}

# Runs a command whose failure is the environment's, unless the network is why.
attempt() { # NAME WORD COMMAND...
    local name=$1 word=$2 said
    shift 2
    if said=$("$@" 2>&1); then
        report "$name" "$word"
    elif grep -Eqi 'name resolution|name or service not known|could not resolve|no such host|connection (refused|error|timed out)|max retries|unreachable|i/o timeout|403 forbidden|could not fetch url' <<<"$said"; then
        report "$name" skipped "its index can't be reached from here"
    else
        report "$name" failed "$(tail -n 3 <<<"$said")"
    fi
}

pip_resolves() { # CONSTRAINTS [OPTION...]
    "$python" -m pip install --dry-run --ignore-installed --quiet --disable-pip-version-check --retries 1 -c "$@" .
}

attempt constraints-cuda.txt resolved pip_resolves envs/constraints-cuda.txt
attempt constraints-cpu.txt resolved pip_resolves envs/constraints-cpu.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu

conda=$(command -v micromamba || command -v mamba || command -v conda)
if [ -n "$conda" ]; then
    attempt environment.yaml solved "$conda" env create --dry-run --name hpc-train-check -f envs/environment.yaml
else
    report environment.yaml skipped "there is no micromamba, mamba or conda"
fi

if docker info >/dev/null 2>&1; then builder=docker; else builder=$(command -v podman); fi
if [ -n "$builder" ]; then
    attempt Dockerfile built "$builder" build --quiet --tag hpc-train-check -f envs/Dockerfile .
    "$builder" image rm hpc-train-check >/dev/null 2>&1
else
    report Dockerfile skipped "there is neither a Docker daemon nor podman"
fi

if command -v apptainer >/dev/null; then
    image=$(mktemp -d)
    attempt apptainer.def built apptainer build "$image/image.sif" envs/apptainer.def
    rm -rf "$image"
else
    report apptainer.def skipped "there is no apptainer"
fi
exit "$failed"
