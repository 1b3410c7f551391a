"""JSON records decoded under three hard domains: a grammar engine, a prefix automaton of types, and a table of symbols.

A record is ``{"import": <name>, "count": <number>, "pure": <truth>}``. SYNTAX is an incremental grammar (llguidance)
that takes any JSON value in any field. TYPES is an automaton over characters that knows which field wants what. IMPORTS
knows which names there are. None of them knows of the others; each says which tokens may follow.

Tokens are those of a WordPiece vocabulary: a token is its text behind a space, or without one if it begins with ``##``.

**Source** *Domain Fusion: 5 Domains, 1 Token*; llguidance 1.x for the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

#: What every field wants.
FIELDS: Mapping[str, str] = {"import": "string", "count": "integer", "pure": "boolean"}

GRAMMAR = r"""
start: OPEN IMPORT ":" value "," COUNT ":" value "," PURE ":" value "}"
value: STRING | NUMBER | "true" | "false" | "null"
OPEN: / *\{/
IMPORT: /" *import *"/
COUNT: /" *count *"/
PURE: /" *pure *"/
STRING: /"[a-z0-9 ]{0,24}"/
NUMBER: /-?(0|[1-9][0-9]{0,5})/
%ignore / +/
"""


class Vocabulary:
    """The texts of a tokenizer's tokens; what is special has none.

    Args:
        tokenizer: of ``transformers``, with a WordPiece vocabulary.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.size = len(tokenizer)
        self.end = int(tokenizer.sep_token_id)
        special = set(tokenizer.all_special_ids)
        names = tokenizer.convert_ids_to_tokens(range(self.size))
        self.texts = ["" if i in special or name.startswith("[unused") else _text(name) for i, name in enumerate(names)]
        self.special = [i for i, text in enumerate(self.texts) if not text]
        self.tree = _Tree.of(self.texts)

    @cached_property
    def of_the_engine(self) -> Any:
        """The vocabulary as llguidance knows it, which takes a while to make."""
        import llguidance

        names = [text.encode() or f"\xff[{i}]".encode("latin-1") for i, text in enumerate(self.texts)]
        spell = self.spell

        class Tokens:
            eos_token_id = self.end
            bos_token_id = None
            tokens = names
            special_token_ids = self.special

            def __call__(self, text: str | bytes) -> list[int]:
                return spell(text.decode() if isinstance(text, bytes) else text)

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()))

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say."""
        return "".join(self.texts[token] for token in tokens)

    def spell(self, text: str) -> list[int]:
        """Tokens that say exactly this text, the longest first.

        Raises:
            ValueError: there are none.
        """
        found: list[int] = []
        while text:
            token, length = self.tree.longest(text)
            if token is None:
                raise ValueError(f"spelling: no token begins '{text}'")
            found.append(token)
            text = text[length:]
        return found


def _text(name: str) -> str:
    return name.removeprefix("##") if name.startswith("##") and len(name) > 2 else " " + name


@dataclass
class _Tree:
    """Tokens by their characters, so that a character that cannot follow rules out all tokens that begin with it."""

    token: int | None = None
    after: dict[str, _Tree] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: Sequence[str]) -> _Tree:
        """Of every token with a text."""
        root = cls()
        for token, text in enumerate(texts):
            if text:
                here = root
                for char in text:
                    here = here.after.setdefault(char, cls())
                here.token = token
        return root

    def longest(self, text: str) -> tuple[int | None, int]:
        """The longest token that a text begins with, and its length; None where there is none."""
        here, found = self, (self.token, 0)
        for length, char in enumerate(text, 1):
            if char not in here.after:
                break
            here = here.after[char]
            if here.token is not None:
                found = here.token, length
        return found

    def follow(self, state: State, step: Step) -> Iterator[int]:
        """The tokens all of whose characters can follow."""
        if self.token is not None:
            yield self.token
        for char, tree in self.after.items():
            reached = step(state, char)
            if reached is not None:
                yield from tree.follow(reached, step)


# ---- SYNTAX ----------------------------------------------------------------------------------------------------------


class Syntax:
    """What the grammar allows next, by llguidance; the mask is that engine's own tensor of words."""

    def __init__(self, vocabulary: Vocabulary, grammar: str = GRAMMAR) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(vocabulary.of_the_engine, LLMatcher.grammar_from_lark(grammar))
        self._words = torch.zeros(-(-vocabulary.size // 32), dtype=torch.int32)
        self._check()

    def words(self) -> torch.Tensor:
        """Bits of the tokens that may follow ``[ceil(V / 32)]``, until the next token is taken."""
        self._matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.numel() * 4)
        self._check()
        return self._words

    def take(self, token: int) -> None:
        """Go on by a token."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar engine stopped: {self._matcher.get_error()}")


# ---- TYPES and IMPORTS -----------------------------------------------------------------------------------------------


class State(NamedTuple):
    """Where in a record a text ends: how many parts are behind it, and what of the present one there is."""

    part: int = 0
    text: str = ""


#: The state after one more character, None where it cannot follow.
Step = Callable[[State, str], State | None]
#: Whether a text may be the beginning of a value, or a whole one.
Kind = Callable[[str], bool]


def is_string(text: str) -> bool:
    """A string, or what begins like one."""
    return text[:1] == '"' and '"' not in text[1:-1]


def is_integer(text: str) -> bool:
    """An integer that is not below zero, or what begins like one."""
    return text.isdigit()


def is_boolean(text: str) -> bool:
    """``true``, ``false``, or what begins like one."""
    return "true".startswith(text) or "false".startswith(text)


def symbol_in(table: Collection[str]) -> Kind:
    """Strings that hold one of these names, or what begins like one; spaces around words count for nothing."""

    def is_symbol(text: str) -> bool:
        name = "".join(text[1:].removesuffix('"').split())
        is_whole = len(text) > 1 and text.endswith('"')
        return is_string(text) and (name in table if is_whole else any(each.startswith(name) for each in table))

    return is_symbol


KINDS: Mapping[str, Kind] = {"string": is_string, "integer": is_integer, "boolean": is_boolean}


class RecordAutomaton:
    """Which characters may follow in a record whose fields want values of certain kinds.

    Args:
        kinds: of every field, in order.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._parts: list[str | Kind] = ["{"]
        for name, kind in kinds.items():
            self._parts += [f'"{name}"', ":", kind, ","]
        self._parts[-1] = "}"
        self._masks: dict[State, list[int]] = {}

    def step(self, state: State, char: str) -> State | None:
        """The state after one more character; None where it cannot follow."""
        part, text = state
        if part == len(self._parts):
            return state if char == " " else None
        wanted = self._parts[part]
        if isinstance(wanted, str):
            if char == " ":
                return state
            text += char
            return State(part + 1) if text == wanted else State(part, text) if wanted.startswith(text) else None
        if char == " " and not text:
            return state
        if wanted(text + char):
            is_closed = len(text) > 0 and char == '"'
            return State(part + 1) if is_closed or text + char in ("true", "false") else State(part, text + char)
        is_number = text.isdigit()
        if is_number and char == " ":
            return State(part + 1)
        return self.step(State(part + 1), char) if is_number else None

    def allowed(self, state: State, vocabulary: Vocabulary) -> list[int]:
        """The tokens that may follow, ascending; the end where the record is complete."""
        if state not in self._masks:
            found = sorted(vocabulary.tree.follow(state, self.step))
            is_complete = state.part == len(self._parts)
            self._masks[state] = sorted([*found, vocabulary.end]) if is_complete else found
        return self._masks[state]

    def take(self, state: State, text: str) -> State | None:
        """The state after a text."""
        reached: State | None = state
        for char in text:
            reached = None if reached is None else self.step(reached, char)
        return reached


def types() -> RecordAutomaton:
    """Which kind of value every field wants."""
    return RecordAutomaton({name: KINDS[kind] for name, kind in FIELDS.items()})


def imports(table: Collection[str]) -> RecordAutomaton:
    """As :func:`types`, and the name is one of a table."""
    kinds = {name: KINDS[kind] for name, kind in FIELDS.items()}
    return RecordAutomaton({**kinds, "import": symbol_in(table)})
