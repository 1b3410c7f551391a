"""Which phase a generation is in, from its text as it is emitted; what is uncertain is structured output, or a boundary."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from lz_compile.domains.levels import GenerationPhase
from lz_compile.errors import ConfigError


@dataclass(frozen=True)
class PhaseMarkers:
    """Texts between which a phase lasts.

    Raises:
        ConfigError: a marker is empty, or the phase is TRANSITION, which is what markers themselves are.
    """

    begin: str
    end: str
    phase: GenerationPhase

    def __post_init__(self) -> None:
        if not self.begin or not self.end:
            raise _error("markers that are not empty", f"{self.begin!r} and {self.end!r}")
        if self.phase not in (GenerationPhase.REASONING, GenerationPhase.STRUCTURED_OUTPUT):
            raise _error(f"REASONING or STRUCTURED_OUTPUT between {self.begin!r} and {self.end!r}", repr(self.phase))


#: As models that think aloud are trained to write.
THINKING = PhaseMarkers("<think>", "</think>", GenerationPhase.REASONING)


class PhaseDetector:
    """Follows a generation: :meth:`feed` takes what was emitted and says the phase of what comes next.

    The phase depends on the whole text alone, not on how it was cut into pieces:

    - outside of all markers it is ``outside``, by default STRUCTURED_OUTPUT;
    - between markers it is theirs. Between those of REASONING others may begin; between those of STRUCTURED_OUTPUT nothing
      does, for there a marker may be data. The end of what is around ends what is within;
    - a code fence is STRUCTURED_OUTPUT: it opens wherever three backquotes are, and closes where at least as many are alone
      on a line, or stand in the line that opened it;
    - on a boundary it is TRANSITION: in the middle of what may become a marker, and in the line of a fence.

    A prompt that ends within a phase (``<think>`` of a chat template) is fed first.

    Args:
        markers: none of their beginnings begins with another one.
        fences: whether code fences are looked for.
        outside: REASONING for models that think in plain text and answer in fences.

    Raises:
        ConfigError: ``outside`` is TRANSITION, or two markers begin alike.

    **Source** CRANE (ICML 2025): reasoning is left free, what has a form is held to it; Domain Fusion, *CRANE adaptive
    switching*, for what is uncertain; CommonMark 0.31, section 4.5, for fences.
    """

    def __init__(
        self,
        markers: Sequence[PhaseMarkers] = (THINKING,),
        *,
        fences: bool = True,
        outside: GenerationPhase = GenerationPhase.STRUCTURED_OUTPUT,
    ) -> None:
        if outside not in (GenerationPhase.REASONING, GenerationPhase.STRUCTURED_OUTPUT):
            raise _error("REASONING or STRUCTURED_OUTPUT outside of markers", repr(outside))
        begins = [each.begin for each in markers] + ["`"] * fences
        for number, begin in enumerate(begins):
            if any(other.startswith(begin) for place, other in enumerate(begins) if place != number):
                raise _error("markers none of which begins another", f"{begin!r} among {begins}")
        self._markers = tuple(markers)
        self._fences = fences
        self._outside = outside
        self._kept = max((len(text) for each in markers for text in (each.begin, each.end)), default=1)
        self.reset()

    def reset(self) -> None:
        """Begin anew, with no text."""
        self._open: list[PhaseMarkers] = []
        self._fence: _Fence | None = None
        self._tail = ""
        self._marks = 0

    @property
    def phase(self) -> GenerationPhase:
        """Of what comes next."""
        if self._marks or (self._fence is not None and self._fence.is_boundary) or self._may_become_a_marker():
            return GenerationPhase.TRANSITION
        if self._fence is not None:
            return GenerationPhase.STRUCTURED_OUTPUT
        return self._open[-1].phase if self._open else self._outside

    def feed(self, piece: str) -> GenerationPhase:
        """Go on by what was emitted.

        Returns:
            the phase of what comes next.
        """
        for char in piece:
            self._take(char)
        return self.phase

    def _take(self, char: str) -> None:
        self._tail = (self._tail + char)[-self._kept :]
        if self._ends() or self._begins():
            self._tail, self._marks = "", 0
        elif self._fence is not None:
            self._fence.take(char)
            if self._fence.is_closed:
                self._fence = None
        elif self._fences and self._may_begin:
            self._marks = self._marks + 1 if char == _MARK else 0
            if self._marks == _LEAST_MARKS:
                self._fence, self._marks, self._tail = _Fence(), 0, ""

    @property
    def _may_begin(self) -> bool:
        """Whether anything begins here."""
        is_free = not self._open or self._open[-1].phase is GenerationPhase.REASONING
        return self._fence is None and is_free

    def _ends(self) -> bool:
        """Whether the text ends in the end of what is open, the outermost that does; what is within ends with it."""
        for place, each in enumerate(self._open):
            if self._tail.endswith(each.end):
                del self._open[place:]
                self._fence = None
                return True
        return False

    def _begins(self) -> bool:
        """Whether the text ends in the beginning of what may begin here, the longest."""
        found = [each for each in self._markers if self._tail.endswith(each.begin)] if self._may_begin else []
        if not found:
            return False
        self._open.append(max(found, key=lambda each: len(each.begin)))
        return True

    def _may_become_a_marker(self) -> bool:
        awaited = [each.end for each in self._open]
        awaited += [each.begin for each in self._markers] if self._may_begin else []
        return any(self._tail.endswith(text[:length]) for text in awaited for length in range(1, len(text)))


_MARK = "`"
_LEAST_MARKS = 3
_MOST_INDENT = 3


class _Where(enum.Enum):
    """In a code fence."""

    OPENING_MARKS = enum.auto()
    OPENING_LINE = enum.auto()
    CODE = enum.auto()
    INDENT = enum.auto()
    CLOSING_MARKS = enum.auto()
    AFTER_MARKS = enum.auto()


class _Fence:
    """A code fence from its third backquote to the line that closes it."""

    def __init__(self) -> None:
        self._where = _Where.OPENING_MARKS
        self._marks = _LEAST_MARKS  # that opened it
        self._run = 0  # of marks, or of spaces, up to here
        self.is_closed = False

    @property
    def is_boundary(self) -> bool:
        """Whether the text ends in the line that opens it, or in one that may close it."""
        return self._where not in (_Where.CODE, _Where.INDENT)

    def take(self, char: str) -> None:
        where = self._where
        if where in (_Where.OPENING_MARKS, _Where.OPENING_LINE):
            self._open(char)
        elif char == "\n":
            is_whole = where in (_Where.CLOSING_MARKS, _Where.AFTER_MARKS) and self._run >= self._marks
            self.is_closed = is_whole
            self._where, self._run = _Where.INDENT, 0
        elif where is not _Where.CODE:
            self._close(char)

    def _open(self, char: str) -> None:
        if char == "\n":
            self._where, self._run = _Where.INDENT, 0
        elif self._where is _Where.OPENING_MARKS and char == _MARK:
            self._marks += 1
        else:
            self._where = _Where.OPENING_LINE
            self._run = self._run + 1 if char == _MARK else 0
            self.is_closed = self._run == self._marks  # code within a line

    def _close(self, char: str) -> None:
        """A character of a line of which all may yet belong to a closing fence."""
        if char == _MARK and self._where is not _Where.AFTER_MARKS:
            self._run = self._run + 1 if self._where is _Where.CLOSING_MARKS else 1
            self._where = _Where.CLOSING_MARKS
        elif self._where is _Where.INDENT and char == " " and self._run < _MOST_INDENT:
            self._run += 1
        elif self._where in (_Where.CLOSING_MARKS, _Where.AFTER_MARKS) and char in " \t\r" and self._run >= self._marks:
            self._where = _Where.AFTER_MARKS
        else:
            self._where = _Where.CODE


def _error(expected: str, found: str) -> ConfigError:
    return ConfigError(f"detecting phases: expected {expected}, got {found}")
