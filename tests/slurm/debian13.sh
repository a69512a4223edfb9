#!/usr/bin/env bash
# Runs a command with Debian 13's Slurm (24.11) in place of this machine's:
#
#     tests/slurm/debian13.sh COMMAND [ARGUMENT...]
#
# /usr, /etc and /var are those of a Debian 13 that mmdebstrap installs once into $HPC_TRAIN_DEBIAN13 (default:
# /var/cache/hpc-train/debian-13, 0.9 GB); everything else is this machine's, at the same paths: the checkout, its
# virtual environment, Python, /tmp, the processes. The mounts exist in a namespace that ends with the command.
# Where that is not possible, the script says why and succeeds; with HPC_TRAIN_REQUIRE_SLURM set it fails.
set -euo pipefail

suite=trixie
packages=(
    slurmctld slurmd slurm-client slurmdbd munge mariadb-server
    # What the tests call.
    gcc libc6-dev git procps
    # What a Python that was built for another Debian links to.
    libbz2-1.0 libexpat1 libffi8 liblzma5 libncurses6 libreadline8t64 libsqlite3-0 libssl3t64 libstdc++6 zlib1g
)
# Where Debian 12's libmariadb3 comes from: with 11.8.9 slurmdbd fails ("Number of columns in result … =0").
other_suite=bookworm
other_package=libmariadb3
mirror=${HPC_TRAIN_DEBIAN_MIRROR:-http://deb.debian.org/debian}
root=${HPC_TRAIN_DEBIAN13:-/var/cache/hpc-train/debian-13}
top=$(cd "$(dirname "$0")/../.." && pwd)
python=$top/.venv/bin/python

skip() {
    echo "Slurm's tests on Debian 13 are skipped: $1" >&2
    [ -z "${HPC_TRAIN_REQUIRE_SLURM:-}" ] || exit 1
    exit 0
}

# Installs Debian 13 unless it is there with these packages.
build() {
    local log pin wanted="$suite ${packages[*]} $other_suite $other_package"
    [ "$(cat "$root.packages" 2>/dev/null)" != "$wanted" ] || return 0
    if ! command -v mmdebstrap >/dev/null; then
        command -v apt-get >/dev/null || skip "mmdebstrap is not installed, and there is no apt-get"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            mmdebstrap; } >/dev/null 2>&1 || skip "apt-get could not install mmdebstrap"
    fi
    echo "installing Debian 13 with Slurm into $root (mmdebstrap)" >&2
    log=$(mktemp)
    rm -rf "$root" "$root.new" "$root.packages"
    mkdir -p "$(dirname "$root")"
    pin="Package: *\nPin: release n=$other_suite\nPin-Priority: -1\n\n"
    pin+="Package: $other_package\nPin: release n=$other_suite\nPin-Priority: 1001\n"
    mmdebstrap --quiet --variant=minbase --include="${packages[*]}" \
        --setup-hook="printf '$pin' >\"\$1/etc/apt/preferences.d/$other_suite\"" "$suite" "$root.new" \
        "deb $mirror $suite main" "deb $mirror $other_suite main" >"$log" 2>&1 ||
        { tail -5 "$log" >&2; rm -rf "$root.new" "$log"; skip "mmdebstrap could not install Debian 13"; }
    rm -f "$log"
    mv "$root.new" "$root"
    echo "$wanted" >"$root.packages"
}

# Mounts this machine's files below $root. In a mount namespace of its own.
mount_host() {
    local path
    mount --bind "$root" "$root" # unshare --mount needs a / that is a mount
    for path in /*; do
        case $path in
            /bin | /boot | /etc | /lib* | /lost+found | /media | /run | /sbin | /usr | /var) ;;
            *) [ ! -d "$path" ] || bind "$path" ;;
        esac
    done
    bind /usr/local
    for path in /etc/hosts /etc/resolv.conf; do
        [ ! -e "$path" ] || bind "$path"
    done
    # A Python in /usr: the environment's own, and one of the same version that ordinary users may run.
    "$python" - <<'CODE' | sort -u | while read -r path; do case $path in /usr/local/*) ;; /usr/*) bind "$path" ;; esac; done
import os, shutil, sys
name = f"python{sys.version_info.major}.{sys.version_info.minor}"
base = sys._base_executable
other = shutil.which(name, path="/usr/bin")
for path in (base, os.path.realpath(base), os.path.dirname(os.__file__), other, other and f"/usr/lib/{name}"):
    if path and os.path.exists(path):
        print(path)
CODE
}

bind() {
    if [ -d "$1" ]; then mkdir -p "$root$1"; elif [ ! -e "$root$1" ]; then touch "$root$1"; fi
    mount --rbind "$1" "$root$1"
}

if [ "${1-}" = --mounted ]; then
    shift
    mount_host
    said=$(chroot "$root" "$python" -c 'import ctypes, numpy, sqlite3, ssl' 2>&1) ||
        skip "$python does not run there: ${said##*$'\n'}"
    exec chroot "$root" /usr/bin/env --chdir="$PWD" PATH="$PATH:/usr/sbin:/sbin" "$@"
fi

[ $# -gt 0 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
[ "$(id -u)" = 0 ] || skip "it needs root"
[ -x "$python" ] || skip "there is no $python; run make install"
command -v unshare >/dev/null || skip "there is no unshare (util-linux)"
unshare --mount --propagation private true 2>/dev/null || skip "this machine allows no mount namespaces"
build
exec unshare --mount --propagation private "$0" --mounted "$@"
