"""``python -m lz_compile``: what :mod:`lz_compile.tools.command_line` offers."""

from __future__ import annotations

import sys

from lz_compile.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
