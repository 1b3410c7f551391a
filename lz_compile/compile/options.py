"""The options of this backend, split from those that belong to Inductor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.errors import OptionError, UnknownKernelError, nearest, no_such
from lz_compile.lowering.configured import has_option
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.policy import policy
from lz_compile.runtime.policy.names import kernel_named
from lz_compile.runtime.problem.context import operations

if TYPE_CHECKING:
    from lz_compile.runtime.policy.resolved import Policy

PREFIX = "layerzero."


@dataclass(frozen=True)
class Options:
    """``options={"layerzero.<name>": value}``.

    ``strict`` raises where a fault of ours would fall back to Inductor; ``dump`` is a directory for graphs and reports
    (default: ``$LAYERZERO_DUMP``); ``assume_finite`` promises operands without NaN and infinities, so that kernels need not
    treat them as the source does; ``lock`` names a kernel per op, as in ``{"attention": "torch.sdpa"}``. With ``tune``
    ``"on-miss"`` (the default of ``mode="max-autotune"``), what was never measured at these sizes is measured while
    compiling, for ``tune_budget_s`` seconds per graph at most (60); ``"auto"``, the default of other modes, measures the
    best two kernels where their estimates are too close to tell, for a tenth of what compiling the graph takes and 5
    seconds at most, unless ``tune_budget_s`` says more; ``"off"`` measures nothing. ``dispatch_table`` is the path of
    a table (:func:`lz_compile.solve`) or lock file (:func:`lz_compile.save_decisions`) whose decisions are followed.
    ``loops`` says which loops over time become one step that is run again and again: ``"auto"`` those for whose step there
    are kernels and those that compile faster so, ``"roll"`` all, ``"keep"`` only those for which there are kernels.
    ``layers`` says which repeated layers become calls of one region, which is compiled once: ``"auto"`` where that saves much
    of the compile and cuts no fusion, ``"fold"`` all that may, ``"keep"`` none.
    With ``verify`` ``"first-call"``, the first call of every rewritten graph also runs that graph as it was, on the real
    inputs, and compares the results; after a difference, which is an event, the graph as it was runs instead. ``"always"``
    compares every call, ``"off"`` none. ``ranks`` ``"agree"`` settles decisions with the other ranks of a job, ``"alone"``
    does not (default: the policy's ``ranks.selection``, where that is not set ``"agree"``). ``keep_weights`` False unpacks
    stored weights in every call, rather than to keep them in a kernel's form beside what the model stores.
    """

    strict: bool = False
    dump: str | None = None
    assume_finite: bool = False
    lock: Mapping[str, str] = field(default_factory=dict)
    tune: str | None = None
    tune_budget_s: float | None = None
    dispatch_table: str | os.PathLike[str] | None = None
    loops: str = "auto"
    layers: str = "auto"
    verify: str = "off"
    ranks: str | None = None
    keep_weights: bool = True

    def policy(self, present: Policy) -> Policy:
        """The policy of a compile with these options."""
        said = present.with_locks(self.lock)
        return said if self.ranks is None else said.saying("ranks.selection", self.ranks, "options['layerzero.ranks']")

    def tuning(self, policy: Policy) -> str:
        """What is measured while compiling: "off", "auto" or "on-miss"; of many ranks, none goes by its own clock unasked."""
        perfdb = policy.settings.perfdb
        if not (policy.settings.enabled and perfdb.enabled):
            return "off"
        how = self.tune or {None: "auto", True: "on-miss", False: "off"}[perfdb.auto_tune]
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        return "off" if how == "auto" and ranks else how


_TYPES: Mapping[str, tuple[type, ...]] = {
    "strict": (bool,),
    "dump": (str, os.PathLike),
    "assume_finite": (bool,),
    "lock": (Mapping,),
    "tune": (str,),
    "tune_budget_s": (int, float),
    "dispatch_table": (str, os.PathLike),
    "loops": (str,),
    "layers": (str,),
    "verify": (str,),
    "ranks": (str,),
    "keep_weights": (bool,),
}
_WORDS: Mapping[type, str] = {Mapping: "kernels by op, as {'attention': 'torch.sdpa'}", bool: "True or False"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "tune": ("off", "auto", "on-miss"),
    "loops": ("auto", "roll", "keep"),
    "layers": ("auto", "fold", "keep"),
    "verify": ("off", "first-call", "always"),
    "ranks": ("agree", "alone"),
}


def named_options(options: object) -> Mapping[str, Any]:
    """What is given as options, by name; None for none.

    Raises:
        OptionError: it is no mapping from names.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        expected = "expected a mapping from names to values, as {'layerzero.strict': True}"
        raise OptionError(f"reading options: {expected}, received {type(options).__name__} {options!r}")
    return options


def _check_prefixes(rest: Mapping[str, Any], valid: Sequence[str]) -> None:
    """Refuse options of ours that are given as Inductor's, which would list all of its own."""
    for name in rest:
        if name in valid and not has_option(name):
            raise OptionError(f"reading options: no option '{name}' of Inductor (did you mean '{PREFIX}{name}'?)")


def split(options: Mapping[str, Any] | None, mode: str | None = None) -> tuple[Options, dict[str, Any]]:
    """Our options, and the rest for Inductor (which checks its own).

    Args:
        options: as given to ``torch.compile``.
        mode: as given to ``torch.compile``; the autotuning ones measure what was never measured.

    Raises:
        OptionError: an unknown ``layerzero.*`` name, or a value of the wrong type.
    """
    options = named_options(options)
    if not isinstance(mode, (str, NoneType)):
        raise OptionError(f"reading options: expected mode as text, received {type(mode).__name__} {mode!r}")
    rest = {name: value for name, value in options.items() if not name.startswith(PREFIX)}
    ours = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    valid = [field_.name for field_ in fields(Options)]
    _check_prefixes(rest, valid)
    for name, value in ours.items():
        if name not in valid:
            near, names = nearest(name, valid).replace("'", f"'{PREFIX}", 1), ", ".join(PREFIX + each for each in valid)
            raise OptionError(f"reading options: no option '{PREFIX}{name}'{near or f'; valid are {names}'}")
        is_truth = isinstance(value, bool) and bool not in _TYPES[name]
        if not isinstance(value, _TYPES[name]) or is_truth or value != value:  # noqa: PLR0124  # NaN
            wanted = " or ".join(_WORDS.get(kind, kind.__name__) for kind in _TYPES[name])
            raise OptionError(f"reading options: '{PREFIX}{name}' takes {wanted}, not {type(value).__name__} {value!r}")
    for name, choices in _CHOICES.items():
        if ours.get(name, choices[0]) not in choices:
            hint, valid_text = nearest(ours[name], choices), ", ".join(choices)
            raise OptionError(
                f"reading options: '{PREFIX}{name}' cannot be '{ours[name]}'{hint}; valid are {valid_text}"
            )
    if ours.get("tune_budget_s", 0) < 0:
        raise OptionError(f"reading options: '{PREFIX}tune_budget_s' is at least 0, not {ours['tune_budget_s']!r}")
    for op, kernel_id in ours.get("lock", {}).items():
        if op not in operations():
            raise OptionError(f"reading options: {no_such('op', op, operations(), ' to lock')}")
        if not isinstance(kernel_id, str) or kernel_named(kernel_id) not in kernels(op):
            raise UnknownKernelError(op, kernel_id, list(kernels(op)))
    if "lock" in ours:
        ours["lock"] = {op: kernel_named(kernel_id) for op, kernel_id in ours["lock"].items()}
    ours.setdefault("dump", os.environ.get("LAYERZERO_DUMP"))
    ours.setdefault("strict", policy.current().settings.strict_mode)
    if mode is not None and mode.startswith("max-autotune"):
        ours.setdefault("tune", "on-miss")
    return Options(**ours), rest
