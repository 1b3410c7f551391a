"""Factors and summands of a state that are computed while it is scanned: lines of arithmetic over other tensors.

A model multiplies what it has for each step and row by what it has for each step and column, or for each element once.
Written to memory and read again, the product takes longer than all of the scan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import torch

from lz_compile.lowering.cpp.vectors import ELEMENTS
from lz_compile.lowering.ops.scan import DecayKind, factor_kind

#: A function and what it is given: ``x3`` is a tensor, ``y3`` what line 3 gives, anything else a number.
Line: TypeAlias = "tuple[str | float, ...]"
#: What there is one number for, and its dtype.
Leaf: TypeAlias = tuple[DecayKind, torch.dtype]

#: Operands that can be computed: of each column by itself.
COMPUTED = ("decay", "drive", "right")

#: Functions of a line, in Python and in C++.
FUNCTIONS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "add": (operator.add, "{} + {}"),
    "sub": (operator.sub, "{} - {}"),
    "mul": (operator.mul, "{} * {}"),
    "div": (operator.truediv, "{} / {}"),
    "neg": (operator.neg, "-{}"),
    "reciprocal": (torch.reciprocal, "Acc(1) / {}"),
    "exp": (torch.exp, "exponential({})"),
    "sigmoid": (torch.sigmoid, "Acc(1) / (Acc(1) + exponential(-{}))"),
}


@dataclass(frozen=True)
class Recipe:
    """How operands of a scan are computed: by the last of some lines. None: they are given. ``last``: whether it is read."""

    decay: tuple[Line, ...] | None = None
    drive: tuple[Line, ...] | None = None
    right: tuple[Line, ...] | None = None
    last: bool = True

    def of(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The operands, computed by PyTorch from leaves ``[B, H, T, K, V]`` that broadcast."""
        wide = [each.to(compute_dtype(leaves)) for each in leaves]
        return {name: _value(lines, wide) for name, lines in self.given().items()}

    def given(self) -> dict[str, tuple[Line, ...]]:
        """The lines of those that are computed."""
        return {name: lines for name in COMPUTED if (lines := getattr(self, name)) is not None}


def compute_dtype(leaves: Sequence[torch.Tensor]) -> torch.dtype:
    """What lines are computed in."""
    return reduce(torch.promote_types, (each.dtype for each in leaves), torch.float32)


def leaf_of(tensor: torch.Tensor) -> Leaf:
    """What the code is written for."""
    return factor_kind(tensor), tensor.dtype


