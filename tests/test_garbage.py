"""While a graph is compiled, cycles are sought among new objects, and afterwards among all again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lz_compile.ground import garbage


class Linked:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()  # the suite freezes what it imports
    yield
    gc.unfreeze()


def test_new_cycles_are_found_while_old_objects_are_left_alone():
    old = weakref.ref(Linked())
    with garbage.of_new_objects():
        new = weakref.ref(Linked())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None


def test_what_a_program_froze_itself_stays_frozen():
    gc.freeze()
    with garbage.of_new_objects(), garbage.of_new_objects():
        pass
    assert gc.get_freeze_count()


def test_an_error_inside_thaws_as_well():
    with pytest.raises(ZeroDivisionError), garbage.of_new_objects():
        _ = 1 / 0
    assert not gc.get_freeze_count()
