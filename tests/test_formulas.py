"""Formulas over sizes: they compute what Python computes, and nothing else can be written in them."""

from __future__ import annotations

import contextlib
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lz_compile.errors import FormulaError
from lz_compile.ground.formulas import check, evaluate

SIZES = {"batch_size": 2, "seq_len_q": 100, "dtype_bytes": 4}

leaves = st.one_of(st.integers(0, 50).map(str), st.sampled_from(sorted(SIZES)))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=8,
)


@given(expressions)
def test_a_formula_gives_what_python_gives(formula):
    check(formula, SIZES)
    try:
        expected = eval(formula, {"min": min, "max": max}, dict(SIZES))
    except ZeroDivisionError:
        with pytest.raises(FormulaError, match="divides by zero"):
            evaluate(formula, SIZES)
        return
    if expected < 0:
        with pytest.raises(FormulaError, match=f"it gives {expected}"):
            evaluate(formula, SIZES)
    else:
        assert evaluate(formula, SIZES) == expected


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')",
        "batch_size ** 9",
        "batch_size / 2",
        "1.5 * batch_size",
        "True",
        "'text'",
        "[batch_size]",
        "batch_size if 1 else 2",
        "batch_size.bit_length()",
        "abs(batch_size)",
        "min(*[1, 2])",
        "max()",
        "min(1, key=2)",
        "lambda: 1",
        "batch_size < 3",
        "+batch_size",
        "~batch_size",
        "(x := 3)",
        "f'{batch_size}'",
        "batch_size[0]",
    ],
)
def test_whatever_else_python_can_say_is_refused(formula):
    with pytest.raises(FormulaError, match=r"is none of: integer, name|no size"):
        check(formula, SIZES)
    with pytest.raises(FormulaError):
        evaluate(formula, SIZES)


@pytest.mark.parametrize("formula", ["", "batch_size +", "a b", "1 = 2", "(", "\0", "import os"])
def test_what_does_not_parse_is_refused(formula):
    with pytest.raises(FormulaError, match="it does not parse"):
        check(formula, SIZES)


@pytest.mark.parametrize("formula", ["-" * 1500 + "batch_size", "+".join(["batch_size"] * 1500)])
def test_what_is_nested_too_deeply_is_refused(formula):
    limit = sys.getrecursionlimit()  # others raise it
    sys.setrecursionlimit(1000)
    try:
        with pytest.raises(FormulaError):
            evaluate(formula, SIZES)
    finally:
        sys.setrecursionlimit(limit)


def test_a_function_is_one_whatever_sizes_are_called():
    assert evaluate("max(batch_size, 5)", {"max": 3, "batch_size": 2}) == 5
    with pytest.raises(FormulaError, match="'max' is none of"):
        evaluate("max + 1", {"max": 3})


def test_an_unknown_size_names_the_nearest():
    with pytest.raises(FormulaError) as failure:
        check("batchsize * 4", SIZES)
    assert str(failure.value) == (
        "evaluating 'batchsize * 4': no size 'batchsize' (did you mean 'batch_size'?); "
        "valid are batch_size, dtype_bytes, seq_len_q"
    )


def test_a_ceiling_is_written_with_two_signs():
    assert evaluate("-(-seq_len_q // 16)", SIZES) == 7


@given(st.text(max_size=30))
def test_no_text_does_anything_but_give_a_number_or_a_refusal(text):
    assume("\n" not in text)
    with contextlib.suppress(FormulaError):
        assert evaluate(text, SIZES) >= 0
