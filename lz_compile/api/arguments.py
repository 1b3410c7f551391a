"""What comes into a public function: checked by one description of its operands, before anything is computed.

A description names every operand with the letters of its dimensions, what its elements are, and the range of its numbers.
Checks are plain Python over shapes and dtypes, so that compilers trace them and leave nothing of them behind. Without a
compiler, what has passed once is found again by its signature (:func:`remembered`), in less than it takes to look twice.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from lz_compile.errors import ArgumentError
from lz_compile.ground.hardware import default_device
from lz_compile.ground.records import first_line
from lz_compile.ground.sizes import is_one
from lz_compile.lowering.opaque import is_forward

#: What the elements of an operand are: floating-point numbers of 16 bits or more (``inexact``: or complex ones; ``stored``:
#: or numbers of eight bits; ``bytes``: or any eight bits), truth values, whole numbers (``index``: that PyTorch indexes
#: by), or any real numbers.
Kind: TypeAlias = Literal["floating", "inexact", "stored", "bytes", "boolean", "integer", "index", "real"]

#: Types of tensors that kernels of ours read; others are those of a transform, a mode or a subclass.
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: So many signatures are remembered.
_MOST_REMEMBERED = 4096


class Arguments:
    """The arguments of one call, checked one after the other: equal letters are equal sizes, and all are on one device.

    Args:
        function: by its public name.
        error: what is raised.
    """

    def __init__(self, function: str, error: type[ArgumentError] = ArgumentError) -> None:
        self.function = function
        self._error = error
        self._sizes: dict[str, Any] = {}
        self._device: torch.device | None = None
        self._first = ""

    def wrong(self, argument: str, expected: str, received: object, advice: str = "") -> ArgumentError:
        """The error that says so."""
        return self._error(self.function, argument, expected, received, advice)

    def tensor(
        self,
        name: str,
        value: Any,
        dims: str | None = None,
        kind: Kind = "floating",
        *,
        optional: bool = False,
        anywhere: bool = False,
    ) -> None:
        """A tensor.

        Args:
            name: of the argument.
            value: what was given.
            dims: letters of its dimensions (``B T H K``; ``...`` for any number of them, in front; a number is that size;
                ``H|1`` may be one); None for any.
            kind: what its elements are.
            optional: None is given for none.
            anywhere: it may be on another device than those before it, if it holds anything.
        """
        if value is None and optional:
            return
        if not isinstance(value, torch.Tensor):
            advice = "" if value is None else f"Give torch.as_tensor({name})"
            raise self.wrong(name, f"as a tensor{_shown(dims)}", _named(value), advice)
        self._check_elements(name, value, dims, kind)
        if dims is not None:
            self._check_sizes(name, value.shape, dims)
        if not anywhere or value.is_meta:
            self._check_device(name, value)

    def _check_elements(self, name: str, value: torch.Tensor, dims: str | None, kind: Kind) -> None:
        dtype = value.dtype
        if not _is_of(kind, dtype):
            expected, conversion = _WORDS[kind]
            advice = "Take .real" if dtype.is_complex else f"Cast it, as by {conversion}"
            raise self.wrong(name, f"{_shown(dims)[1:]} {expected}".strip(), dtype, advice)
        if value.layout not in (torch.strided, torch.jagged):
            raise self.wrong(name, "as a dense tensor", value.layout, "Call .to_dense()")
        if value.is_nested and value.layout == torch.strided:  # has no sizes
            raise self.wrong(
                name, "as a dense tensor", "a nested one", "Call .to_padded_tensor(0.0), or nest it as jagged"
            )

    def _check_sizes(self, name: str, shape: Sequence[Any], dims: str) -> None:
        letters, given = dims.split(), tuple(shape)
        if letters[:1] == ["..."]:
            letters = letters[1:]
            shape = shape[len(shape) - len(letters) :] if len(letters) <= len(shape) else ()
            fits = len(shape) == len(letters)
        else:
            fits = len(shape) == len(letters)
        if fits:
            fits = all([self._fits(letter, size) for letter, size in zip(letters, shape, strict=True)])  # noqa: C419  # Dynamo
        if not fits:
            known = [self._sizes.get(letter.removesuffix("|1"), letter) for letter in letters]
            known = ["...", *known] if "..." in dims else known
            wanted = f"({', '.join(map(str, known))}{',' if len(known) == 1 else ''})"
            of = "" if known[-len(letters) :] == letters else f" of shape {wanted}"
            raise self.wrong(
                name, f"{_shown(dims)[1:]}{of}", given, "Give it these dimensions; equal letters are equal sizes"
            )

    def _fits(self, letter: str, size: Any) -> bool:
        if letter.isdigit():
            return bool(size == int(letter))
        if letter.endswith("|1"):
            letter = letter[:-2]
            if is_one(size):
                return True
        if letter not in self._sizes:
            self._sizes[letter] = size
            return True
        return bool(self._sizes[letter] == size)

    def _check_device(self, name: str, value: torch.Tensor) -> None:
        if self._device is None:
            self._device, self._first = value.device, name
        elif value.device != self._device:
            expected = f"on {self._device} as {self._first} is"
            raise self.wrong(name, expected, value.device, "Move one of them, as by .to(...)")

    def equal_dtypes(self, to: str, other: torch.Tensor, **operands: torch.Tensor | None) -> None:
        """Operands, as far as they are given, of the dtype of another."""
        for name, value in operands.items():
            if value is not None and value.dtype != other.dtype:
                raise self.wrong(name, f"in the dtype of {to}, {other.dtype}", value.dtype, "Cast one of them")

    def broadcasts(self, name: str, value: torch.Tensor, to: Sequence[Any], letters: str = "") -> None:
        """A tensor that broadcasts to a shape."""
        pairs = zip(reversed(value.shape), reversed(to), strict=False)
        if value.dim() > len(to) or any(not is_one(own) and own != other for own, other in pairs):
            expected = f"that can be broadcast to {letters}{tuple(to)}"
            raise self.wrong(name, expected, tuple(value.shape), "Add dimensions of size one where it repeats")

    def number(
        self,
        name: str,
        value: Any,
        least: float = -math.inf,
        most: float = math.inf,
        *,
        above: bool = False,
        whole: bool = False,
        optional: bool = False,
    ) -> None:
        """A finite number, with ``above`` larger than ``least``."""
        if value is None and optional:
            return
        value = recorded_number(value)
        is_whole = isinstance(value, (int, torch.SymInt))
        is_real = not isinstance(value, torch.Tensor) and isinstance(value, numbers.Real)
        fits = (is_whole or is_real or isinstance(value, (float, torch.SymFloat))) and not isinstance(value, bool)
        if fits and is_whole:  # what no tensor holds is no number of use
            fits = -(2**63) <= value < 2**63
        elif fits:
            fits = not whole and -math.inf < value < math.inf
        if not fits or not least <= value <= most or (above and value == least):
            expected = f"as {'a whole number' if whole else 'a finite number'}{_range(least, most, above)}"
            raise self.wrong(name, expected, value if isinstance(value, float) or is_whole else _named(value))

    def scalar(self, name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
        """A finite number, or a tensor without dimensions; such are taken as they are: to look would be to wait."""
        if isinstance(value, torch.Tensor):
            self.tensor(name, value, "", anywhere=True)
            if value.is_meta:
                raise self.wrong(name, "on a device that holds numbers", value.device)
        else:
            self.number(name, value, least, most)

    def one_of(self, name: str, value: Any, valid: Sequence[Any]) -> None:
        """One of some names."""
        if not isinstance(value, str) or value not in valid:
            from lz_compile.errors import nearest

            hint = nearest(value, valid) if isinstance(value, str) else ""
            raise self.wrong(name, f"as one of {', '.join(valid)}", f"{value!r}{hint}")

    def flag(self, name: str, value: Any, *, optional: bool = False) -> None:
        """True or False."""
        self.instance(name, value, (bool, int), "as True or False", optional=optional)

    def instance(self, name: str, value: Any, kind: Any, expected: str, *, optional: bool = False) -> None:
        """A value of a type, or of one of several."""
        if not isinstance(value, kind) and not (value is None and optional):
            raise self.wrong(name, expected, _named(value))

    def floating_dtype(self, name: str, value: Any) -> None:
        """The dtype of floating-point numbers, 16 bits or more."""
        if not isinstance(value, torch.dtype) or not _is_of("floating", value):
            raise self.wrong(name, f"as a dtype {_WORDS['floating'][0]}", _named(value))

    def device(self, name: str, value: Any) -> torch.device:
        """A device that is there and holds numbers; by default the accelerator, or the CPU."""
        if value is None:
            return default_device()
        try:
            found = torch.device(value)
            torch.empty(0, device=found)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # what torch raises
            raise self.wrong(name, "as a device that is there", f"{_named(value)} ({first_line(error)})") from error
        if found.type == "meta":
            raise self.wrong(name, "as a device that holds numbers", found)
        return found


def recorded_number(value: Any) -> Any:
    """The number that a size, or what is computed of sizes, is while ``torch.jit.trace`` records it as a tensor."""
    if (
        not isinstance(value, torch.Tensor)
        or value.dim()
        or value.requires_grad
        or torch._C._get_tracing_state() is None
    ):
        return value
    return value.item()


def remembered(check: Callable[..., None]) -> Callable[..., None]:
    """``check``, which runs for each signature of its arguments once: types, shapes, dtypes, devices; of numbers, values."""
    passed: set[Any] = set()

    def run(*arguments: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            check(*arguments)
            return
        try:
            signature = (
                torch._C._is_any_autocast_enabled(),
                *[
                    (each.shape, each.dtype, each.device, each.layout)
                    if isinstance(each, torch.Tensor)
                    else (type(each), each)
                    for each in arguments
                ],
            )
            if signature in passed:
                return
        except (TypeError, RuntimeError):  # symbolic sizes, lists, what has no shape: nothing to be found again by
            check(*arguments)
            return
        check(*arguments)
        if len(passed) >= _MOST_REMEMBERED:
            passed.clear()
        passed.add(signature)

    return run


def is_plain(*tensors: Any) -> bool:
    """Whether kernels of ours may read the memory of tensors.

    No compiler, mode or transform looks on, none is of a kind of its own, and none is the negative of what lies there.
    """
    for each in tensors:
        if each is not None and type(each) not in PLAIN:
            return False
    if torch.compiler.is_dynamo_compiling() or is_watched():
        return False
    for each in tensors:  # a generator costs more
        if each is not None and (each.layout is not torch.strided or each.is_neg() or each.is_nested):
            return False
    return True


def is_watched() -> bool:
    """Whether a mode or a transform looks on at every operation."""
    return is_transformed() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether a transform of ``torch.func``, or forward-mode differentiation, looks on."""
    return is_forward() or torch._C._functorch.peek_interpreter_stack() is not None


