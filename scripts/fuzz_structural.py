"""Runs random programs through our structural edits and says which differ from eager (``tests/structural_programs.py``).

``python scripts/fuzz_structural.py --first 0 --minutes 60``: from that seed on; ``--seeds 17,23`` runs these alone, and
prints them with ``--show``. Failing programs are made smaller unless ``--no-shrink``, and written to ``--out``.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import logging
import os
import pathlib
import resource
import sys
import tempfile
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
os.environ.setdefault("LAYERZERO_CACHE_DIR", tempfile.mkdtemp(prefix="lz_fuzz_"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10**9, help="how many seeds")
    parser.add_argument("--minutes", type=float, default=1e9, help="when to stop")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of memory, from which on to stop")
    parser.add_argument("--seeds", default="", help="these seeds, separated by commas")
    parser.add_argument("--show", action="store_true", help="print every program and its verdict")
    parser.add_argument("--no-shrink", action="store_true", help="leave failing programs as they were drawn")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="a folder for failing programs, a file each")
    return parser.parse_args()


def main() -> int:
    """Run, print and count; the exit status says whether anything failed."""
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    from structural_oracle import check
    from structural_programs import generate
    from structural_shrinking import shrink

    seeds = map(int, arguments.seeds.split(",")) if arguments.seeds else itertools.count(arguments.first)
    start = time.monotonic()
    counts, edits = collections.Counter[str](), collections.Counter[str]()
    for number, seed in enumerate(itertools.islice(seeds, arguments.count)):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if time.monotonic() - start > 60 * arguments.minutes or memory > arguments.gigabytes:
            break
        program = generate(seed)
        verdict = check(program)
        counts.update(run=verdict.is_run, left_out=not verdict.is_run, failed=verdict.finding is not None)
        counts.update(edited=bool(_structural(verdict.edits)), near=bool(verdict.edits), torchs=verdict.is_torchs)
        edits.update(verdict.edits.keys())
        if arguments.show:
            print(program.text(), f"# run {verdict.is_run}, edits {dict(verdict.edits)}", sep="\n")
        if verdict.finding is not None:
            finding = verdict.finding if arguments.no_shrink else shrink(verdict.finding)
            print(f"=== seed {seed}: {' '.join(sorted(finding.kinds))}\n{finding.text()}\n", flush=True)
            if arguments.out is not None:
                arguments.out.mkdir(parents=True, exist_ok=True)
                (arguments.out / f"{seed}.txt").write_text(finding.text())
        if number % 100 == 99:
            gc.collect()
            _print(seed, counts, edits, start)
    _print(seed, counts, edits, start)
    return int(counts["failed"] > 0)


def _structural(edits: collections.Counter[str]) -> list[str]:
    return [name for name in edits if not name.startswith(("loops kept", "near misses", "refuted"))]


def _print(seed: int, counts: collections.Counter[str], edits: collections.Counter[str], start: float) -> None:
    rate = counts["run"] / (time.monotonic() - start)
    print(
        f"--- seed {seed}: {dict(counts)}, {rate:.2f} programs/s; programs with {dict(edits.most_common())}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
