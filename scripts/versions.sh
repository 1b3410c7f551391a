#!/usr/bin/env bash
# The smoke set on several versions of PyTorch, in a fresh virtual environment for each (several gigabytes, removed afterwards):
#   scripts/versions.sh [version ...]            by default those that the README names
# PYTHON chooses the interpreter; pip follows the usual PIP_* variables. Exit status: 0 only if every version passed.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- 2.11.0 2.13.0 2.15.0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

failed=()
for version in "$@"; do
    echo "== torch $version"
    if "${PYTHON:-python3}" -m venv "$work/venv" &&
        "$work/venv/bin/pip" install --quiet --no-cache-dir "torch==$version" . &&
        TORCHINDUCTOR_CACHE_DIR="$work/inductor" "$work/venv/bin/python" scripts/smoke.py; then
        echo "== torch $version: passed"
    else
        echo "== torch $version: FAILED"
        failed+=("$version")
    fi
    rm -rf "$work/venv" "$work/inductor"
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
