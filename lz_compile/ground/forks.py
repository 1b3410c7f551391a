"""What a copy of this process (``os.fork``) begins with: no other thread lives on there that could release a lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def renewed(owner: object, **made: Callable[[], Any]) -> None:
    """Have attributes of ``owner`` made again in every copy of this process.

    They are replaced, so that a thread that forks while it holds a lock releases the one that it took.

    Args:
        owner: a module, or what lives as long as the process.
        made: what makes each attribute, by its name.
    """

    def renew() -> None:
        for name, make in made.items():
            setattr(owner, name, make())

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
