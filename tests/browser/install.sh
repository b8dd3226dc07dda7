#!/bin/sh
# Sees to a Chromium for the browser tests; `make browser` calls it. Playwright's own builds are not used: they come from
# elsewhere than the package registries, and Debian's browser is what people run.
set -eu
if command -v chromium >/dev/null 2>&1; then exit 0; fi
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >&2 &&
        exit 0
fi
echo "The browser tests need chromium, and it is not here: as root, apt-get install chromium." >&2
exit 1
