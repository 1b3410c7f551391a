"""What our own source is: part of every cache key, so that no change of ours can meet a stale result."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def source_hash() -> str:
    """A hash of every Python and JSON file of this package."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".json")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def traced_source() -> str:
    """What operators that are decomposed while they are traced are given: compilers' caches know them by name alone."""
    return source_hash()[:16]


# Dynamo is to ask once. As ``torch.compiler.assume_constant_result`` does, which would import it, and Triton.
vars(traced_source)["_dynamo_marked_constant"] = True