def _value(lines: Sequence[Line], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    known: dict[Any, Any] = {f"x{place}": each for place, each in enumerate(leaves)}
    for place, (name, *given) in enumerate(lines):
        known[f"y{place}"] = FUNCTIONS[str(name)][0](*[known.get(each, each) for each in given])
    found: torch.Tensor = known[f"y{len(lines) - 1}"]
    return found


# ---- C++ -------------------------------------------------------------------------------------------------------------


def leaves_source(leaves: Sequence[Leaf]) -> str:
    """``Leaves``: where the tensors are."""
    views = " ".join(f"View<const {ELEMENTS[dtype]}> x{place};" for place, (_, dtype) in enumerate(leaves))
    taken = " ".join(f"from.take(x{place});" for place in range(len(leaves)))
    return f"struct Leaves {{ {views} template <class From> void take(From& from) {{ {taken} }} }};"


def terms_source(recipe: Recipe, leaves: Sequence[Leaf]) -> str:
    """``DecayTerm``, ``DriveTerm`` and ``RightTerm``: their rows, for some columns of a state."""
    computed = recipe.given()
    return "\n".join(
        _computed(f"{name.title()}Term", computed[name], leaves) if name in computed else _given(name)
        for name in COMPUTED
    )


_TERM = "(const Problem& p, const Rows& rows, const Place& at)"


def _given(name: str) -> str:
    term = name.title()
    kind, shared = ("kFull", "nullptr") if name == "right" else (f"k{term}", f"rows.{name}")
    return f"""
struct {term}Term : Term<{kind}, {term}T> {{
  INLINE_MEMBER {term}Term{_TERM} : Term(p.{name}, {shared}, at) {{}}
}};"""


def _computed(name: str, lines: Sequence[Line], leaves: Sequence[Leaf]) -> str:
    used = sorted({int(str(each)[1:]) for _, *given in lines for each in given if str(each).startswith("x")})
    members = " ".join(f"Leaf<k{leaves[x][0].title()}, {ELEMENTS[leaves[x][1]]}> x{x};" for x in used)
    made = ", ".join(f"x{x}(p.leaves.x{x}, at)" for x in used)
    read = ", ".join(f"b{x} = x{x}[i]" for x in used)
    body = " ".join(f"const Vec y{place} = {_line(line)};" for place, line in enumerate(lines))
    return f"""
struct {name} {{
  {members}
  INLINE_MEMBER {name}{_TERM} : {made} {{}}
  INLINE_MEMBER Block operator[](int64_t i) const {{
    const Block {read};
    Block out;
    for (int64_t n = 0; n < kVectors; ++n) {{ {body} out.v[n] = y{len(lines) - 1}; }}
    return out;
  }}
}};"""


def _line(line: Line) -> str:
    name, *given = line
    return FUNCTIONS[str(name)][1].format(*map(_operand, given))


def _operand(given: str | float) -> str:
    if isinstance(given, str):
        return f"b{given[1:]}.v[n]" if given.startswith("x") else given
    return f"(Vec{{}} + Acc({given!r}))"


#: What a leaf is for some columns of a state. It needs what ``cpp_step`` says of places.
LEAF = """
template <Kind kind, class T> class Leaf {
 public:
  INLINE_MEMBER Leaf(const View<const T>& view, const Place& at)
      : from_(view.at(at.b, at.h, at.t) + (varies(kind) ? at.column * view.s[4] : 0)),
        rows_(view.s[3]), columns_(view.s[4]), count_(at.count) {
    if constexpr (kind == kScalar) block_ = splat(static_cast<Acc>(*from_));
    if constexpr (kind == kValue) block_ = load(from_, columns_, count_);
  }
  INLINE_MEMBER Block operator[](int64_t i) const {
    if constexpr (kind == kKey) return splat(static_cast<Acc>(from_[i * rows_]));
    else if constexpr (kind == kFull) return load(from_ + i * rows_, columns_, count_);
    else return block_;
  }

 private:
  const T* from_;
  int64_t rows_, columns_, count_;
  Block block_;
};

constexpr double inverse_factorial(int k) { return k ? inverse_factorial(k - 1) / k : 1; }
INLINE Vec power_of_two(const MaskVec& n) {
  constexpr int kBits = std::is_same_v<Acc, float> ? 23 : 52, kOne = std::is_same_v<Acc, float> ? 127 : 1023;
  return (Vec)((n + kOne) << kBits);
}
// exp(x), within 2 ulp. 2^n comes in two factors, so that what is too small for a normal number is rounded once.
INLINE Vec exponential(const Vec& x) {
  constexpr bool kFloat = std::is_same_v<Acc, float>;
  constexpr Acc kLeast = kFloat ? -104 : -746, kMost = kFloat ? 89 : 710;
  constexpr Acc kLow = kFloat ? -2.12194440e-4 : 1.42860682030941723212e-6, kHigh = kFloat ? 0.693359375 : 0.693145751953125;
  Vec y = x < kLeast ? Vec{} + kLeast : x;
  y = y > kMost ? Vec{} + kMost : y;
  const Vec turns = y * Acc(1.44269504088896340736);
  // Where the last bit of a number counts ones, adding to it rounds, and leaves the integer in the lowest bits.
  const Vec ones = Vec{} + Acc(kFloat ? 0x1.8p23 : 0x1.8p52);
  const Vec shifted = turns + ones;
  const MaskVec n = (MaskVec)shifted - (MaskVec)ones;
  const Vec whole = shifted - ones;
  const Vec rest = y - whole * kHigh - whole * kLow;
  constexpr int kTerms = kFloat ? 7 : 13;
  Vec sum = Vec{} + Acc(inverse_factorial(kTerms));
#pragma GCC unroll 16
  for (int k = kTerms - 1; k >= 0; --k) sum = sum * rest + Acc(inverse_factorial(k));
  const MaskVec half = n >> 1;
  return sum * power_of_two(half) * power_of_two(n - half);
}
"""
