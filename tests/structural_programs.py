"""Random programs as source text: loops, stores, views, aliases, modes and vmaps, for what is rewritten structurally.

A program is a function ``f(m, x, y, ...)`` over a few tensors, drawn from a grammar by a seed. In a template ``<row>`` is an
expression of that kind, ``<row!>`` a name that has it, ``<row+>`` a name that is new, ``<2..4>`` a number in a range. Kinds
are shapes: ``seq`` [B, T, D], ``row`` [B, D], ``vec`` [D], ``weight`` [D, D], ``mat`` [B, D, D], ``list`` of T rows; ``n`` has
integers below D, [B, T]. Nothing guarantees that a program runs: one that fails eagerly is left out by the oracle.
"""

from __future__ import annotations

import pathlib
import random
import re
from dataclasses import dataclass, field
from typing import Any

#: The module ``m`` has these attributes: parameters ``w`` [D, D] and ``g`` [D], a buffer ``scale`` [D], and layers.
PREAMBLE = "B, T, D = x.shape"


def _grammar() -> dict[str, list[str]]:
    """The templates by section; those that are likelier are repeated."""
    found: dict[str, list[str]] = {}
    for line in (pathlib.Path(__file__).parent / "data" / "structural_grammar.txt").read_text().splitlines():
        if line.startswith("["):
            templates = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            times = re.match(r"(\d+)\* ", line)
            templates.extend([line[times.end() :]] * int(times[1]) if times else [line])
    return found


GRAMMAR = _grammar()
#: Loops that are mostly rolled, if nothing around them forbids it, overwrite nothing and give rows.
GRAMMAR["tame updates"] = [each for each in GRAMMAR["updates"] if not re.search(r"_\(|\+=|\] =|= <row>$", each)]
GRAMMAR["tame initial"] = [each for each in GRAMMAR["initial"] if "0.0" not in each and "zeros(1" not in each]


@dataclass(frozen=True)
class Program:
    """A program: ``source`` defines ``f(m, *inputs)``; ``inputs`` are expressions of B, T, D by name.

    ``roles`` say of an input whether it is a ``leaf`` with gradient, ``made`` of such a leaf, or a ``constant``; ``sizes`` has
    the B, T, D of every call; ``options`` are those of the backend. Without gradients it may run in inference mode.
    """

    seed: int
    source: str
    inputs: dict[str, str]
    roles: dict[str, str]
    sizes: tuple[tuple[int, int, int], ...]
    options: dict[str, Any] = field(default_factory=dict)
    is_graded: bool = True
    is_dynamic: bool | None = None
    is_inference: bool = False

    def text(self) -> str:
        """Everything that is needed to repeat it."""
        lines = [f"# seed {self.seed}, sizes (B, T, D) of the calls {self.sizes}, options {self.options}"]
        mode = "on" if self.is_graded else "inference mode" if self.is_inference else "off"
        lines.append(f"# gradients {mode}, dynamic={self.is_dynamic}")
        lines += [f"# {name} = {text}  ({self.roles[name]})" for name, text in self.inputs.items()]
        return "\n".join([*lines, self.source])


