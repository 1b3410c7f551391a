"""docs/compatibility.md from what was really tried: the JSON of ``doctor --json``, one for each environment.

``scripts/versions.sh`` calls it:

    python scripts/compatibility.py docs/compatibility.md DIRECTORY    with every NAME.json (and NAME.smoke) in it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = """# Compatibility

Written by `scripts/compatibility.py` from what was really tried, not by hand. `scripts/versions.sh` makes an environment for
each version of PyTorch, runs the smoke set there, and asks `python -m lz_compile doctor --json`. A library is imported for
the first time in a process of its own, with a time limit. Your own row is what `doctor` shows on your machine.

| outcome | meaning |
|---|---|
| imports | the adapter and what it needs of the library were imported |
| raises | the import is an exception; the library's kernels are refused with it |
| ends its process, hangs | the library is not imported in your process any more until its files are others |

Versions outside of those that are accepted were tried, too; kernels refuse them. That a library imports
says nothing about devices: kernels for GPUs are not run by this.
"""


def main(arguments: Sequence[str]) -> int:
    """Write the page; the exit code."""
    if len(arguments) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    target, directory = map(Path, arguments)
    paths = sorted(directory.glob("*.json"))
    if not paths:
        sys.stderr.write(f"compatibility: expected doctor's JSON in {directory}, found none. Run scripts/versions.sh\n")
        return 1
    parts = [part for path in paths for part in _environment(path)]
    target.write_text("\n".join([HEAD, *parts]) + "\n", encoding="utf-8")
    return 0


def _environment(path: Path) -> Iterator[str]:
    told: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    software, smoke = told["software"], path.with_suffix(".smoke")
    yield f"## PyTorch {software['torch']}\n"
    built = ", ".join(f"{name} {software[name]}" for name in ("python", "triton", "cuda", "hip") if name in software)
    devices = ", ".join(f"{each['device']} {each['device_name']} ({each['signature']})" for each in told["hardware"])
    yield f"{built}; {devices}.\n"
    if smoke.exists():
        yield f"Smoke set (`scripts/smoke.py`): {smoke.read_text(encoding='utf-8').strip()}.\n"
    if not told["libraries"]:
        yield "No optional kernel library was installed.\n"
        return
    yield "| library | version | accepted | adapter | outcome | said | seconds |\n|---|---|---|---|---|---|---|"
    for each in told["libraries"]:
        accepted = each["versions"] or "any"
        adapter = each["module"].removeprefix("lz_compile.lowering.kernels.")
        cells = (each["package"], each["version"], accepted, adapter, each["outcome"], each["text"], each["seconds"])
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""


def _cell(value: object) -> str:
    text = " ".join(str(value).split()).replace("|", "\\|")
    return text if len(text) <= 120 else f"{text[:120]} ..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
