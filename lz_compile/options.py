"""The options of this backend, split from those that belong to Inductor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lz_compile.errors import OptionError, UnknownKernelError, nearest
from lz_compile.lowering import ops
from lz_compile.runtime.registry import kernels

PREFIX = "layerzero."


@dataclass(frozen=True)
class Options:
    """``options={"layerzero.<name>": value}``.

    ``strict`` raises where a fault of ours would fall back to Inductor; ``dump`` is a directory for graphs and reports
    (default: ``$LAYERZERO_DUMP``); ``assume_finite`` promises operands without NaN and infinities, so that kernels need not
    treat them as the source does; ``lock`` names a kernel per op, as in ``{"attention": "torch.sdpa"}``.
    """

    strict: bool = False
    dump: str | None = None
    assume_finite: bool = False
    lock: Mapping[str, str] = field(default_factory=dict)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "strict": (bool,),
    "dump": (str, os.PathLike),
    "assume_finite": (bool,),
    "lock": (Mapping,),
}


def split(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Our options, and the rest for Inductor (which checks its own).

    Raises:
        OptionError: an unknown ``layerzero.*`` name, or a value of the wrong type.
    """
    rest = {name: value for name, value in (options or {}).items() if not name.startswith(PREFIX)}
    ours = {name.removeprefix(PREFIX): value for name, value in (options or {}).items() if name.startswith(PREFIX)}
    valid = [field_.name for field_ in fields(Options)]
    for name, value in ours.items():
        if name not in valid:
            names = ", ".join(PREFIX + option for option in valid)
            raise OptionError(f"reading options: no option '{PREFIX}{name}'{nearest(name, valid)}; valid are {names}")
        if not isinstance(value, _TYPES[name]):
            wanted = " or ".join(kind.__name__ for kind in _TYPES[name])
            raise OptionError(f"reading options: '{PREFIX}{name}' takes {wanted}, not {type(value).__name__} {value!r}")
    for op, kernel_id in ours.get("lock", {}).items():
        if op not in ops.names():
            raise OptionError(
                f"reading options: no op '{op}' to lock{nearest(op, ops.names())}; valid are {', '.join(ops.names())}"
            )
        if not isinstance(kernel_id, str) or kernel_id not in kernels(op):
            raise UnknownKernelError(op, kernel_id, list(kernels(op)))
    ours.setdefault("dump", os.environ.get("LAYERZERO_DUMP"))
    return Options(**ours), rest