class Writer:
    """Draws statements; ``names`` are the variables of every kind that exist so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names: dict[str, list[str]] = {
            "seq": ["x", "y"],
            "row": ["z"],
            "vec": ["b", "m.g", "m.scale"],
            "weight": ["w", "m.w"],
            "mat": ["k"],
            "list": [],
        }
        self.in_loop = False
        self.is_tame = rng.random() < 0.6
        self._new: list[tuple[str, str]] = []
        self._count = 0

    def write(self, template: str, depth: int = 0) -> str:
        """A template with everything drawn; new names exist from the next one on."""
        text = re.sub(r"<([a-z]+|\d+\.\.\d+)([!+]?)>", lambda found: self._drawn(found[1], found[2], depth), template)
        if depth == 0:
            for kind, name in self._new:
                self.names[kind].append(name)
            self._new.clear()
        return text

    def one_of(self, *sections: str) -> str:
        """One of the templates of some sections, of those that what exists suffices for."""
        templates = [each for name in sections for each in GRAMMAR[name]]
        return self.write(self.rng.choice([each for each in templates if "<list!>" not in each or self.names["list"]]))

    def _drawn(self, kind: str, how: str, depth: int) -> str:
        rng = self.rng
        if ".." in kind:
            least, most = kind.split("..")
            return str(rng.randint(int(least), int(most)))
        if how == "+":
            self._count += 1
            self._new.append((kind, f"{kind}{self._count}"))
            return self._new[-1][1]
        if how == "!":
            known = self.names[kind]
            return rng.choice(known[-3:] if rng.random() < 0.5 else known)
        templates = GRAMMAR[self._section(kind, depth)]
        found = self.write(
            rng.choice([each for each in templates if "<list!>" not in each or self.names["list"]]), depth + 1
        )
        return f"({found})" if f"longer {kind}" in GRAMMAR and " * " in found and not found.startswith("(") else found

    def _section(self, kind: str, depth: int) -> str:
        """Which templates an expression is drawn from."""
        draw = self.rng.random()
        if kind in ("at", "n"):
            if self.in_loop and (kind == "at" or draw < 0.15):
                return f"{'tame' if self.is_tame and kind == 'at' else 'loop'} {kind}"
            return kind
        if f"longer {kind}" not in GRAMMAR:
            return kind
        if draw < (0.55, 0.35, 0.1, 0.0)[min(depth, 3)]:
            return f"longer {kind}"
        return "slice" if kind == "row" and self.in_loop and draw > 0.75 else f"shortest {kind}"


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _split(text: str) -> list[str]:
    """Statements one by one, so that each may be taken out."""
    return [part.strip() for line in text.split("\n") for part in line.split("; ")]


def _loop(writer: Writer) -> list[str]:
    """A loop over time, with what comes before and after it."""
    rng, tame = writer.rng, "tame " if writer.is_tame else ""
    before = [*_split(writer.one_of(f"{tame}initial")), "outs = []"]
    before += ["state = {'h': h, 'c': h}"] if rng.random() < 0.3 else []
    before.append("o = " + writer.one_of("buffers"))
    header = writer.one_of("headers")
    outside = {kind: list(names) for kind, names in writer.names.items()}
    writer.names["row"] += [name for name in ("r", "u") if re.search(rf"\b{name}\b", header)] * 2
    writer.names["row"] += ["h", "h"] if not writer.is_tame else []
    writer.names["seq"] += ["o"] if not writer.is_tame else []
    writer.in_loop = True
    body = _step(writer, has_state=any(line.startswith("state = ") for line in before))
    writer.in_loop = False
    writer.names = {**outside, "row": [*outside["row"], "h", "h"], "seq": [*outside["seq"], "o"]}
    loop = [header, *_indented(body)]
    if rng.random() < 0.08:
        loop = [f"for layer in range({rng.choice([2, 3, 4])}):", *_indented(loop)]
    after = []
    if any("outs." in line for line in body):
        writer.names["list"].append("outs")
        if rng.random() < 0.7:
            after = [writer.one_of("stacks")]
    return [*before, *loop, *after]


def _step(writer: Writer, *, has_state: bool) -> list[str]:
    """The body of a loop; that of a tame one has a fault planted now and then."""
    rng, is_tame = writer.rng, writer.is_tame
    tame = "tame " if is_tame else ""
    body: list[str] = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        wild = "definitions" if rng.random() < 0.75 else "mutations"
        body += _split(writer.one_of("tame definitions" if is_tame else wild))
    for _ in range(rng.choice([1, 1, 1, 2])):
        body += _split(writer.one_of("state updates" if has_state and rng.random() < 0.7 else f"{tame}updates"))
    for _ in range(rng.choice([1, 1, 2])):
        body += _split(writer.one_of(f"{tame}stores"))
    if rng.random() < (0.06 if is_tame else 0.2):
        body += _split(writer.one_of("mutations", "stores"))
    if rng.random() < (0.08 if is_tame else 0.2):  # one step that differs
        body += [
            f"if t == {rng.choice(['0', '2', 'T // 2', 'T - 1'])}:",
            *_indented(_split(writer.one_of("mutations", "updates"))),
        ]
    if rng.random() < 0.08:
        body = _in_a_mode(rng, body)
    return body


def _in_a_mode(rng: random.Random, lines: list[str]) -> list[str]:
    """The same with some of the statements under a mode."""
    tops = [at for at, line in enumerate(lines) if not line.startswith(" ")] + [len(lines)]
    first, last = sorted(rng.sample(range(len(tops)), 2)) if len(tops) > 2 else (0, len(tops) - 1)
    start, stop = tops[first], tops[min(last, first + rng.choice([1, 1, 1, 2, 3, 10]))]
    return [*lines[:start], rng.choice(GRAMMAR["modes"]), *_indented(lines[start:stop]), *lines[stop:]]


def _body(writer: Writer) -> list[str]:
    """Definitions, overwritten memory, a loop or another region, and more of the same; some of it under a mode."""
    rng = writer.rng
    lines: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 1, 2])):
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            lines += _split(writer.one_of("lists" if rng.random() < 0.3 else "definitions"))
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            lines += _split(writer.one_of("mutations"))
        is_loop = rng.random() < 0.8
        lines += _loop(writer) if is_loop else _split(writer.one_of("regions"))
        for _ in range(rng.choice([0, 0, 1, 2])):
            lines += _split(writer.one_of("mutations" if rng.random() < 0.6 else "definitions"))
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        lines = _in_a_mode(rng, lines)
    return lines


def _inputs(rng: random.Random) -> tuple[dict[str, str], dict[str, str]]:
    """Expressions and roles of the inputs."""
    dtype = rng.choice(["torch.float64"] * 8 + ["torch.float32", "torch.bfloat16"])
    shapes = {"x": "B, T, D", "y": "B, T, D", "z": "B, D", "b": "D", "w": "D, D", "k": "B, D, D"}
    forms = ["torch.randn({s})"] * 14 + ["torch.rand({s})", "torch.randn({s}).round()", "special({s})"]
    layouts = ["{v}"] * 14 + ["transposed({v})", "strided({v})", "expanded({v})"]
    values = {name: f"{rng.choice(forms).format(s=shape)}.to({dtype})" for name, shape in shapes.items()}
    values = {name: text if name not in "wk" else text + " * 0.3" for name, text in values.items()}
    inputs = {name: rng.choice(layouts).format(v=text) for name, text in values.items()}
    if rng.random() < 0.05:
        inputs["y"], inputs["z"] = rng.choice([("x.flip(1)", "x[:, 0]"), ("x", "y[:, -1]"), ("x.detach()", "x[:, 1]")])
    roles = ["made", "made", "made", "leaf", "constant", "constant"]
    drawn = {name: rng.choice(roles) for name in inputs}
    return inputs | {"n": "torch.randint(D, (B, T))"}, drawn | {"n": "constant"}


def _sizes(rng: random.Random, is_tame: bool) -> tuple[tuple[int, int, int], ...]:
    steps = rng.choice([5, 6, 6, 7, 8, 8, 9] * 3 + [16, 17] if is_tame else [2, 3, 4, 5, 5, 6, 6, 7, 8])
    first = (rng.choice([1, 2, 2, 3, 4]), steps, rng.choice([1, 2, 3, 4, 4, 6]))
    if rng.random() < 0.1:
        first = (steps, steps, steps) if steps < 9 else (2, steps, 2)
    if rng.random() < 0.85:
        return (first,)
    other = (
        (first[0] + 1, first[1], first[2])
        if rng.random() < 0.6
        else (first[0], first[1] + rng.choice([-1, 1, 2]), first[2])
    )
    return first, rng.choice([first, other])


LOCKS: dict[str, list[str]] = {
    "scan": ["lz.rolled_scan", "lz.chunked_scan", "lz.associative_scan", "lz.associative_matrix_scan", "inductor"],
    "attention": ["torch.sdpa", "lz.blocked", "lz.tiled", "inductor"],
    "norm": ["torch.norm"],
    "rope": ["torch.rope"],
    "mlp": ["torch.mlp"],
    "sampling": ["torch.sampling"],
}


def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    inputs, roles = _inputs(rng)
    writer = Writer(rng)
    lines = [PREAMBLE, *_body(writer)]
    results = [writer.one_of("returns") for _ in range(rng.choice([1, 2, 2, 3]))]
    known = "\n".join(lines)
    results = [each for each in results if each not in ("h", "o", "y0") or f"{each} = " in known] or ["x"]
    new = [name for kind in ("seq", "row") for name in writer.names[kind] if name[-1].isdigit() or name in ("h", "o")]
    results += rng.sample(new, min(len(new), rng.choice([0, 1, 1, 2, 4])))
    results += new[-1:]  # what was made last is most of the program
    lines.append(f"return {', '.join(results)}{',' if len(results) == 1 else ''}")
    source = "\n".join([f"def f(m, {', '.join(inputs)}):", *_indented(lines)])
    if "autocast(" in source and rng.random() < 0.8:  # which leaves doubles alone
        inputs = {name: text.replace("float64", "float32") for name, text in inputs.items()}
    options = {"loops": rng.choice(["auto", "auto", "roll", "roll", "roll", "keep"])}
    lock = {op: rng.choice(kernels) for op, kernels in LOCKS.items() if rng.random() < 0.6}
    options |= {"lock": lock} if lock else {}
    dynamic = rng.choice([None, None, None, None, False, True])
    sizes, is_graded = _sizes(rng, writer.is_tame), rng.random() < 0.85
    is_inference = not is_graded and rng.random() < 0.5
    options |= {"layers": "fold"} if rng.random() < 0.3 else {}
    return Program(seed, source, inputs, roles, sizes, options, is_graded, dynamic, is_inference)
