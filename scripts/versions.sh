#!/usr/bin/env bash
# The smoke set on several versions of PyTorch, in a fresh virtual environment for each (several gigabytes, removed afterwards), and
# docs/compatibility.md from what was tried there:
#   scripts/versions.sh [version ...]            by default those that the README names
# PYTHON chooses the interpreter; pip follows the usual PIP_* variables. LIBRARIES names optional kernel libraries to be tried with each
# version, by default those that install everywhere; each is installed without what it depends on, so that PyTorch stays the one that is
# tried. Exit status: 0 only if every version passed.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- 2.11.0 2.13.0 2.15.0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
libraries="${LIBRARIES-liger-kernel fla-core xgrammar apache-tvm-ffi}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/found"

failed=()
for version in "$@"; do
    echo "== torch $version"
    if "${PYTHON:-python3}" -m venv "$work/venv" &&
        "$work/venv/bin/pip" install --quiet --no-cache-dir "torch==$version" . &&
        TORCHINDUCTOR_CACHE_DIR="$work/inductor" "$work/venv/bin/python" scripts/smoke.py; then
        echo "== torch $version: passed"
        echo passed >"$work/found/$version.smoke"
    else
        echo "== torch $version: FAILED"
        echo failed >"$work/found/$version.smoke"
        failed+=("$version")
    fi
    for library in $libraries; do
        "$work/venv/bin/pip" install --quiet --no-cache-dir --no-deps "$library" || echo "== no $library for torch $version"
    done
    LAYERZERO_CACHE_DIR="$work/cache" "$work/venv/bin/python" -m lz_compile doctor --json >"$work/found/$version.json" ||
        rm -f "$work/found/$version.json"
    rm -rf "$work/venv" "$work/inductor"
done
"${PYTHON:-python3}" scripts/compatibility.py docs/compatibility.md "$work/found"
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
