#!/usr/bin/env bash
# The smoke set on several versions of PyTorch, in a fresh virtual environment for each (several gigabytes, removed afterwards), and
# docs/compatibility.md from what was tried there:
#   scripts/versions.sh [version ...]            by default those that the README names
# The version "here" is the PyTorch that PYTHON has already: nothing of it is installed again.
# PYTHON chooses the interpreter; pip follows the usual PIP_* variables. LIBRARIES names optional kernel libraries to be tried with each
# version, by default those that install everywhere; sets of them after a semicolon are tried one after the other, as in
# "fla-core liger-kernel; fla-core==0.5.2 liger-kernel==0.8.4". Each is installed without what it depends on, so that PyTorch stays
# the one that is tried. Exit status: 0 only if every version passed.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- 2.11.0 2.13.0 2.14.1 2.15.0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
libraries="${LIBRARIES-liger-kernel fla-core xgrammar apache-tvm-ffi}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/found"

install() { "$work/venv/bin/pip" install --quiet --no-cache-dir "$@"; }

environment() { # of a version of PyTorch, with this package
    "${PYTHON:-python3}" -m venv "$work/venv" || return 1
    if [ "$1" = here ]; then
        "${PYTHON:-python3}" -c 'import site; print("\n".join(site.getsitepackages()))' >"$("$work/venv/bin/python" -c \
            'import site; print(site.getsitepackages()[0])')/here.pth"
        install --no-deps .
    else
        install "torch==$1" .
    fi
}

failed=()
for version in "$@"; do
    echo "== torch $version"
    if environment "$version" && TORCHINDUCTOR_CACHE_DIR="$work/inductor" "$work/venv/bin/python" scripts/smoke.py; then
        echo "== torch $version: passed"
        echo passed >"$work/found/$version.0.smoke"
    else
        echo "== torch $version: FAILED"
        echo failed >"$work/found/$version.0.smoke"
        failed+=("$version")
    fi
    number=0
    IFS=';' read -ra sets <<<"$libraries"
    for set in "${sets[@]}"; do
        for library in $set; do
            install --no-deps "$library" || echo "== no $library for torch $version"
        done
        LAYERZERO_CACHE_DIR="$work/cache" "$work/venv/bin/python" -m lz_compile doctor --json >"$work/found/$version.$number.json" ||
            rm -f "$work/found/$version.$number.json"
        number=$((number + 1))
    done
    rm -rf "$work/venv" "$work/inductor"
done
"${PYTHON:-python3}" scripts/compatibility.py docs/compatibility.md "$work/found"
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
