"""The names that a configuration may use: operations with their variants, kernels, and the sources of kernels.

A pattern is a name or a glob. A name stands for itself and everything below it (``attention`` for ``attention.causal``,
``flash_attn`` for ``flash_attn.v2``), and so does ``name.*``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from lz_compile.errors import no_such
from lz_compile.lowering import ops
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.problem.context import operations

#: The kernel that leaves a match to Inductor. It is what remains when nothing else may run: it cannot be forbidden.
INCUMBENT = "inductor"

#: Other names of kernels.
_RENAMED = {"torch.rms_norm": "torch.norm", "torch.layer_norm": "torch.norm"}


class Invalid(Exception):
    """What is wrong at one key of a configuration; whoever knows where it was read makes a ``ConfigError`` of it."""

    def __init__(self, path: tuple[str | int, ...], text: str) -> None:
        super().__init__(text)
        self.path, self.text = path, text

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text


@contextmanager
def below(*path: str | int) -> Iterator[None]:
    """What is wrong inside, seen from a key further up."""
    try:
        yield
    except Invalid as problem:
        raise Invalid((*path, *problem.path), problem.text) from None


def dotted(path: Iterable[str | int]) -> str:
    """A key path as text: ``rules[1].prefer``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def is_glob(pattern: str) -> bool:
    """Whether a pattern stands for several names by its spelling."""
    return any(sign in pattern for sign in "*?[")


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern names ``name`` or something above it."""
    if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
        return True
    return pattern.endswith(".*") and fnmatchcase(name, pattern[:-2])


def covers_kernel(pattern: str, kernel: KernelSpec) -> bool:
    """Whether a pattern names a kernel by its id or by its source."""
    return covers(pattern, kernel.kernel_id) or any(fnmatchcase(source, pattern) for source in sources_of(kernel))


def sources_of(kernel: KernelSpec) -> set[str]:
    """What a kernel's source is called: its backend and the first part of its id."""
    return {kernel.kernel_id.partition(".")[0], kernel.source}


def ops_covered(pattern: str) -> list[str]:
    """The ops of which a pattern names at least a variant.

    Raises:
        Invalid: there is none.
    """
    _check_text("an operation", pattern)
    found = sorted({name.partition(".")[0] for name in operations() if covers(pattern, name)})
    if not found:
        raise Invalid((), no_such("operation", pattern, sorted(operations())))
    return found


def kernel_named(name: str) -> str:
    """The id of a kernel by any of its names: its id, that with a variant behind it, or another one.

    ``torch.sdpa.causal`` is ``torch.sdpa``, ``torch.rms_norm`` is ``torch.norm``. What names no kernel stays as it is.
    """
    known = {kernel.kernel_id for kernel in _kernels()}
    if name in known or is_glob(name):
        return name
    stem, _, variant = name.rpartition(".")
    variants = {operation.partition(".")[2] for operation in operations()}
    return stem if stem in known and variant in variants else _RENAMED.get(name, name)


def checked_kernels(pattern: str) -> str:
    """A pattern that names kernels or a source, a kernel by its id.

    Raises:
        Invalid: it names none; with the nearest name that there is.
    """
    _check_text("a kernel or source", pattern)
    pattern = kernel_named(pattern)
    known = _kernels()
    if not any(covers_kernel(pattern, kernel) for kernel in known):
        valid = {kernel.kernel_id for kernel in known} | {source for kernel in known for source in sources_of(kernel)}
        raise Invalid((), no_such("kernel or source", pattern, sorted(valid)))
    return pattern


def checked_source(pattern: str) -> str:
    """A pattern that names a source of kernels.

    Raises:
        Invalid: it names none; with the nearest name that there is; a kernel's id says where kernels are named.
    """
    known = _kernels()
    valid = sorted({source for kernel in known for source in sources_of(kernel)})
    if any(fnmatchcase(source, pattern) for source in valid):
        return pattern
    if any(covers_kernel(kernel_named(pattern), kernel) for kernel in known):
        raise Invalid((), f"'{pattern}' names kernels, not a source; name them under 'prefer' or 'avoid' of a rule")
    raise Invalid((), no_such("source", pattern, valid))


def locked(operation: str, kernel_id: str) -> str:
    """The id of the kernel that an operation is locked to by any of its names.

    Raises:
        Invalid: there is no such operation, or one of its ops does not have the kernel; with the nearest name that there is.
    """
    covered = ops_covered(operation)
    _check_text("a kernel", kernel_id)
    name, kernel_id = kernel_id, kernel_named(kernel_id)
    variant = operation.partition(".")[2]
    asked = name.removeprefix(f"{kernel_id}.")
    if asked != name and variant in {each.partition(".")[2] for each in operations()} - {"", asked}:
        raise Invalid(
            (), f"'{name}' names {kernel_id} for the variant {asked}, not for {variant}; lock it to '{kernel_id}'"
        )
    for op in covered:
        valid = sorted(registry.kernels(op))
        if kernel_id not in valid:
            single = "; a lock names one kernel" if is_glob(kernel_id) else ""
            raise Invalid((), no_such("kernel", kernel_id, valid, f" for {op}") + single)
    return kernel_id


def _check_text(what: str, name: object) -> None:
    if not isinstance(name, str):
        raise Invalid((), f"expected {what} by its name, received {name!r}")


def _kernels() -> list[KernelSpec]:
    return [kernel for op in ops.names() for kernel in registry.kernels(op).values()]
