#!/bin/sh
# Prints the exact versions in .venv as pip constraints; `make lock` keeps them in requirements.lock.
# Local build tags (torch's +cpu) go, since other machines take other builds of the same version.
set -eu
cd "$(dirname "$0")/../.."
echo '# Exact versions that are known to work together, as constraints for pip; written by `make lock`.'
.venv/bin/python -m pip freeze --exclude-editable | LC_ALL=C sed -E \
    -e 's/^([A-Za-z0-9._-]+==[^+; ]+)\+.*/\1/' \
    -e "s/^(uvloop==.*)/\1; sys_platform != 'win32'/"
