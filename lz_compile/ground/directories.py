"""Where this package keeps files of its own. Imports no torch, so that tools that only read them start at once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$LAYERZERO_CACHE_DIR``, or the user's cache directory of the platform."""
    configured = os.environ.get("LAYERZERO_CACHE_DIR")
    if configured:
        return Path(configured)
    import platformdirs

    return Path(platformdirs.user_cache_dir("layerzero", appauthor=False))
