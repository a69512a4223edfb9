#!/usr/bin/env bash
# Installs by apt the browser that tests open reports and docs in, where that is possible. Elsewhere it says why there is
# none and succeeds, since tests skip what needs it.
set -euo pipefail

skip() {
    echo "no chromium on this machine, and no test of reports and docs in a browser: $1" >&2
    exit 0
}

if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
    exit 0
fi
[ "$(id -u)" = 0 ] || skip "its installation needs root"
command -v apt-get >/dev/null || skip "there is no apt-get"
export DEBIAN_FRONTEND=noninteractive
echo "installing chromium for the tests (apt-get install chromium)" >&2
log=$(mktemp)
{ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } >"$log" 2>&1 ||
    { tail -5 "$log" >&2; skip "apt-get could not install it"; }
rm -f "$log"
