"""C++ of several kernels as one source.

Inductor (2.13) builds a library for every kernel of a graph. To read its header, to begin and to link takes 0.6 s of the
processor each time, to compile what a usual kernel computes a tenth of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"].*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#(?![ \t]*pragma\b).*$", re.MULTILINE)
#: Characters of the kernels of a library: to compile them takes about twice as long as all else; many still share cores.
#: With 24,000, training of 24 layers takes 7 % more of the processor, with 64,000 more time on two cores.
_MOST = 40_000


def may_be_joined(source: str) -> bool:
    """Whether a kernel asks nothing of the preprocessor beside Inductor's header."""
    return [each.strip() for each in _DIRECTIVE.findall(source)] == [PREFIX]


def shared_out(sources: Sequence[str]) -> Iterator[range]:
    """Which of some kernels are one library: those that follow each other, up to a size."""
    first, size = 0, 0
    for place, source in enumerate(sources):
        if size and size + len(source) > _MOST:
            yield range(first, place)
            first, size = place, 0
        size += len(source)
    yield range(first, len(sources))


def joined(sources: Sequence[str], entry: str) -> str:
    """One source of several with their bindings, each in a namespace of its own, where ``entry`` is called by its number.

    What they include comes first, once.
    """
    includes = dict.fromkeys(each.strip() for source in sources for each in _INCLUDE.findall(source))
    lines = [PREFIX, "#define PY_SSIZE_T_CLEAN", *(each for each in includes if each != PREFIX)]
    for number, source in enumerate(sources):
        lines += [f"#define {entry} {numbered(entry, number)}"] if number else []
        lines += [f"namespace joined_{number} {{", _INCLUDE.sub("", source), "}"]
        lines += [f"#undef {entry}"] if number else []
    return "\n".join((*lines, ""))


def numbered(name: str, number: int) -> str:
    """What the kernel of a number is called in a joined source: the first as ever."""
    return f"{name}_{number}" if number else name
