"""Random programs as source text: loops, stores, views, aliases, modes and vmaps, for what is rewritten structurally.

A program is a function ``f(m, x, y, ...)`` over a few tensors, drawn from a grammar by a seed. In a template ``<row>`` is an
expression of that kind, ``<row!>`` a name that has it, ``<row+>`` a name that is new, ``<2..4>`` a number in a range. Kinds
are shapes: ``seq`` [B, T, D], ``row`` [B, D], ``vec`` [D], ``weight`` [D, D], ``mat`` [B, D, D], ``list`` of T rows. Nothing
guarantees that a program runs: one that fails eagerly is left out by the oracle.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

#: The module ``m`` has these attributes: parameters ``w`` [D, D] and ``g`` [D], a buffer ``scale`` [D], and layers.
PREAMBLE = "B, T, D = x.shape"

_TERMINALS = {
    "row": [
        "<row!>",
        "<row!>",
        "<row!>",
        "<seq!>[:, <at>]",
        "<seq!>[:, <at>]",
        "<seq!>.select(1, <at>)",
        "<list!>[<at>]",
    ],
    "seq": ["<seq!>"],
    "vec": ["<vec!>"],
    "weight": ["<weight!>"],
    "mat": ["<mat!>"],
    "n": ["0.5", "-0.3", "0.9", "2.0", "1", "3", "0.1"],
    "loop n": ["t", "0.1 * t", "(t + 1)", "float(t)"],
    "at": ["0", "-1", "1", "T - 1", "T // 2"],
    "loop at": ["t", "t", "t", "t", "t", "t", "T - 1 - t", "t - 1", "0", "-1"],
    "tame at": ["t"] * 16 + ["T - 1 - t", "0", "t - 1"],
    "unary": [
        *["torch.tanh", "torch.tanh", "torch.sigmoid", "torch.relu", "torch.sin", "F.silu", "F.softplus", "torch.exp"],
        *["torch.sqrt", "torch.abs", "torch.log1p", "torch.neg", "torch.sign", "torch.round", "torch.Tensor.float"],
        *["torch.Tensor.bfloat16", "torch.Tensor.double", "torch.Tensor.detach", "torch.Tensor.clone"],
        *["torch.Tensor.contiguous", "torch.Tensor.long"],
    ],
}

_EXPRESSIONS = {
    "row": [
        *["(<row> + <row>)", "(<row> - <row>)", "(<row> * <row>)", "<n> * <row>", "(<row> + <n>)", "<unary>(<row>)"]
        * 2,
        *["(<row> * <vec>)", "<row> @ <weight>", "F.linear(<row>, <weight>)", "torch.tanh(<row> @ <weight> + <vec>)"],
        *["torch.where(<row> > 0, <row>, <row>)", "torch.lerp(<row>, <row>, <n>)", "torch.maximum(<row>, <row>)"],
        *["torch.where(<row> > 0, <row> * torch.sqrt(<row>), <row> + <row>)", "<row>.masked_fill(<row> > 0.5, <n>)"],
        *[
            "F.softmax(<row>, -1)",
            "F.layer_norm(<row>, (D,), <vec>)",
            "<row> * torch.rsqrt(<row>.pow(2).mean(-1, True) + 1e-6)",
        ],
        *[
            "torch.einsum('bd,bde->be', <row>, <mat>)",
            "(<row>[:, None] @ <mat>)[:, 0]",
            "<row>.flip(-1)",
            "<row> / (1 + <row>.abs())",
        ],
        *[
            "torch.sigmoid(<row>) * <row> + <row>",
            "<seq>.mean(1)",
            "<row>.cumsum(-1) * 0.5",
            "torch.addcmul(<row>, <row>, <row>)",
        ],
        *[
            "<row>.t().contiguous().t()",
            "<vec>.expand(B, D)",
            "<row>.roll(1, 0)",
            "torch.cat([<row>[:, :1], <row>[:, 1:]], -1)",
        ],
        *[
            "F.rms_norm(<row>, (D,))",
            "torch.stack([<row>, <row>]).amax(0)",
            "(<row> * <row>.sum(-1, keepdim=True).sigmoid())",
        ],
    ],
    "seq": [
        *[
            "torch.tanh(<seq>)",
            "(<seq> * <vec>)",
            "<seq> @ <weight>",
            "(<seq> + <seq>)",
            "<seq>.clone()",
            "<seq>.flip(1)",
        ],
        *[
            "torch.sigmoid(<seq>)",
            "F.layer_norm(<seq>, (D,))",
            "<seq> * torch.rsqrt(<seq>.pow(2).mean(-1, keepdim=True) + 1e-6)",
        ],
        *[
            "torch.softmax(<seq>, 1)",
            "<seq>.cumsum(1)",
            "(<seq> * <row>[:, None])",
            "<unary>(<seq>)",
            "torch.stack(list(<list!>), 1)",
        ],
        *[
            "F.pad(<seq>, (0, 0, 1, 0))[:, :-1]",
            "<seq>.roll(1, 1)",
            "<n> * <seq>",
            "<seq>.transpose(0, 1).contiguous().transpose(0, 1)",
        ],
    ],
    "vec": ["<row>.mean(0)", "torch.tanh(<vec>)", "<vec> * <n>", "<row>[0]", "<weight>[0]"],
    "weight": ["<weight>.T", "torch.tanh(<weight>)", "<weight> * 0.5"],
    "mat": [
        "<row>[:, :, None] * <row>[:, None, :]",
        "<mat> * <row>[:, :, None].sigmoid()",
        "<mat> * <n>",
        "<mat>.transpose(1, 2)",
    ],
}

#: What makes something new: values, views of them and other names for them.
DEFINITIONS = [
    *["<row+> = <row>", "<seq+> = <seq>", "<row+> = <seq!>[:, <at>]", "<row+> = <seq!>[:, <at>]", "<row+> = <row!>"],
    *["<seq+> = <seq!>", "<seq+> = <seq!>.clone()", "<seq+> = <seq!>.detach()", "<vec+> = <vec>", "<mat+> = <mat>"],
    *[
        "<list+> = <seq>.unbind(1)",
        "<list+> = [<seq!>[:, t].clone() for t in range(T)]",
        "<list+> = [<seq!>[:, t] for t in range(T)]",
    ],
    *["<list+> = [torch.tanh(<seq!>[:, t]) for t in range(T)]", "<list+> = [s.squeeze(1) for s in <seq>.split(1, 1)]"],
    *[
        "<list+> = list(torch.unbind(<seq>, dim=1))",
        "<seq+> = torch.zeros_like(<seq!>)",
        "<row+> = <vec!>.expand(B, -1)",
    ],
    *[
        "<row+> = <row!>.view(B, D)",
        "<row+> = <row!>.t().contiguous().t()",
        "<row+> = <row>.detach()",
        "<weight+> = <weight>",
    ],
    *[
        "<row+>, <row+> = <seq>.select(1, 0), <seq!>[:, -1]",
        "<row+> = torch.zeros_like(<row!>)",
        "<seq+> = <seq!>[:, :]",
    ],
    *[
        "<row+> = <seq!>.chunk(T, 1)[<at>].squeeze(1)",
        "<seq+> = <seq!>.view(B * T, D).view(B, T, D)",
        "<vec+> = m.scale",
    ],
    *["<seq+> = <seq!>.transpose(0, 1).clone().transpose(0, 1)", "<row+> = <row>.sum(-1, keepdim=True).expand(B, D)"],
    *[
        "<seq+> = <row!>.unsqueeze(1).expand(B, T, D)",
        "<seq+> = torch.stack(list(<list!>), 1)",
        "<row+> = <list!>[<at>]",
    ],
]

#: What overwrites memory.
MUTATIONS = [
    *[
        "<seq!>.mul_(<n>)",
        "<seq!>.add_(<seq>)",
        "<seq!>[:, <at>] = <row>",
        "<seq!>[:, <at>] += <row>",
        "<seq!>[:, <at>].mul_(<n>)",
    ],
    *[
        "<seq!>[:, <at>].copy_(<row>)",
        "<seq!>[:, 1:] = <seq>[:, :-1]",
        "<seq!>.transpose(0, 1)[<at>].add_(<row>)",
        "<seq!> += <n>",
    ],
    *[
        "<row!>.add_(<row>)",
        "<row!>.mul_(<n>)",
        "<row!> *= <n>",
        "<row!> += <row>",
        "<row!>.copy_(<row>)",
        "<row!>.zero_()",
    ],
    *[
        "<row!>[:, 0] = <n>",
        "<row!>[<row> > 0] = <n>",
        "<row!>.masked_fill_(<row> > 0, <n>)",
        "<seq!>.view(-1).add_(<n>)",
    ],
    *[
        "<seq!>.detach().mul_(<n>)",
        "<vec!>.mul_(<n>)",
        "<list!>[<at>].add_(<row>)",
        "<list!>[<at>] = <row>",
        "<row!>.t().mul_(<n>)",
    ],
    *[
        "<seq!>.select(1, <at>).add_(<n>)",
        "<seq!>.narrow(1, <at>, 1).mul_(<n>)",
        "<row!>.sigmoid_()",
        "<seq!>[:, <at>, 0] = <n>",
    ],
    *[
        "<seq!>[0, <at>] = <vec>",
        "<row!>.detach().add_(<n>)",
        "<mat!>.mul_(<n>)",
        "m.scale.add_(0.5)",
        "<row!>[0].fill_(<n>)",
    ],
]

#: A step of a recurrence: how the state ``h`` of row shape moves on, given a fresh input.
UPDATES = [
    *[
        "h = torch.sigmoid(<row>) * h + <row>",
        "h = <row> * h + <row>",
        "h = torch.tanh(<row> + h @ <weight>)",
        "h = <n> * h + <row>",
    ]
    * 2,
    *[
        "h = h * <vec> + <row>",
        "h = torch.lerp(h, <row>, <n>)",
        "h = h + torch.sigmoid(<row>) * (<row> - h)",
        "h = F.silu(h + <row>)",
    ],
    *[
        "h = h.mul_(<n>).add_(<row>)",
        "h += <row>",
        "h.mul_(<row>.sigmoid()).add_(<row>)",
        "h = torch.where(<row> > 0, h * <vec>, h + <row>)",
    ],
    *[
        "s = <row>; h = torch.where(s > 0, s * torch.sqrt(s), h + s)",
        "h = torch.maximum(h, <row>)",
        "h.copy_(0.5 * h + <row>)",
    ],
    *["h = h.clone(); h[:, 0] = <row>[:, 0]", "h = F.layer_norm(h + <row>, (D,))", "h = (h.t() * <n>).t() + <row>"],
    *[
        "z = torch.sigmoid(<row> + h); h = z * h + (1 - z) * <row>",
        "h = h * <n> + 0.1 * t",
        "h = <row>",
        "h = h.detach() * 0.5 + <row>",
    ],
    *["h = h + <row> * <row>.detach()", "h = h.roll(1, -1) * <n> + <row>", "h = (h > 1).to(h.dtype) * <row> + h * <n>"],
]

STORES = [
    *[
        "outs.append(h)",
        "outs.append(h)",
        "o[:, t] = h",
        "o[:, t] = h",
        "o[:, t] += h",
        "v = o[:, t]; v.copy_(h)",
        "o[:, t].add_(h)",
    ],
    *[
        "o.select(1, t).copy_(h)",
        "outs.append(h.clone())",
        "outs.append(<row>)",
        "o[:, t] = <row>",
        "v = o[:, t]; v.add_(h); outs.append(v)",
    ],
    *[
        "outs.append(h.detach())",
        "<seq!>[:, t] = h",
        "<seq!>[:, t] += h",
        "<seq!>[:, t].mul_(h)",
        "outs.append(h); h.mul_(<n>)",
    ],
    *[
        "v = o[:, t]; v += h; o.mul_(<n>); outs.append(v)",
        "v = o[:, t]; v.copy_(h); h.add_(1); outs.append(v)",
        "o[:, t:t + 1] = h[:, None]",
    ],
    *["last = h", "outs.insert(0, h)", "o[:, t] = h; outs.append(o[:, t - 1])", "o[:, t].copy_(o[:, t - 1] * 0.5 + h)"],
]

INITIAL = [
    *[
        "h = torch.zeros_like(x[:, 0])",
        "h = x.new_zeros(B, D)",
        "h = <row>",
        "h = <row!>.clone()",
        "h = <seq!>[:, 0]",
        "h = <row>.detach()",
    ],
    *[
        "h = torch.zeros(B, D, dtype=x.dtype)",
        "h = <vec>.expand(B, D)",
        "h = torch.zeros(D, B, dtype=x.dtype).t()",
        "h = torch.ones_like(<row!>)",
    ],
    *[
        "h = <row!>.t().contiguous().t()",
        "h = 0.0 * <vec!>",
        "h = torch.zeros(1, D, dtype=x.dtype)",
        "h = torch.zeros_like(<row>).requires_grad_()",
    ],
]

HEADERS = [
    *["for t in range(T):"] * 6,
    *[
        "for t in range(1, T):",
        "for t in reversed(range(T)):",
        "for t in range(T - 1, -1, -1):",
        "for t in range(0, T, 2):",
    ],
    *[
        "for t, r in enumerate(<seq>.unbind(1)):",
        "for t, r in enumerate(<list!>):",
        "for t, (r, u) in enumerate(zip(<list!>, <seq>.unbind(1))):",
    ],
    *["for t, r in enumerate(reversed(<seq>.unbind(1))):", "for t, r in zip(range(T), <seq>.transpose(0, 1)):"],
]

#: What loops are mostly made of: these are rolled, if nothing around them forbids it.
_TAME = {
    "definitions": ["<row+> = <row>"] * 4 + ["<row+> = <row!>", "<row+> = <seq!>[:, <at>]", "<row+> = <row>.detach()"],
    "updates": [each for each in UPDATES if not re.search(r"_\(|\+=|\] =|= <row>$", each)],
    "stores": ["outs.append(h)"] * 3
    + ["o[:, t] = h"] * 2
    + ["outs.append(<row>)", "outs.append(h.clone())", "o[:, t] = <row>", "last = h"],
    "initial": [each for each in INITIAL if "0.0" not in each and "zeros(1" not in each],
}

MODES = [
    *["with torch.no_grad():"] * 4,
    *[
        "with torch.enable_grad():",
        "with torch.autocast('cpu', dtype=torch.bfloat16):",
        "with torch.autocast('cpu', dtype=torch.bfloat16):",
    ],
    *[
        "with torch.autocast('cpu', enabled=False):",
        "with torch.set_grad_enabled(False):",
        "with torch.inference_mode(False):",
    ],
]

#: Other regions that are rewritten: each leaves a new value.
REGIONS = [
    *["<row+> = torch.vmap(lambda a: <map>)(<row>)"] * 2,
    "<row+> = torch.vmap(lambda a, b: a * b + torch.tanh(a), in_dims=<dims>, out_dims=<0..1>)(<row>, <row>)",
    "<seq+> = torch.vmap(lambda s: torch.vmap(lambda a: <map>)(s))(<seq>)",
    "<seq+> = torch.vmap(lambda s: torch.vmap(lambda a: <map>, in_dims=<0..1>, out_dims=<0..1>)(s), in_dims=<0..1>, out_dims=<0..1>)(<seq>)",
    "<mat+> = torch.vmap(lambda p: torch.vmap(lambda q: p * q + q)(<weight>))(<row>)",
    "<row+> = torch.vmap(lambda a, b: torch.tanh(a) * b, in_dims=(0, None))(<row>, <vec>)",
    "<seq+> = torch.vmap(lambda a: <map>, in_dims=1, out_dims=1)(<seq>)",
    "<seq+> = torch.softmax(<seq> @ <seq>.transpose(1, 2) / D ** 0.5, -1) @ <seq>",
    "s = <seq> @ <seq>.transpose(1, 2) + torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)\n<seq+> = s.softmax(-1) @ <seq>",
    "q = <seq!>; s = torch.einsum('btd,bsd->bts', q, <seq>); <mutation>; <seq+> = torch.einsum('bts,bsd->btd', s.softmax(-1), <seq>)",
    "<seq+> = F.scaled_dot_product_attention(<seq>, <seq>, <seq>)",
    *[
        "s = <seq>; <seq+>, _ = m.attention(s, s, s, need_weights=False)",
        "s = <seq>; <seq+> = m.layer(s)",
        "s = <seq>; <seq+> = m.attention(s, s, s)[0]",
    ],
    "s = torch.rsqrt(<seq>.pow(2).mean(-1, keepdim=True) + 1e-5); <mutation>; <seq+> = <seq> * s * <vec>",
    "p = <row>; s = p.pow(2).mean(-1, keepdim=True); <row+> = p * torch.rsqrt(s + 1e-6) * <vec>",
    "p = <seq>; <seq+> = (p - p.mean(-1, keepdim=True)) / torch.sqrt(p.var(-1, keepdim=True, unbiased=False) + 1e-5)",
    "p = <row>.clone(); p[p < p.topk(min(2, D)).values[:, -1:]] = -torch.inf; <mutation>; <row+> = p.softmax(-1)",
    "p = <row>.clone(); p.div_(0.7); i = p.sort(-1, descending=True); c = i.values.softmax(-1).cumsum(-1) > 0.8\n"
    "c[:, 1:] = c[:, :-1].clone(); c[:, 0] = False; <row+> = p.masked_fill(c.scatter(1, i.indices, c), -torch.inf).softmax(-1)",
    "<row+> = F.linear(F.silu(F.linear(<row>, <weight>)) * F.linear(<row>, <weight>), <weight>)",
    "e = torch.arange(T, dtype=x.dtype)[:, None] * <vec>; <seq+> = <seq> * e.cos() + <seq>.roll(1, -1) * e.sin()",
    "from torch._higher_order_ops.associative_scan import associative_scan\n"
    "<seq+> = associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (torch.sigmoid(<seq>), <seq>), 1, combine_mode='generic')[1]",
]

_MAPS = [
    "a * 2 + 1",
    "torch.tanh(a)",
    "<vec> * a",
    "a * a + <n>",
    "a.sin() + <vec>",
    "<row!>[0] * a",
    "a @ <weight>",
    "a.sum() * a",
    "a + <weight> [0]",
    "<weight> * a",
]

RETURNS = [
    "<seq!>",
    "<row!>",
    "<row!>",
    "<seq!>",
    "h",
    "o",
    "y0",
    "<seq!>[:, -1]",
    "<seq!>.transpose(0, 1)",
    "<row!>.detach()",
    "x",
    "<vec!>",
    "<mat!>",
    "<list!>[-1]",
    "<seq!>[:, 1:]",
    "<row>",
    "<row!>.t()",
    "<row!>[:1]",
]


@dataclass(frozen=True)
class Program:
    """A program: ``source`` defines ``f(m, *inputs)``; ``inputs`` are expressions of B, T, D by name.

    ``roles`` say of an input whether it is a ``leaf`` with gradient, ``made`` of such a leaf, or a ``constant``; ``sizes`` has
    the B, T, D of every call; ``options`` are those of the backend.
    """

    seed: int
    source: str
    inputs: dict[str, str]
    roles: dict[str, str]
    sizes: tuple[tuple[int, int, int], ...]
    options: dict[str, Any] = field(default_factory=dict)
    is_graded: bool = True
    is_dynamic: bool | None = None

    def text(self) -> str:
        """Everything that is needed to repeat it."""
        lines = [f"# seed {self.seed}, sizes (B, T, D) of the calls {self.sizes}, options {self.options}"]
        lines.append(f"# gradients {'on' if self.is_graded else 'off'}, dynamic={self.is_dynamic}")
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

    def one_of(self, templates: list[str]) -> str:
        """One of several templates, of those that what exists suffices for."""
        able = [each for each in templates if "<list!>" not in each or self.names["list"]]
        return self.write(self.rng.choice(able))

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
        if kind == "dims":
            return rng.choice(["0", "(0, 0)", "1", "(1, 1)"])
        if kind in ("map", "mutation"):
            return self.write(
                rng.choice(_MAPS if kind == "map" else [each for each in MUTATIONS if "list" not in each]), depth + 1
            )
        if self.in_loop and kind in ("at", "n") and (kind == "at" or rng.random() < 0.15):
            return rng.choice(_TERMINALS[f"{'tame' if self.is_tame and kind == 'at' else 'loop'} {kind}"])
        choices = _TERMINALS[kind]
        if kind == "row" and self.in_loop and rng.random() < 0.25:
            choices = ["<list!>[<at>]", "<seq!>[:, <at>]"]
        if kind in _EXPRESSIONS and rng.random() < (0.55, 0.35, 0.1, 0.0)[min(depth, 3)]:
            choices = _EXPRESSIONS[kind]
        choices = [each for each in choices if "<list!>" not in each or self.names["list"]]
        found = self.write(rng.choice(choices), depth + 1)
        return f"({found})" if kind != "n" and " * " in found and not found.startswith("(") else found


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _split(text: str) -> list[str]:
    """Statements one by one, so that each may be taken out."""
    return [part.strip() for line in text.split("\n") for part in line.split("; ")]


def _loop(writer: Writer) -> list[str]:
    """A loop over time, with what comes before and after it."""
    rng = writer.rng
    before = [*_split(writer.one_of(_TAME["initial"] if writer.is_tame else INITIAL)), "outs = []"]
    buffer = [
        "torch.zeros_like(x)",
        "torch.zeros(B, T, D, dtype=x.dtype)",
        "<seq!>.clone()",
        "<seq>",
        "x.new_empty(B, T, D).fill_(0.5)",
    ]
    before.append("o = " + writer.write(rng.choice(buffer)))
    header = writer.one_of(HEADERS)
    outside = {kind: list(names) for kind, names in writer.names.items()}
    writer.names["row"] += [name for name in ("r", "u") if re.search(rf"\b{name}\b", header)] * 2
    writer.names["row"] += ["h", "h"] if not writer.is_tame else []
    writer.names["seq"] += ["o"] if not writer.is_tame else []
    writer.in_loop = True
    body = _step(writer)
    writer.in_loop = False
    writer.names = {**outside, "row": [*outside["row"], "h", "h"], "seq": [*outside["seq"], "o"]}
    loop = [header, *_indented(body)]
    if rng.random() < 0.08:
        loop = [f"for layer in range({rng.choice([2, 3, 4])}):", *_indented(loop)]
    after = []
    if any("outs." in line for line in body):
        writer.names["list"].append("outs")
        if rng.random() < 0.7:
            after = [
                writer.write(
                    rng.choice(["<seq+> = torch.stack(outs, 1)", "<seq+> = torch.cat([p[:, None] for p in outs], 1)"])
                )
            ]
    return [*before, *loop, *after]


def _step(writer: Writer) -> list[str]:
    """The body of a loop; that of a tame one has a fault planted now and then."""
    rng, is_tame = writer.rng, writer.is_tame
    body: list[str] = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        wild = DEFINITIONS if rng.random() < 0.75 else MUTATIONS
        body += _split(writer.one_of(_TAME["definitions"] if is_tame else wild))
    for _ in range(rng.choice([1, 1, 1, 2])):
        body += _split(writer.one_of(_TAME["updates"] if is_tame else UPDATES))
    for _ in range(rng.choice([1, 1, 2])):
        body += _split(writer.one_of(_TAME["stores"] if is_tame else STORES))
    if rng.random() < (0.06 if is_tame else 0.2):
        body += _split(writer.one_of([*MUTATIONS, *STORES]))
    if rng.random() < (0.08 if is_tame else 0.2):  # one step that differs
        body += [
            f"if t == {rng.choice(['0', '2', 'T // 2', 'T - 1'])}:",
            *_indented(_split(writer.one_of([*MUTATIONS, *UPDATES]))),
        ]
    if rng.random() < 0.08:
        body = _in_a_mode(rng, body)
    return body


def _in_a_mode(rng: random.Random, lines: list[str]) -> list[str]:
    """The same with some of the statements under a mode."""
    tops = [at for at, line in enumerate(lines) if not line.startswith(" ")] + [len(lines)]
    first, last = sorted(rng.sample(range(len(tops)), 2)) if len(tops) > 2 else (0, len(tops) - 1)
    start, stop = tops[first], tops[min(last, first + rng.choice([1, 1, 1, 2, 3, 10]))]
    return [*lines[:start], rng.choice(MODES), *_indented(lines[start:stop]), *lines[stop:]]


def _body(writer: Writer) -> list[str]:
    """Definitions, overwritten memory, a loop or another region, and more of the same; some of it under a mode."""
    rng = writer.rng
    lines: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 1, 2])):
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            lists = [each for each in DEFINITIONS if each.startswith("<list+>")]
            lines += _split(writer.one_of(lists if rng.random() < 0.3 else DEFINITIONS))
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            lines += _split(writer.one_of(MUTATIONS))
        is_loop = rng.random() < 0.8
        lines += _loop(writer) if is_loop else _split(writer.one_of(REGIONS))
        for _ in range(rng.choice([0, 0, 1, 2])):
            lines += _split(writer.one_of(MUTATIONS if rng.random() < 0.6 else DEFINITIONS))
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        lines = _in_a_mode(rng, lines)
    return lines


def _inputs(rng: random.Random) -> tuple[dict[str, str], dict[str, str]]:
    """Expressions and roles of the inputs."""
    dtype = rng.choice(["torch.float64"] * 8 + ["torch.float32", "torch.bfloat16"])
    shapes = {"x": "B, T, D", "y": "B, T, D", "z": "B, D", "b": "D", "w": "D, D", "k": "B, D, D"}
    forms = ["torch.randn({s})"] * 10 + [
        "torch.rand({s})",
        "torch.randn({s}).round()",
        "special({s})",
        "transposed({s})",
        "strided({s})",
    ]
    inputs = {name: f"{rng.choice(forms).format(s=shape)}.to({dtype})" for name, shape in shapes.items()}
    inputs = {name: text if name not in "wk" else text + " * 0.3" for name, text in inputs.items()}
    if rng.random() < 0.05:
        inputs["y"], inputs["z"] = rng.choice([("x.flip(1)", "x[:, 0]"), ("x", "y[:, -1]"), ("x.detach()", "x[:, 1]")])
    roles = ["made", "made", "made", "leaf", "constant", "constant"]
    return inputs, {name: rng.choice(roles) for name in inputs}


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
    results = [writer.one_of(RETURNS) for _ in range(rng.choice([1, 2, 2, 3]))]
    known = "\n".join(lines)
    results = [each for each in results if each not in ("h", "o", "y0") or f"{each} = " in known] or ["x"]
    new = [name for kind in ("seq", "row") for name in writer.names[kind] if name[-1].isdigit() or name in ("h", "o")]
    results += rng.sample(new, min(len(new), rng.choice([0, 1, 1, 2, 4])))
    results += new[-1:]  # what was made last is most of the program
    lines.append(f"return {', '.join(results)}{',' if len(results) == 1 else ''}")
    source = "\n".join([f"def f(m, {', '.join(inputs)}):", *_indented(lines)])
    if "autocast(" in source and rng.random() < 0.8:  # which leaves doubles alone
        inputs = {name: text.replace("float64", "float32") for name, text in inputs.items()}
    options = {"loops": rng.choice(["auto", "roll", "roll", "roll", "roll", "keep"])}
    lock = {op: rng.choice(kernels) for op, kernels in LOCKS.items() if rng.random() < 0.6}
    options |= {"lock": lock} if lock else {}
    dynamic = rng.choice([None, None, None, None, False, True])
    return Program(seed, source, inputs, roles, _sizes(rng, writer.is_tame), options, rng.random() < 0.85, dynamic)
