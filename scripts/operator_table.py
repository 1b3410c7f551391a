"""Writes ``docs/formulas.md``: what the formula core reads of each operator, as the core itself says it.

python scripts/operator_table.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.blend import terms
from lz_compile.passes.formula import arithmetic, contraction, layout, moves, parts, pointwise, value_rules
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.formula.piecewise import Number, Piecewise, Value
from lz_compile.passes.formula.polynomial import Polynomial, Variable
from lz_compile.passes.formula.predicates import AtLeast, Constant, Every, Given, Predicate, Some, Zero
from lz_compile.passes.formula.reader import Reader, Source, Sum
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.loops.recurrence import step_rules

PAGE = Path(__file__).parents[1] / "docs" / "formulas.md"
_LETTERS = "ijklmnop"

#: A call of every operator, with ``x`` and ``y`` of 4 by 6 numbers.
EXAMPLES: Mapping[str, Callable[[Any, Any], Any]] = {
    # moves
    "getitem": lambda x, y: x[1:, ::2],
    "select": lambda x, y: x.select(1, -1),
    "narrow": lambda x, y: x.narrow(1, 2, 3),
    "index_select": lambda x, y: x.index_select(1, torch.arange(x[0, :3].size(0)) * 2),
    "gather": lambda x, y: x.gather(1, (torch.arange(x[0, :3].size(0)) * 2).expand(4, 3)),
    "take_along_dim": lambda x, y: x.take_along_dim((torch.arange(x[0, :3].size(0)) * 2)[None], 1),
    "embedding": lambda x, y: F.embedding(torch.arange(x[:2].size(0)) + 1, x),
    "flip": lambda x, y: x.flip(1),
    "roll": lambda x, y: x.roll(2, 1),
    "unfold": lambda x, y: x.unfold(1, 3, 1),
    "diagonal": lambda x, y: x.diagonal(1),
    "as_strided": lambda x, y: x.as_strided((3, 4), (6, 1), 2),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "pad": lambda x, y: F.pad(x, (2, 0)),
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:, :2], 1, 3, 5),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, 2),
    "index_copy": lambda x, y: x.index_copy(1, torch.arange(y[0, :3].size(0)) + 2, y[:, :3]),
    # layouts
    "transpose": lambda x, y: x.transpose(0, 1),
    "t": lambda x, y: x.t(),
    "permute": lambda x, y: x.permute(1, 0),
    "movedim": lambda x, y: x.movedim(0, 1),
    "view": lambda x, y: x.view(4, 2, 3),
    "reshape": lambda x, y: x.reshape(3, 8),
    "flatten": lambda x, y: x.flatten(),
    "unflatten": lambda x, y: x.unflatten(1, (2, 3)),
    "ravel": lambda x, y: x.ravel(),
    "view_as": lambda x, y: x.view_as(y),
    "reshape_as": lambda x, y: x.reshape_as(y),
    "expand": lambda x, y: x[:, :1].expand(4, 3),
    "expand_as": lambda x, y: x[:1].expand_as(y),
    "unsqueeze": lambda x, y: x.unsqueeze(1),
    "squeeze": lambda x, y: x[:, :1].squeeze(1),
    "repeat_interleave": lambda x, y: x.repeat_interleave(2, 1),
    "repeat": lambda x, y: x.repeat(2, 1),
    "tile": lambda x, y: x.tile(2),
    "contiguous": lambda x, y: x.contiguous(),
    "clone": lambda x, y: x.clone(),
    "positive": lambda x, y: x.positive(),
    "detach": lambda x, y: x.detach(),
    # arithmetic
    "add": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: 3 - x,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "square": lambda x, y: x.square(),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "div": lambda x, y: x / 4,
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x, value=2),
    "hypot": torch.hypot,
    # positions and conditions on them
    "arange": lambda x, y: torch.arange(1, x.size(1), 2),
    "eye": lambda x, y: torch.eye(x.size(0)),
    "tril": lambda x, y: x.tril(1),
    "triu": lambda x, y: x.triu(),
    "cumsum": lambda x, y: torch.ones_like(x).cumsum(1),
    "diff": lambda x, y: x.diff(),
    "floor_divide": lambda x, y: torch.arange(x.size(1)).floor_divide(4),
    "remainder": lambda x, y: torch.arange(x.size(1)).remainder(4),
    "le": lambda x, y: torch.arange(x.size(1)) <= torch.arange(x.size(0))[:, None],
    "where": lambda x, y: torch.where(torch.arange(x.size(1)) > 2, x, y),
    "masked_fill": lambda x, y: x.masked_fill(torch.arange(x.size(1)) > 2, 0.0),
    "clamp": lambda x, y: torch.arange(x.size(1)).clamp(max=4),
    "abs": lambda x, y: (torch.arange(x.size(1)) - 3).abs(),
    # sums of products
    "matmul": lambda x, y: x @ y.t(),
    "linear": F.linear,
    "einsum": lambda x, y: torch.einsum("ab,ac,b->c", x, y, y[0]),
    "inner": torch.inner,
    "mv": lambda x, y: torch.mv(x, y[0]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "linalg_vecdot": lambda x, y: torch.linalg.vecdot(x[:, None], y, dim=-1),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=([1], [1])),
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "sum": lambda x, y: x.sum(1),
    "mean": lambda x, y: x.mean(1),
}
#: What is read as another operator of the table is.
ALIKE = {
    **dict.fromkeys(("lt", "ge", "gt", "eq", "ne", "not", "and", "or", "xor", "logical_xor", "bitwise_xor"), "le"),
    **dict.fromkeys(("max", "min", "maximum", "minimum", "clamp_min", "clamp_max"), "clamp"),
    **dict.fromkeys(("mm", "bmm", "baddbmm", "addmm"), "matmul"),
    **dict.fromkeys(("floordiv",), "floor_divide"),
    **dict.fromkeys(("mod",), "remainder"),
    **dict.fromkeys(("mT", "T"), "transpose"),
    **dict.fromkeys(("alias",), "clone"),
    **dict.fromkeys(("fill", "zero"), "masked_fill"),
    **dict.fromkeys(("isinf", "isneginf", "isposinf"), "le"),
}
_FAMILIES: Mapping[str, frozenset[str]] = {
    "masks": frozenset(value_rules.RULES) | moves.RULES.keys() | layout.NAMES,
    "attention, norms, MLPs": frozenset(pointwise.POINTWISE) | contraction.PRODUCTS | layout.NAMES,
    "rotations, weights of few bits": frozenset(parts.FUNCTIONS) | pointwise.POINTWISE.keys() | layout.NAMES,
    "loops": frozenset(rule.__name__.partition(".")[0] for rule in step_rules.RULES),
    "blends": frozenset(terms.RULES) | layout.NAMES,
}


class Text:
    """A value in words, its axes as letters."""

    def __init__(self, reader: Reader, names: Mapping[Any, str]) -> None:
        self.reader, self.names = reader, dict(names)

    def value(self, found: Value) -> str:
        """A number by cases, or a condition."""
        if not isinstance(found, Piecewise):
            return self.condition(found)
        (_, last), *others = reversed(found.cases)
        parts_ = [f"{self.number(each)} if {self.condition(where)}" for where, each in reversed(others)]
        return " else ".join([*parts_, self.number(last)])

    def number(self, found: Number) -> str:
        """A polynomial."""
        if not isinstance(found, Polynomial):
            return str(found)
        text = ""
        for monomial, factor in sorted(found.terms.items(), key=lambda term: (not term[0], self._key(term[0]))):
            names = "·".join(map(self.variable, monomial))
            size = abs(Fraction(factor))
            part = names if size == 1 and names else f"{size} {names}".strip()
            text += (" - " if factor < 0 else " + ") + part
        return (text.removeprefix(" + ").replace(" - ", "-", 1) if text.startswith(" - ") else text[3:]) or "0"

    def _key(self, monomial: tuple[Variable, ...]) -> tuple[int, str]:
        return -len(monomial), "·".join(map(self.variable, monomial))

    def variable(self, each: Variable) -> str:
        """An axis, a tensor at an index, a quotient or a sum."""
        source = each.source
        if isinstance(source, tuple):
            return f"(({self.number(source[0])}) // {source[1]})"
        if isinstance(source, Source):
            return f"{source.node.name}[{', '.join(self.number(self.reader.place(dim)) for dim in source.dims)}]"
        if isinstance(source, Sum):
            for axis in source.over:
                self.names.setdefault(axis, _LETTERS[len(self.names)])
            return f"sum over {', '.join(self.names[axis] for axis in source.over)} of {self.value(source.body)}"
        return str(self.names[source])

    def condition(self, found: Predicate) -> str:
        """A condition."""
        match found:
            case Constant(holds):
                return str(holds)
            case AtLeast(value):
                return f"{self.number(value)} >= 0"
            case Zero(value, holds):
                return f"{self.number(value)} {'==' if holds else '!='} 0"
            case Given(flag, holds):
                return self.variable(flag) if holds else f"not {self.variable(flag)}"
            case Every(each):
                return " and ".join(sorted(map(self.condition, each)))
            case Some(each):
                return " or ".join(sorted(map(self.condition, each)))


class _Recorder(fx.Interpreter):
    """Notes every value as an example."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["example_value"] = value
        return value


