"""Recurrences in readable algebra, for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lz_compile.passes.loops.recurrence.index_sum import IndexSum, mapped
from lz_compile.passes.loops.recurrence.index_terms import IDENTITY, Atom, Term
from lz_compile.passes.loops.recurrence.transition import Read, Transition

_BATCH, _KEYS, _VALUES, _EXTRAS, _BOUND = "bhgnm", "kij", "vw", "qpr", "xyzst"


def text_of(transition: Transition, names: Mapping[Atom, str]) -> str:
    """The recurrence of one state, and what is read from it."""
    letters = _letters(transition)
    own = f"S[{','.join(letters[i] for i in range(len(transition.space)))}]"
    primed = {key: f"{letters[key]}'" for key in transition.keys}
    inner = f"S[{','.join(primed.get(i, letters[i]) for i in range(len(transition.space)))}]"
    parts = [_product(transition.decay, letters, names, own)]
    for update in transition.updates:
        left = _sum(update.left, letters, names)
        right = "" if update.right is None else _sum(update.right, letters, names)
        erase = "" if update.erase is None else _product(update.erase, letters | primed, names, inner)
        inside = " - ".join(part for part in (right, erase) if part)
        sign = "-" if erase and not right else ""
        inside = f"{sign}{inside}"
        parts.append(f"{_bracketed(left)} {f'({inside})' if erase else _bracketed(inside)}")
    if transition.drive is not None:
        parts.append(_sum(transition.drive, letters, names))
    lines = [f"{own} = {' + '.join(part for part in parts if part) or '0'}"]
    for number, read in enumerate(transition.reads):
        name = f"y{number}" if len(transition.reads) > 1 else "y"
        lines.append(_read(name, read, transition, letters, names, own))
    return "; ".join(lines)


def _read(
    name: str, read: Read, transition: Transition, letters: dict[int, str], names: Mapping[Atom, str], own: str
) -> str:
    places = letters | {len(transition.space) + i: _EXTRAS[i % len(_EXTRAS)] for i in range(len(read.extras))}
    looked = own if read.query is None else _product(read.query, places, names, own)
    rest = _sum(read.rest, {i: places[place] for i, place in enumerate(read.places)}, names)
    added = f" + {rest}" if read.rest.terms else ""
    when = " before the step" if transition.mode == "before" else ""
    return f"{name}[{','.join(places[place] for place in read.places)}] = {looked}{added}{when}"


def _letters(transition: Transition) -> dict[int, str]:
    def lettered(places: Iterable[int], alphabet: str) -> dict[int, str]:
        return {place: alphabet[i % len(alphabet)] for i, place in enumerate(places)}

    found = lettered(transition.batch, _BATCH) | lettered(transition.keys, _KEYS)
    return found | lettered(transition.values, _VALUES)


def _product(whole: IndexSum, letters: Mapping[int, str], names: Mapping[Atom, str], state: str) -> str:
    if not whole.terms:
        return ""
    text = _sum(whole, letters, names)
    return state if text == "1" else f"{_bracketed(text)} {state}"


def _bracketed(text: str) -> str:
    return f"({text})" if " + " in text or " - " in text else text


def _sum(whole: IndexSum, letters: Mapping[int, str], names: Mapping[Atom, str]) -> str:
    masks = sorted({each for term in whole.terms for each in term.of("mask") if min(each.indices, default=0) >= 0})
    if masks and len(whole.terms) > 1:
        mask = masks[0]
        there = mapped(whole, lambda term: term.without([mask]) if mask in term.factors else term)
        gone = mapped(whole, lambda term: None if mask in term.factors else term)
        condition = _term(Term((mask,)), letters, names)
        return f"where({condition}, {_sum(there, letters, names)}, {_sum(gone, letters, names)})"
    parts: list[str] = []
    for term, number in sorted(whole.terms.items(), key=lambda entry: entry[0].order):
        text = _term(term, letters, names)
        size = f"{abs(number):.6g}"
        text = size if not text else text if size == "1" else f"{size} {text}"
        sign = "-" if number < 0 else "+" if parts else ""
        parts.append(f"{sign} {text}" if parts else f"{sign}{text}")
    return " ".join(parts) or "0"


def _term(term: Term, letters: Mapping[int, str], names: Mapping[Atom, str]) -> str:
    bound = {-1 - i: _BOUND[i % len(_BOUND)] for i in range(len(term.bound))}
    place: Callable[[int], str] = lambda index: bound[index] if index < 0 else letters[index]  # noqa: E731
    return " ".join(
        f"{'1' if factor.atom == IDENTITY else names.get(factor.atom, factor.atom.name)}"
        f"[{','.join(map(place, factor.indices))}]"
        for factor in term.factors
    )