#: Numbers of eight bits that are stored.
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _is_of(kind: Kind, dtype: torch.dtype) -> bool:
    if kind in ("stored", "bytes"):
        is_narrow = dtype in _EIGHT_BITS or (kind == "bytes" and dtype == torch.uint8)
        return is_narrow or (dtype.is_floating_point and dtype.itemsize > 1)
    if kind in ("floating", "inexact"):
        return (dtype.is_floating_point and dtype.itemsize > 1) or (kind == "inexact" and dtype.is_complex)
    if kind == "index":
        return dtype in (torch.int64, torch.int32)
    if kind == "boolean":
        return dtype == torch.bool
    if kind == "integer":
        return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    return not dtype.is_complex and not (dtype.is_floating_point and dtype.itemsize == 1)


#: What is expected of elements, and the call that converts to it.
_WORDS: Mapping[Kind, tuple[str, str]] = {
    "floating": ("of floating-point numbers, 16 bits or more", ".float()"),
    "inexact": ("of floating-point numbers, 16 bits or more", ".float()"),
    "stored": ("of floating-point numbers or int8", ".float()"),
    "bytes": ("of numbers of eight bits, or of floating-point numbers", ".float()"),
    "boolean": ("of booleans", ".bool()"),
    "integer": ("of integers", ".long()"),
    "index": ("in int64 or int32", ".long()"),
    "real": ("of real numbers", ".float()"),
}


def _shown(dims: str | None) -> str:
    return f" [{', '.join(dims.replace('|1', '').split())}]" if dims is not None else ""


def _named(value: Any) -> str:
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    told = repr(value) if shape is None else f"of shape {tuple(shape)}"
    return " ".join(f"{type(value).__name__} {told}".split())[:200]


def _range(least: float, most: float, above: bool) -> str:
    if least == -math.inf and most == math.inf:
        return ""
    first, last = (str(each) if isinstance(each, int) else f"{each:g}" for each in (least, most))
    if most == math.inf:
        return f" above {first}" if above else f", {first} or more"
    return f" above {first}, up to {last}" if above else f" from {first} to {last}"
