#!/usr/bin/env bash
# Runs a command with a Slurm that was installed into a folder of its own, in place of this machine's:
#
#     tests/slurm/prefix.sh PREFIX COMMAND [ARGUMENT...]
#
# munge and MariaDB are still this machine's. CONTRIBUTING.md says how to build such a Slurm.
set -euo pipefail

commands=(sacct sacctmgr sbatch scancel scontrol sinfo squeue srun)
daemons=(slurmctld slurmd slurmdbd)

fail() {
    echo "$1" >&2
    exit 2
}

[ $# -gt 1 ] || fail "$(sed -n '2,4p' "$0")"
[ -n "$1" ] || fail "SLURM_PREFIX: not set; name the folder that Slurm was installed into: SLURM_PREFIX=/opt/slurm"
prefix=$(cd "$1" 2>/dev/null && pwd) || fail "SLURM_PREFIX: $1 is not a folder"
shift
# One that is missing would be this machine's, of another version.
for program in "${commands[@]/#/bin/}" "${daemons[@]/#/sbin/}"; do
    [ -x "$prefix/$program" ] || fail "SLURM_PREFIX: $prefix has no $program; see CONTRIBUTING.md, Tests"
done
[ -n "$(find "$prefix/" -name accounting_storage_mysql.so -print -quit)" ] ||
    fail "SLURM_PREFIX: $prefix has no accounting_storage_mysql.so; configure Slurm again with libmariadb-dev installed"
"$prefix/sbin/slurmctld" -V >&2
PATH=$prefix/bin:$prefix/sbin:$PATH exec "$@"
