"""Random equivalent spellings of rotary position embedding, composed from independent choices, and their reference.

A `Spelling` is one value per choice. `build()` returns a function of `inputs()` that turns pairs of features spelled that
way, `reference()` the same in float64 from the mathematics, `attributes()` what a recogniser must say of it. Which choices
go together is said once, in `RULES`; the Hypothesis strategy `spellings()` draws only combinations that obey them.

All built functions share one code object: call `torch._dynamo.reset()` between two that are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# Largest absolute and relative error against the reference; values are of order one.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
BATCH, HEADS, LENGTH, SLOTS = 3, 4, 7, 11


def choice(*options: Any) -> Any:
    """A dataclass field with these options; the first is the plainest and the default."""
    return field(default=options[0], metadata={"options": options})


@dataclass(frozen=True)
class Spelling:
    """One way to turn pairs of features; every field is an independent choice within `RULES`."""

    form: str = choice("rotated", "products", "complex", "rolled", "addcmul")
    is_interleaved: bool = choice(False, True)
    # How the features are taken apart and joined again.
    apart: str = choice("slices", "chunk", "split", "narrow", "unbind", "select", "reshape_as")
    joined: str = choice("join", "stack_flatten", "stack_reshape", "stack_view")
    part: str = choice("all", "first", "last", "middle")
    part_by: str = choice("none", "slices", "split", "narrow")
    # Where batch, tokens and heads are, of what is turned.
    layout: str = choice("bhsd", "bhsd_view", "bshd", "bsd", "thd", "bhd", "groups")
    dtype: torch.dtype = choice(torch.float32, torch.bfloat16, torch.float16, torch.float64)  # noqa: RUF009 - a field
    upcast: str = choice("none", "float", "to")
    cast: str = choice("none", "to", "type_as")
    # The tables.
    tables: str = choice("given", "gathered", "angles", "scaled", "chunked")
    table_rank: str = choice("tokens", "batch")
    width: str = choice("whole", "half")
    doubled_by: str = choice("none", "cat", "repeat_interleave", "stack", "repeat", "expand")
    broadcast_by: str = choice("unsqueeze", "index", "view", "expand")
    table_dtype: str = choice("same", "float32")
    complex_by: str = choice("none", "polar", "complex", "view_as_complex", "given")
    # Signs and order.
    is_inverse: bool = choice(False, True)
    order: str = choice("cos_first", "sin_first", "table_left")
    sign: str = choice("in_rotation", "subtracted", "in_table")

    # ---- what it means -----------------------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return 20 if self.part != "all" else 12

    @property
    def start(self) -> int:
        """The first feature that is turned."""
        return {"last": 8, "middle": 5}.get(self.part, 0)

    @property
    def stop(self) -> int:
        """The end of those that are turned: 12 of them, but 8 that start at 5."""
        return self.start + (8 if self.part == "middle" else 12)

    @property
    def pairs(self) -> int:
        """How many pairs there are."""
        return (self.stop - self.start) // 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input."""
        d = self.head_dim
        return {
            "bhsd": (BATCH, LENGTH, HEADS * d),
            "bhsd_view": (BATCH, HEADS, LENGTH, d),
            "bshd": (BATCH, LENGTH, HEADS, d),
            "bsd": (BATCH, LENGTH, d),
            "thd": (LENGTH, HEADS, d),
            "bhd": (BATCH, HEADS, d),
            "groups": (BATCH, 2, HEADS, LENGTH, d),
        }[self.layout]

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The input, two tables (or one of angles, twice) and positions."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*self.shape, generator=generator, dtype=torch.float64)
        has_whole = self.width == "whole" and self.tables != "angles"
        rows = (SLOTS,) if self.tables == "gathered" else self._rows
        columns = self.pairs * (2 if has_whole else 1)
        first, second = (torch.randn(*rows, columns, generator=generator, dtype=torch.float64) for _ in range(2))
        if self.tables == "chunked":
            first = torch.cat((first, second), -1)
        positions = torch.randint(0, SLOTS, self._rows, generator=generator)
        kind = self.dtype if self.table_dtype == "same" else torch.float32
        if self.complex_by == "given":
            first = torch.complex(first, second)
            kind = torch.complex128 if self.dtype == torch.float64 else torch.complex64
        return x.to(self.dtype), first.to(kind), second.to(self.dtype if kind.is_complex else kind), positions

    @property
    def _rows(self) -> tuple[int, ...]:
        """The rows of tables."""
        if self.layout == "thd":
            return (LENGTH,)
        if self.layout == "bhd":
            return (BATCH,)
        return (BATCH, LENGTH) if self.table_rank == "batch" else (LENGTH,)

    def reference(self, x: Tensor, first: Tensor, second: Tensor, positions: Tensor) -> Tensor:
        """The value in float64."""
        x = _heads(self, x.double())
        cos, sin = self._tables(first, second, positions)
        sin = -sin if self.is_inverse else sin
        (cos_a, cos_b), (sin_a, sin_b) = (self._halves(_spread(self, each)) for each in (cos, sin))
        turned = x[..., self.start : self.stop]
        a, b = (turned[..., ::2], turned[..., 1::2]) if self.is_interleaved else turned.chunk(2, -1)
        out_a, out_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        out = torch.stack((out_a, out_b), -1).flatten(-2) if self.is_interleaved else torch.cat((out_a, out_b), -1)
        return torch.cat((x[..., : self.start], out, x[..., self.stop :]), -1)

    def _tables(self, first: Tensor, second: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if first.is_complex():
            return first.real.double(), first.imag.double()
        if self.tables == "chunked":
            first, second = first.chunk(2, -1)
        first, second = first.double(), second.double()
        if self.tables == "angles" or self.complex_by == "polar":
            first, second = first.cos(), first.sin()
        if self.tables == "gathered":
            first, second = first[positions], second[positions]
        return (first * 1.25, second * 1.25) if self.tables == "scaled" else (first, second)

    def _halves(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """A table at the first and at the second of a pair."""
        if table.shape[-1] == self.pairs:
            return table, table
        if self.form == "products":  # the first half of it is all that is read
            return table[..., : self.pairs], table[..., : self.pairs]
        return (table[..., ::2], table[..., 1::2]) if self.is_interleaved else table.chunk(2, -1)  # type: ignore[return-value]

    def attributes(self) -> dict[str, Any]:
        """What a recogniser must say."""
        return {
            "is_interleaved": self.is_interleaved,
            "rotary_dim": self.stop - self.start,
            "rotary_start": self.start,
        }

    # ---- how it is spelled -------------------------------------------------------------------------------------

    def build(self) -> Callable[..., Tensor]:
        """A function of `inputs()`."""

        def run(x: Tensor, first: Tensor, second: Tensor, positions: Tensor) -> Tensor:
            x = _heads(self, x)
            before, turned, after = _parted(self, x)
            wide = turned
            if self.upcast != "none":
                wide = turned.float() if self.upcast == "float" else turned.to(torch.float32)
            if self.form == "complex":
                out = _complex(self, wide, first, second)
            else:
                cos, sin = _tables(self, first, second, positions)
                out = _turned(self, wide, _spread(self, cos), _spread(self, sin))
            if self.cast != "none":
                out = out.to(x.dtype) if self.cast == "to" else out.type_as(turned)
            kept = [each for each in (before, out, after) if each is not None]
            return torch.cat(kept, -1) if len(kept) > 1 else out

        return run


def _heads(s: Spelling, x: Tensor) -> Tensor:
    """The input with its heads apart."""
    if s.layout == "bhsd":
        return x.view(BATCH, -1, HEADS, s.head_dim).transpose(1, 2)
    return x


def _parted(s: Spelling, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The features before those that are turned, these, and those after."""
    if s.part == "all":
        return None, x, None
    sizes = [s.start, s.stop - s.start, s.head_dim - s.stop]
    if s.part_by == "split":
        parts = list(x.split([size for size in sizes if size], -1))
        before = parts.pop(0) if s.start else None
        return before, parts[0], parts[1] if len(parts) > 1 else None
    if s.part_by == "narrow":
        cut = [x.narrow(-1, start, size) for start, size in zip((0, s.start, s.stop), sizes, strict=True)]
    else:
        cut = [x[..., : s.start], x[..., s.start : s.stop], x[..., s.stop :]]
    return cut[0] if s.start else None, cut[1], cut[2] if s.stop < s.head_dim else None


def _tables(s: Spelling, first: Tensor, second: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, with one entry for each feature where the form needs that."""
    if s.tables == "gathered":
        first, second = first[positions], second[positions]
    if s.tables == "chunked":
        first, second = first.chunk(2, -1)
    if s.tables == "angles":
        if s.doubled_by != "none":
            first = _doubled(s, first)
        return first.cos(), first.sin()
    if s.doubled_by != "none":
        first, second = _doubled(s, first), _doubled(s, second)
    return (first * 1.25, second * 1.25) if s.tables == "scaled" else (first, second)


def _doubled(s: Spelling, table: Tensor) -> Tensor:
    spelled: Mapping[str, Callable[[], Tensor]] = {
        "cat": lambda: torch.cat((table, table), -1),
        "repeat": lambda: table.repeat(*(1,) * (table.dim() - 1), 2),
        "repeat_interleave": lambda: table.repeat_interleave(2, dim=-1),
        "stack": lambda: torch.stack((table, table), -1).reshape(*table.shape[:-1], -1),
        "expand": lambda: table[..., None].expand(*table.shape, 2).flatten(-2),
    }
    return spelled[s.doubled_by]()


def _spread(s: Spelling, table: Tensor) -> Tensor:
    """A table with a dimension of one where the heads are."""
    if s.layout == "bsd":
        return table
    where = {"bshd": -2, "thd": -2, "bhd": -2}.get(s.layout, -3)
    if where == -3 and table.dim() == 2:
        return table
    if s.broadcast_by == "index":
        table = table[..., None, :] if where == -2 else table[:, None]
    elif s.broadcast_by == "view":
        shape = list(table.shape)
        shape.insert(len(shape) + 1 + where, 1)
        table = table.view(*shape)
    else:
        table = table.unsqueeze(where)
    if s.broadcast_by == "expand":
        sizes = [-1] * table.dim()
        sizes[where] = HEADS
        table = table.expand(*sizes)
    return table[:, None] if s.layout == "groups" else table


def _pairs(s: Spelling, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of every pair."""
    if s.is_interleaved:
        spelled: Mapping[str, Callable[[], Any]] = {
            "slices": lambda: (x[..., ::2], x[..., 1::2]),
            "chunk": lambda: (each.squeeze(-1) for each in x.unflatten(-1, (-1, 2)).chunk(2, -1)),
            "split": lambda: (each[..., 0] for each in x.reshape(*x.shape[:-1], -1, 2).split(1, dim=-1)),
            "narrow": lambda: (x.unflatten(-1, (-1, 2)).narrow(-1, i, 1).squeeze(-1) for i in (0, 1)),
            "unbind": lambda: x.unflatten(-1, (-1, 2)).unbind(-1),
            "select": lambda: (x.reshape(*x.shape[:-1], s.pairs, 2).select(-1, i) for i in (0, 1)),
            "reshape_as": lambda: (x[..., 0::2], x[..., 1::2]),
        }
    else:
        spelled = {
            "slices": lambda: (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]),
            "chunk": lambda: x.chunk(2, dim=-1),
            "split": lambda: torch.split(x, s.pairs, dim=-1),
            "narrow": lambda: (x.narrow(-1, start, s.pairs) for start in (0, s.pairs)),
            "unbind": lambda: x.unflatten(-1, (2, -1)).unbind(-2),
            "select": lambda: (x.reshape(*x.shape[:-1], 2, s.pairs)[..., i, :] for i in (0, 1)),
            "reshape_as": lambda: torch.tensor_split(x, 2, dim=-1),
        }
    first, second = spelled[s.apart]()
    return first, second


def _joined(s: Spelling, first: Tensor, second: Tensor, like: Tensor) -> Tensor:
    if s.joined == "join" and not s.is_interleaved:
        return torch.cat((first, second), dim=-1)
    stacked = torch.stack((first, second), dim=-1 if s.is_interleaved else -2)
    if s.joined == "stack_reshape":
        return stacked.reshape(*first.shape[:-1], -1)
    if s.joined == "stack_view":
        return stacked.view(like.shape) if s.apart != "reshape_as" else stacked.reshape_as(like)
    return stacked.flatten(-2)


def _turned(s: Spelling, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    sin = -sin if s.is_inverse and s.sign == "in_table" else sin
    flips = s.is_inverse and s.sign != "in_table"
    first, second = _pairs(s, x)
    if s.form == "products":
        cos, sin = (each[..., : s.pairs] if s.width == "whole" else each for each in (cos, sin))
        if flips:
            return _joined(s, first * cos + second * sin, second * cos - first * sin, x)
        if s.order == "sin_first":
            return _joined(s, -second * sin + first * cos, first * sin + second * cos, x)
        return _joined(s, first * cos - second * sin, second * cos + first * sin, x)
    if s.form == "rolled":
        sign = torch.ones_like(sin)
        return x * cos + torch.roll(x, s.pairs, -1) * torch.cat((-sin[..., : s.pairs], sin[..., s.pairs :]), -1) * sign
    backwards = s.sign == "subtracted"
    rotated = _joined(s, second, -first, x) if backwards != flips else _joined(s, -second, first, x)
    if s.form == "addcmul":
        return torch.addcmul(x * cos, rotated, sin, value=-1 if backwards else 1)
    if backwards:
        return x * cos - rotated * sin
    if s.order == "sin_first":
        return (rotated * sin) + (x * cos)
    return cos * x + sin * rotated if s.order == "table_left" else (x * cos) + (rotated * sin)


def _complex(s: Spelling, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The product with complex numbers, read back as real ones."""
    if s.complex_by == "given":
        table = first
    elif s.complex_by == "polar":
        table = torch.polar(torch.ones_like(first), first)
    elif s.complex_by == "complex":
        table = torch.complex(first, second)
    else:
        table = torch.view_as_complex(torch.stack((first, second), -1))
    table = table.conj() if s.is_inverse else table
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    table = _spread(s, table)
    turned = table * numbers if s.order == "table_left" else numbers * table
    out = torch.view_as_real(turned)
    return out.reshape(x.shape) if s.joined == "stack_reshape" else out.flatten(-2)


# ---- which choices go together -------------------------------------------------------------------------------------

Rule = Callable[[Mapping[str, Any], Any], bool]

RULES: Mapping[str, Rule] = {
    "is_interleaved": lambda g, o: o if g["form"] == "complex" else not o or g["form"] != "rolled",
    "apart": lambda g, o: o == "slices" or g["form"] not in ("complex", "rolled"),
    "joined": lambda g, o: (
        o in ("join", "stack_reshape") if g["form"] == "complex" else o == "join" or g["form"] != "rolled"
    ),
    "part_by": lambda g, o: (o != "none") == (g["part"] != "all"),
    "dtype": lambda g, o: g["form"] != "complex" or o != torch.float16,
    "upcast": lambda g, o: (o == "none") == (g["form"] != "complex") if g["dtype"] in HALF and g["form"] == "complex" else o == "none" or g["dtype"] in HALF,
    "cast": lambda g, o: (o != "none") == (g["upcast"] != "none") or (o != "none" and g["upcast"] == "none"),
    "tables": lambda g, o: o in ("given",) or g["form"] != "complex",
    "table_rank": lambda g, o: o == "tokens" or g["layout"] not in ("thd", "bhd"),
    "width": lambda g, o: (
        o == "half" if g["form"] == "complex" or g["tables"] == "angles" else o == "whole" or g["form"] != "rolled"
    ),
    "doubled_by": lambda g, o: (
        (o != "none") == (g["width"] == "half" and g["form"] not in ("products", "complex"))
        and (o == "none" or (o in ("repeat_interleave", "stack", "expand")) == g["is_interleaved"])
    ),
    "table_dtype": lambda g, o: (
        o == "same"
        if g["dtype"] not in HALF
        else o == "float32" if g["form"] == "complex" else True
    ),
    "complex_by": lambda g, o: (o != "none") == (g["form"] == "complex"),
    "is_inverse": lambda g, o: not o or g["form"] != "rolled",
    "order": lambda g, o: (
        o == "cos_first"
        or (o == "sin_first" and g["form"] in ("rotated", "products") and not g["is_inverse"])
        or (o == "table_left" and g["form"] in ("rotated", "complex"))
    ),
    "sign": lambda g, o: (
        o == "in_rotation"
        or (o == "subtracted" and g["form"] in ("rotated", "addcmul") and g["order"] == "cos_first")
        or (o == "in_table" and g["is_inverse"] and g["form"] not in ("complex", "rolled"))
    ),
}  # fmt: skip


@st.composite
def spellings(draw: st.DrawFn, **fixed: Any) -> Spelling:
    """Spellings that obey `RULES`, with some choices fixed."""
    given: dict[str, Any] = {}
    for each in fields(Spelling):
        options = [
            option
            for option in each.metadata["options"]
            if fixed.get(each.name, option) == option
            and RULES.get(each.name, lambda _given, _option: True)(given, option)
        ]
        if not options:
            reject()
        given[each.name] = draw(st.sampled_from(options))
    return Spelling(**given)
