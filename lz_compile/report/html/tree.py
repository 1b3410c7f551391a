"""The modules of a model as a tree, alike siblings together, with what became of the ops in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Modules in modules at most; what is deeper is one name.
_DEEPEST = 60


@dataclass(frozen=True)
class Op:
    """An operation in a module: its name, what became of it (``state``), and where the page tells more."""

    name: str
    state: str
    target: str


@dataclass
class Branch:
    """A module: its name in its parent, its path and class, the calls directly in it, its ops and the modules below."""

    name: str
    path: str
    kind: str = ""
    calls: int = 0
    ops: list[Op] = field(default_factory=list)
    below: dict[str, Branch] = field(default_factory=dict)

    @property
    def counts(self) -> list[tuple[Op, int]]:
        """The ops here and below, alike ones together."""
        found: dict[tuple[str, str], list[str]] = {}
        for op in self.all_ops():
            found.setdefault((op.name, op.state), []).append(op.target)
        return [(Op(*key, targets[0] if len({*targets}) == 1 else ""), len(targets)) for key, targets in found.items()]

    @property
    def text(self) -> str:
        """What a search finds."""
        return f"{self.path} {self.kind} {' '.join(op.name for op in self.ops)}".lower()

    def all_ops(self) -> Iterator[Op]:
        """The ops here and below."""
        yield from self.ops
        for child in self.below.values():
            yield from child.all_ops()

    def form(self) -> tuple[object, ...]:
        """What is the same of modules that are alike."""
        told = tuple((op.name, op.state) for op in self.ops)
        return self.kind, told, tuple((name, child.form()) for name, child in self.below.items())

    @property
    def groups(self) -> list[Group]:
        """The modules below, neighbours of one class together."""
        found: list[Group] = []
        for child in self.below.values():
            if found and child.kind and found[-1].members[-1].kind == child.kind and child.name.isdigit():
                found[-1].members.append(child)
            else:
                found.append(Group([child]))
        return found


@dataclass
class Group:
    """Neighbours of one class: ``24 x LlamaDecoderLayer``."""

    members: list[Branch]

    @property
    def is_one(self) -> bool:
        """Whether it is a single module."""
        return len(self.members) == 1

    @property
    def counts(self) -> list[tuple[Op, int]]:
        """The ops in all of them."""
        whole = Branch("", "", below={str(n): each for n, each in enumerate(self.members)})
        return whole.counts

    @property
    def forms(self) -> int:
        """How many kinds of them there are."""
        return len({each.form() for each in self.members})


def tree(modules: Iterable[Mapping[str, Any]], ops: Sequence[tuple[str, Op]]) -> Branch:
    """The model.

    Args:
        modules: path, class and calls of each, as :class:`~lz_compile.report.report.ModuleReport` tells them.
        ops: the path of the module that each is in, and the op.
    """
    root = Branch("model", "")
    for module in modules:
        found = _at(root, module["path"])
        found.kind, found.calls = module["kind"], found.calls + module["calls"]
    for path, op in ops:
        _at(root, path).ops.append(op)
    return root


def _at(root: Branch, path: str) -> Branch:
    here = root
    for name in path.split(".", _DEEPEST) if path else ():
        whole = f"{here.path}.{name}" if here.path else name
        here = here.below.setdefault(name, Branch(name, whole))
    return here
