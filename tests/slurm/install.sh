#!/usr/bin/env bash
# Installs by apt what the test cluster needs, where that is possible. Elsewhere it says why there will be none
# and succeeds, as tests leave out what needs it; with HPC_TRAIN_REQUIRE_SLURM set it fails.
set -euo pipefail

# A compiler makes the library by which tests/faults lets a disk fail.
packages=(slurmctld slurmd slurm-client slurmdbd munge mariadb-server gcc libc6-dev)
programs=(slurmctld slurmd sbatch slurmdbd munged mariadbd cc)
PATH=$PATH:/usr/sbin:/sbin

missing() {
    local name
    for name in "${programs[@]}"; do
        command -v "$name" >/dev/null || echo "$name"
    done
}

leave_out() {
    echo "no test cluster on this machine, and none of its tests: $1" >&2
    [ -z "${HPC_TRAIN_REQUIRE_SLURM:-}" ] || exit 1
    exit 0
}

install_packages() {
    # Nothing may start by itself: the tests start their own daemons.
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        # shellcheck disable=SC2064
        trap "rm -f $policy" EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -qq -y --no-install-recommends "${packages[@]}"
}

if [ "$(id -u)" != 0 ]; then
    leave_out "its daemons need root"
fi
if [ -n "$(missing)" ]; then
    command -v apt-get >/dev/null || leave_out "not installed: $(missing | paste -sd' '), and there is no apt-get"
    echo "installing Slurm for the tests (apt-get install ${packages[*]})" >&2
    log=$(mktemp)
    install_packages >"$log" 2>&1 || { tail -5 "$log" >&2; leave_out "apt-get could not install it"; }
    rm -f "$log"
    [ -z "$(missing)" ] || leave_out "still missing after the installation: $(missing | paste -sd' ')"
fi
