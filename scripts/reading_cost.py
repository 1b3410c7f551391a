"""How much of the package stands behind a module: what it imports, what that imports, and so on, in files and lines.

``python scripts/reading_cost.py lz_compile.passes.attention.recogniser`` prints both, by room; imports that only types need
count, imports inside of functions too.
"""

from __future__ import annotations

import argparse
import ast
import collections
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def path_of(module: str) -> pathlib.Path | None:
    """The file of a module of the package; None for packages and names in a module."""
    path = (ROOT / pathlib.Path(*module.split("."))).with_suffix(".py")
    return path if path.exists() else None


def imported(path: pathlib.Path) -> set[str]:
    """The modules of the package that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return {name for name in names if name.startswith("lz_compile.") and path_of(name)}


def behind(start: str) -> dict[str, int]:
    """All modules that are read with one, itself included, with their lines."""
    found: dict[str, int] = {}
    stack = [start]
    while stack:
        module = stack.pop()
        path = path_of(module)
        if path is None or module in found:
            continue
        found[module] = len(path.read_text().splitlines())
        stack += imported(path)
    return found


def main() -> int:
    """Print the table; the exit status says whether a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("--files", type=int, default=10**6, help="at most so many")
    parser.add_argument("--lines", type=int, default=10**9, help="at most so many")
    arguments = parser.parse_args()
    found = behind(arguments.module)
    if not found:
        parser.error(f"no module {arguments.module}")
    rooms = collections.Counter[str]()
    for module, lines in found.items():
        rooms[module.rpartition(".")[0]] += lines
    for room, lines in rooms.most_common():
        count = sum(module.rpartition(".")[0] == room for module in found)
        print(f"{room:<40} {count:>4} files {lines:>6} lines")
    print(f"{arguments.module}: {len(found)} files, {sum(found.values())} lines")
    return int(len(found) > arguments.files or sum(found.values()) > arguments.lines)


if __name__ == "__main__":
    sys.exit(main())
