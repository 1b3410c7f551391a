"""Random programs that share and overwrite memory: views, writes, buffers, inputs and outputs that are one memory.

Every line is run eagerly as it is drawn, and one that raises is left out. So templates need not know which shapes there are.
"""

from __future__ import annotations

import pathlib
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

B, T, D = 2, 4, 6


def _grammar() -> dict[str, list[str]]:
    """The templates by section."""
    found: dict[str, list[str]] = {}
    for line in (pathlib.Path(__file__).parent / "data" / "memory_grammar.txt").read_text().splitlines():
        if re.fullmatch(r"\[\w+\]", line):
            templates = found.setdefault(line[1:-1], [])
        elif not line.startswith("#"):
            templates.append(line.replace("\\n", "\n"))
    return found


GRAMMAR = _grammar()


class Model(torch.nn.Module):
    """What a program reads and writes besides its operands."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(D, D, generator=draw) / 3)
        self.register_buffer("cache", torch.randn(B, T, D, generator=draw))
        self.register_buffer("mean", torch.randn(D, generator=draw))
        self.register_buffer("steps", torch.zeros(()))


@dataclass(frozen=True)
class Program:
    """Source text of ``function(m, x, y, places)``, and how it is called."""

    source: str
    is_graded: bool
    is_dynamic: bool | None
    lies: str

    def function(self, path: Any) -> Callable[..., Any]:
        """Compiled from a file, as a user's code is."""
        path.write_text(self.source)
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, str(path), "exec"), names)
        return names["function"]  # type: ignore[no-any-return]


def inputs(lies: str, seed: int, is_graded: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and the operands that are made of them: some order in memory, or two of one memory."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(B, T, D, generator=draw).requires_grad_(is_graded) for _ in range(2))
    made = [x * 1.0, y * 1.0]
    if lies == "turned":
        made[0] = (x.transpose(0, 1).contiguous() * 1.0).transpose(0, 1)
    if lies == "cut":
        made[0] = F.pad(x, (1, 2))[..., 1:-2]
    if lies == "one":
        both = torch.stack((x, y)) * 1.0
        made = [both[0], both[1]]
    return [x, y], [*made, torch.tensor([[2, 0], [0, 3], [1, 2]][seed % 3])]


def program(seed: int) -> Program:
    """Lines that make tensors and views of them, write to any of these, and read others."""
    draw = random.Random(seed)
    found = Program(
        "", draw.random() < 0.5, draw.choice((None, None, True)), draw.choice(("", "", "turned", "cut", "one"))
    )
    _, (x, y, places) = inputs(found.lies, 0, found.is_graded)
    known: dict[str, Any] = {"m": Model(), "x": x, "y": y, "places": places, "torch": torch, "F": F}
    names, lines = ["x", "y"], list[str]()
    for start in ("x * 1.5", "y.tanh()", "torch.zeros_like(x)")[: draw.randint(1, 3)]:
        names.append(f"t{len(names)}")
        lines.append(f"{names[-1]} = {start}")
        exec(lines[-1], known)
    for _ in range(draw.randint(4, 14)):
        for _ in range(20):
            line, new = _line(draw, names, known)
            tried = {**known}
            if _runs(line, tried) and all(
                1 < tried[name].numel() < 2000 and tried[name].is_floating_point() for name in new
            ):
                known, names = tried, [*names, *new]
                lines += line.split("\n")
                break
    pool = [name for name in names if name not in ("x", "y") or draw.random() < 0.3]
    chosen = draw.sample(pool, min(len(pool), draw.randint(1, 4)))
    if draw.random() < 0.3:
        chosen.append(f"{draw.choice(names)}.softmax(-1)")
    body = "\n    ".join([*lines, f"return {', '.join(chosen)},"])
    return replace(found, source=f"def function(m, x, y, places):\n    {body}\n")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _line(draw: random.Random, names: list[str], known: dict[str, Any]) -> tuple[str, list[str]]:
    kind, new = draw.random(), f"t{len(names)}"
    if kind < 0.25:
        text = "N = " + draw.choice(GRAMMAR["views"])
    elif kind < 0.5:
        text = "N = " + draw.choice(GRAMMAR["made"])
    elif kind < 0.88:
        text = draw.choice(GRAMMAR["writes"])
    else:
        text = draw.choice(GRAMMAR["flows"]).replace("WRITE", draw.choice(GRAMMAR["writes"]))
        text = text.replace("MADE", draw.choice(GRAMMAR["made"]))
    one, other = draw.choice(names[-4:] if draw.random() < 0.7 else names), draw.choice(names)
    if kind >= 0.5 and _memory(known[one]) == _memory(known[other]):  # what is read while it is written nobody defines
        other += ".clone()"
    words = {"A": one, "B": other, "N": new, "I": "places", "K": draw.choice("012")}
    found = "".join(_filled(text, words))
    return found, [new] if new in found else []


def _filled(text: str, words: dict[str, str]) -> Iterator[str]:
    """The letters that stand by themselves as what they stand for."""
    for place, each in enumerate(text):
        around = text[max(place - 1, 0) : place] + text[place + 1 : place + 2]
        yield words[each] if each in words and not any(one.isalnum() or one == "_" for one in around) else each


def _runs(line: str, known: dict[str, Any]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            exec(line, known)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, Warning):
            return False
    tensors = [
        each for each in known.values() if isinstance(each, Tensor) and each.is_floating_point() and each.numel()
    ]
    return all(bool(each.detach().abs().amax() < 1e3) for each in tensors)


@dataclass(frozen=True)
class Outcome:
    """What two calls gave and left behind: values, how they lie, whose memory is whose, and gradients (or why there are none)."""

    values: list[Tensor]
    lies: list[Any]
    gradients: list[Tensor | None] | str


def outcome(function: Callable[..., Any], program: Program) -> Outcome:
    """Call it three times with other values, write to what it gave, and look at everything.

    Raises:
        RuntimeError: the forward pass raises.
    """
    model = Model()
    values, lies, gradients, why = list[Tensor](), list[Any](), list[Tensor | None](), ""
    with torch.set_grad_enabled(program.is_graded):
        for call in range(3):
            leaves, operands = inputs(program.lies, call, program.is_graded)
            found = function(model, *operands)
            seen = [*found, *operands, *model.buffers()]
            values += [each.detach().clone() for each in seen]
            lies += [(each.shape, each.dtype, each.requires_grad) for each in found]
            lies += [[step for size, step in zip(each.shape, each.stride(), strict=True) if size > 1] for each in found]
            memory = list(map(_memory, seen))
            lies.append([memory.index(each) for each in memory])
            ends = [each for each in (*found, *operands[:2]) if each.requires_grad]
            try:
                if ends:
                    weights = [torch.linspace(0.5, 1.5, each.numel()).view(each.shape).to(each.dtype) for each in ends]
                    gradients += torch.autograd.grad(ends, [*leaves, model.weight], weights, allow_unused=True)
            except RuntimeError as error:
                why = str(error).split("\n")[0]
            with torch.no_grad():
                for each in found:
                    if each.is_floating_point() and 0 not in each.stride():
                        each.mul_(0.5)
                values += [each.detach().clone() for each in seen]
            for each in model.buffers():
                each.detach_()
    return Outcome(values, lies, why or gradients)
