#!/bin/sh
# Installs the real SGLang 0.5.23 for the CPU into a virtual environment of its own, for the tests marked `sglang`:
#
#     install.sh VENV        about 2.6 GB; takes minutes once, and nothing after that
#
#   PYTHON            the interpreter for it (default python3)
#   TORCH_INDEX_URL   a package index to take torch from, such as one with CPU-only builds (default: pip's own index)
#
# Why it is not one pip line: SGLang pins a CUDA torch and kernels that have no CPU wheel, so it goes in without its
# dependencies, beside a CPU torch, with two small shims (shim/) for what it imports but never calls for a dense text model.
# A run that was broken off goes on where it stopped: pip keeps what is there, and the stamp is written last.
set -eu
if [ "$(uname -s)" != Linux ]; then
    echo "SGLang runs on Linux only: its tests are skipped here."
    exit 0
fi
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
stamp="$("$python" --version) $(cd "$here" && cat install.sh requirements.txt constraints.txt shim/*.py shim/*/*.py | cksum)"
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

pip() {
    # Into a file: pip complains at length of the dependencies that are left out on purpose.
    "$venv/bin/python" -m pip --disable-pip-version-check install -c "$here/constraints.txt" "$@" >> "$venv/install.log" 2>&1 || {
        tail -n 20 "$venv/install.log" >&2
        echo "SGLang could not be installed: pip's reason stands above. Run it again to go on where it stopped." >&2
        exit 1
    }
}

echo "Installing SGLang for the CPU into $venv (2.6 GB, once) ..."
[ "$("$venv/bin/python" --version 2>/dev/null)" = "$("$python" --version)" ] || "$python" -m venv --clear "$venv"
rm -f "$venv/install.log" "$venv/installed"
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    pip torch --index-url "$TORCH_INDEX_URL"
else
    pip torch
fi
# Mooncake hands pages over between the halves of a pair; this build needs no GPU.
pip --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
pip --no-deps sglang==0.5.23 torchvision triton xgrammar apache-tvm-ffi llguidance openai-harmony soundfile dill cffi \
    pycparser watchfiles
pip torch transformers -r "$here/requirements.txt"

# Mooncake is linked against RDMA libraries, even where it uses TCP. Where the system has none, Debian's are unpacked beside
# the environment: no root is needed, and nothing else sees them.
libraries="$venv/pair-libraries"
if ! LD_LIBRARY_PATH="$libraries" "$venv/bin/python" -c 'import mooncake.engine' 2>/dev/null; then
    rm -rf "$libraries" "$venv/debian"
    mkdir -p "$venv/debian/unpacked"
    packages="libibverbs1 libnl-3-200 libnl-route-3-200"
    fetched=
    for attempt in lists-as-they-are lists-renewed; do
        if [ -n "$fetched" ] || ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then break; fi
        if [ "$attempt" = lists-renewed ]; then apt-get update >> "$venv/install.log" 2>&1 || true; fi
        # shellcheck disable=SC2086  three words
        if (cd "$venv/debian" && apt-get download $packages) >> "$venv/install.log" 2>&1; then fetched=yes; fi
    done
    if [ -n "$fetched" ]; then
        for package in "$venv"/debian/*.deb; do dpkg-deb -x "$package" "$venv/debian/unpacked"; done
        mkdir "$libraries"
        find "$venv/debian/unpacked" -name 'lib*.so*' -exec cp -P {} "$libraries" \;
    fi
    rm -rf "$venv/debian"
    LD_LIBRARY_PATH="$libraries" "$venv/bin/python" -c 'import mooncake.engine' >> "$venv/install.log" 2>&1 || {
        rm -rf "$libraries"
        echo "SGLang's prefill/decode pairs can't run here: Mooncake needs the libraries of" >&2
        echo "$packages (Debian's names; rdma-core elsewhere). Install them and run it again." >&2
        exit 1
    }
fi
mkdir -p "$libraries"

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -R "$here/shim/sgl_kernel" "$here/shim/sgl_cpu_shim.py" "$site/"
echo 'import sgl_cpu_shim' > "$site/sgl_cpu_shim.pth"
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore -c 'import sglang.srt.entrypoints.http_server' >> "$venv/install.log" 2>&1 || {
    tail -n 20 "$venv/install.log" >&2
    echo "SGLang is installed and does not start: its reason stands above." >&2
    exit 1
}
printf '%s\n' "$stamp" > "$venv/installed"