def reading(make: Callable[[Any, Any], Any]) -> str:
    """What the core reads of a call, at an index of its result."""
    module = fx.symbolic_trace(_wrapped(make))
    given = torch.arange(24.0).reshape(4, 6)
    _Recorder(module).run(given, given + 1)
    (node,) = next(each for each in module.graph.nodes if each.op == "output").all_input_nodes
    reader, dims = Reader(Effects(module.graph)), fresh(shape_of(known_tensor(node)))
    reader.give(dims)
    names = {dim[0]: letter for dim, letter in zip(dims, _LETTERS, strict=False) if dim}
    return Text(reader, names).value(reader.read(node, dims))


def _wrapped(make: Callable[[Any, Any], Any]) -> torch.nn.Module:
    """A module, whose trace names its inputs."""

    class Made(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return make(x, y)

    return Made()


def page() -> str:
    """The page with a row for every operator."""
    before = PAGE.read_text().partition("| operator |")[0]
    rows = ["| operator | of `x` and `y`, at `i`, `j`, ... | read for |", "|---|---|---|"]
    for name, make in EXAMPLES.items():
        alike = [other for other, own in ALIKE.items() if own == name]
        names = ", ".join(f"`{each}`" for each in (name, *alike))
        families = ", ".join(family for family, own in _FAMILIES.items() if name in own)
        rows.append(f"| {names} | `{reading(make)}` | {families} |")
    return before + "\n".join(rows) + "\n"


def unlisted() -> set[str]:
    """Operators of the core's tables that the page would not show."""
    tables = (arithmetic.ARITHMETIC, moves.RULES, value_rules.RULES, layout.NAMES)
    return set().union(*tables) - EXAMPLES.keys() - ALIKE.keys() - value_rules.CASTS


if __name__ == "__main__":
    PAGE.write_text(page())
