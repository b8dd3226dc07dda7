#!/bin/sh
# Makes .venv and installs Pagegate with the extras named, `local` or `local,test`; the Makefile calls it.
# It asks nothing and needs no root. Whatever fails says one sentence, and a .venv that this run made goes again.
set -eu
cd "$(dirname "$0")/../.."

extras=$1
lock=deploy/setup/requirements.lock
made_venv=no

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

remove_half_made() {
    status=$?
    trap - EXIT
    if [ "$status" -ne 0 ] && [ "$made_venv" = yes ]; then rm -rf .venv; fi
    exit "$status"
}
trap remove_half_made EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" && return
        fail "Python 3.11 or newer is needed, and $PYTHON is $("$PYTHON" --version 2>&1 || echo 'not there')."
    fi
    for PYTHON in python3.13 python3.12 python3.11 python3; do
        if new_enough "$PYTHON"; then return; fi
    done
    fail "Python 3.11 or newer is needed, and none is in PATH: install one, or name it with make PYTHON=/path/to/python3."
}

make_venv() {
    find_python
    "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        fail "$PYTHON can't make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)."
    made_venv=yes
    "$PYTHON" -m venv .venv || fail "$PYTHON could not make .venv: its reason stands above."
}

pip() {
    .venv/bin/python -m pip --disable-pip-version-check --retries 3 --log .venv/install.log "$@" || fail "$(pip_failure)"
}

# pip would compile all of them, one after another; nothing here imports these, or only a few files of them.
left_uncompiled='/site-packages/(cloudflare|networkx|torch/_inductor|torch/testing|transformers/models)/'

compile() {
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # What does not compile is for other Pythons, as pip says too; what is missing is compiled when it is imported.
    .venv/bin/python -m compileall -q -j 0 -x "$left_uncompiled" "$site" >> .venv/install.log 2>&1 || true
}

pip_failure() {
    if grep -q 'No space left on device' .venv/install.log 2>/dev/null; then
        echo "Disk full: the packages need more room than the disk of this folder (or of pip's cache) has."
    elif grep -Eq 'NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError' .venv/install.log 2>/dev/null; then
        echo "No network: pip can't reach its package index; the packages were not installed."
    else
        echo "The packages could not be installed: pip's reason stands above."
    fi
}

if [ -e .venv ]; then
    new_enough .venv/bin/python || fail "The .venv here does not run on Python 3.11 or newer: remove it with make clean."
else
    make_venv
fi

rm -f .venv/install.log
pip install --quiet --upgrade 'pip>=25'
# torch comes first and alone, so that it may have an index of its own without changing where the rest comes from.
torch=$(grep '^torch==' "$lock")
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    pip install --no-compile "$torch" --index-url "$TORCH_INDEX_URL"
else
    pip install --no-compile "$torch"
fi
pip install --no-compile -c "$lock" -e ".[$extras]"
compile

# The tests look at the pages as people see them, so they need what `serve` can do without.
if [ "$extras" = local,test ]; then
    sh deploy/setup/web.sh required || fail "The tests need the dashboard's scripts: the reason stands above."
else
    sh deploy/setup/web.sh optional
fi

touch .venv/.installed-local
if [ "$extras" = local,test ]; then touch .venv/.installed-local-test; fi
