"""Random programs and a corpus of what once went wrong: what is rewritten structurally computes what eager does."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace

import pytest
import torch
from backends import SCANS_TAKE_COUNTERS
from structural_comparison import Open, difference
from structural_oracle import Finding, Verdict, check
from structural_programs import Program, generate
from structural_shrinking import shrink

SEEDS, CHUNK = 96, 12
#: The dimensions differ, and T is long enough for a loop of 4 steps besides the first ones.
SIZES = (2, 8, 3)


def program(
    body: str,
    size: tuple[int, int, int] = SIZES,
    roles: str = "made",
    inputs: str = "torch.randn({})",
    dtype: str = "float64",
    is_graded: bool = True,
    is_dynamic: bool | None = None,
    **options,
) -> Program:
    """A program of the corpus; all inputs are made by one expression, in one dtype, and of one role."""
    shapes = {"x": "B, T, D", "y": "B, T, D", "z": "B, D", "b": "D", "w": "D, D", "k": "B, D, D"}
    lines = [
        "def f(m, x, y, z, b, w, k):",
        "    B, T, D = x.shape",
        *("    " + line for line in body.strip("\n").split("\n")),
    ]
    texts = {name: f"{inputs.format(shape)}.to(torch.{dtype})" for name, shape in shapes.items()}
    given = dict.fromkeys(shapes, roles)
    return Program(0, "\n".join(lines), texts, given, (size,), {"loops": "roll", **options}, is_graded, is_dynamic)


CORPUS: dict[str, Program] = {
    "a vmap inside a vmap, all sizes equal": program(
        "return torch.vmap(lambda t: torch.vmap(lambda a: w * a)(t))(x)", (8, 8, 8)
    ),
    "a vmap of a vector inside a vmap, all sizes equal": program(
        "return torch.vmap(lambda t: torch.vmap(lambda a: b * a)(t))(x)", (8, 8, 8)
    ),
    "a vmap inside a vmap, sizes unequal": program("return torch.vmap(lambda p: torch.vmap(lambda q: p * q)(w))(z)"),
    "a loop beside a vmap inside a vmap": program("""
y[:, 1:] = x[:, :-1]
mat = torch.vmap(lambda p: torch.vmap(lambda q: p * q + q)(w))(z)
ks = [x[:, t].clone() for t in range(T)]
return ks[-1], mat"""),
    "copies taken before a write are read after it": program("""
ks = [x[:, t].clone() for t in range(T)]
x.mul_(3)
h = torch.zeros_like(z)
for k in ks:
    h = 0.5 * h + k
return h"""),
    "a piece is read through its view after the whole was overwritten": program("""
o, outs = torch.zeros_like(x), []
for t in range(T):
    v = o[:, t]
    v.add_(y[:, t])
    o.mul_(2)
    outs.append(v)
return torch.stack(outs, 1), o"""),
    "what was copied into a piece is overwritten": program("""
h, o, outs = torch.zeros_like(z), torch.zeros_like(x), []
for t in range(T):
    h = 0.5 * h + x[:, t]
    v = o[:, t]
    v.copy_(h)
    h.add_(1)
    outs.append(v)
return torch.stack(outs, 1), h"""),
    "slices taken without gradients": program("""
with torch.no_grad():
    ks = x.unbind(1)
h = z
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + ks[t]
return h"""),
    "values computed without gradients": program("""
with torch.no_grad():
    ks = [torch.tanh(x[:, t]) for t in range(T)]
h = z
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + ks[t]
return h"""),
    "stores without gradients, read with them": program("""
o = torch.zeros_like(x)
vs = [torch.tanh(y[:, t]) for t in range(T)]
with torch.no_grad():
    for t in range(T):
        o[:, t] = vs[t]
return torch.stack([o[:, t] * x[:, t] for t in range(T)], 1)"""),
    "a state that is detached in every step, beside infinities": program(
        """
h = z.zero_()
for t in range(T):
    h = 0.5 * h.detach() + y[:, t].tanh() * w[0]
return h[:1], x""",
        inputs="special({})",
    ),
    "a state that is two steps late and detached, beside infinities": program(
        """
h = late = z.zero_()
for t in range(T):
    h, late = 0.5 * late.detach() + y[:, t].tanh() * w[0], h
return h[:1], late[:1], x""",
        inputs="special({})",
    ),
    "a result that is read of some steps, beside infinities": program(
        """
h, outs = z.zero_(), []
for t in range(T):
    outs.append((h.tanh() * y[:, t].tanh()) * w[0])
    h = h.tanh() * 0.5 + y[:, t].tanh()
return outs[0], outs[T - 2], h""",
        inputs="special({})",
    ),
    "a state is returned, and detached as well": program(
        """
h = 1
for t in range(T + 1):
    h = h + torch.cat([x, x[:, :1]], 1)[:, t]
return h.detach(), h""",
        lock={"scan": "lz.associative_scan"},
    ),
    "what was stored is returned as a detached view": program(
        """
for t in range(T):
    x[:, t].copy_(x[:, t] * 0.5)
return x[:, 1].detach()""",
        roles="constant",
    ),
    "parts of what was stored are returned": program("""
o = x.clone()
for t in range(T):
    o[:, t] = (o[:, t - 1] if t else z) * 0.5
return o[:, 1].split(2, -1), o[:, 2].unbind(0), o[:, 3].diagonal()"""),
    "a detached view of an input is overwritten behind the steps that made it": program(
        """
h = y[:, 0]
for t in range(1, T):
    row = x[:, t].detach()
    h = F.one_hot(y[:, t, 0].long(), D) * h
    if t == T // 2:
        row.sigmoid_()
h.mul_(0.9)""",
        (2, 8, 1),
        roles="constant",
        inputs="torch.rand({})",
    ),
    "steps that carry a list of views": program("""
h = x[:, 0]
for t in range(T):
    rows = x.unbind(1)
    h = h + rows[0]
    h.add_(torch.where(rows[t] > 0, h, rows[-1]))
return h"""),
    "a last state is overwritten and returned by another name": program(
        """
h = c = z.t().contiguous().t().detach()
o = torch.zeros_like(x)
for t in range(T):
    h, c = c + x[:, t], 0.5 * h
    o[:, t] = h
h *= 0.9
h.masked_fill_(h > 0, 1)
return h""",
        roles="constant",
    ),
    "a view of what a loop wrote is written to and returned": program("""
h, o, views = z, y.clone(), []
for t in range(T):
    h = h * 0.1 + o[:, t]
    v = o[:, t]
    v += h
    o.mul_(0.5)
    views.append(v)
views[-1].add_(h)
return h, views[-1]"""),
    "a last state is overwritten of which a view is returned": program(
        """
h, outs = z, []
for t in range(T):
    h = h + y[:, t]
    outs.append(h.detach())
h[z > 0] = 0.1
return outs"""
    ),
    "a step hands on what it makes of what is transposed": program(
        """
h, z = B, z.t().contiguous().t()
for t in range(T):
    h = z * h
    x[:, t] = h
return x""",
        roles="constant",
    ),
    "two equal attentions are returned": program("""
s = x * 2
return tuple(torch.softmax(s @ s.transpose(1, 2) / D ** 0.5, -1) @ s for _ in range(2))"""),
    "two equal attentions under masks of their own are returned": program("""
def attend():
    keep = torch.ones(T, T, dtype=torch.bool).tril()
    scores = (x @ x.transpose(1, 2) / D ** 0.5).masked_fill(~keep, float("-inf"))
    return torch.softmax(scores, -1) @ x
return attend(), attend()"""),
    "two equal loops are returned": program(
        """
def run():
    h, outs = z, []
    for t in range(T):
        h = h * w[0] + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1), h
return *run(), *run()""",
        lock={"scan": "lz.rolled_scan"},
    ),
    "two equal attentions are returned, the second without a gradient": program("""
s = x * 2
one = torch.softmax(s @ s.transpose(1, 2) / D ** 0.5, -1) @ s
with torch.no_grad():
    other = torch.softmax(s @ s.transpose(1, 2) / D ** 0.5, -1) @ s
return one, other.unsqueeze(0)"""),
    "what a step gives repeats its elements": program("""
h, outs = z, []
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + x[:, t]
    outs.append((2 * h[:, :1]).expand(B, D))
return outs, h"""),
    "two results of a loop are equal": program("""
h, o, outs = z, torch.zeros_like(x), []
for t in range(T):
    h = h + y[:, T - 1 - t].cumsum(-1)
    o[:, t] = h
    outs.append(h)
return o, torch.stack(outs, 1)"""),
    "the first step of a loop alone is read, behind it are infinities": program(
        """
y = torch.log(y.abs().round())
h, outs = z, []
for t in range(T):
    h = y[:, t] * h
    outs.append(h)
return outs[0]""",
    ),
    "a step normalises over a symbolic size": program(
        """
h = c = torch.ones_like(z)
for t in range(1, T):
    h = F.layer_norm(h + x, (D,))
    c.mul_(0.9)
    h = h + c
return h""",
        (1, 8, 4),
        is_dynamic=True,
    ),
    "a step reads all but one of a symbolic size": program(
        """
h, outs = torch.zeros_like(z), []
for t in range(T):
    h = torch.maximum(h, torch.cat([y[:, t, :1], x[:, -1, 1:]], -1))
    outs.append(h)
return outs""",
        is_dynamic=True,
    ),
    "a scale without gradients before a norm": program(
        """
with torch.no_grad():
    s = x.pow(2).mean(-1, keepdim=True)
return x * torch.rsqrt(s + 1e-6) * b""",
        lock={"norm": "torch.norm"},
    ),
    "a weight without gradients behind a norm": program(
        """
with torch.no_grad():
    s = 1 + b
return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * s""",
        lock={"norm": "torch.norm"},
    ),
    "an input without gradients before a norm": program(
        """
with torch.no_grad():
    s = x * 2
return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * b""",
        lock={"norm": "torch.norm"},
    ),
    "NaN in gradients": program(
        """
h = z
for t in range(T):
    h = torch.where(x[:, t] > 0, h * torch.sqrt(x[:, t]), h + y[:, t])
return h""",
        (2, 64, 3),
    ),
    "a state that is given twice": program(
        """
h, outs = x.new_zeros(B, D), []
for t in range(T):
    h = h * b + y[:, t][0].expand(B, D)
    outs.append(h)
    outs.append(h.clone())
    x[:, t] = h
return torch.stack(outs, 1), h""",
        is_graded=False,
        lock={"scan": "lz.rolled_scan"},
    ),
    "results stacked without gradients": program("""
h, outs = z, []
for t in range(T):
    h = 0.5 * h + x[:, t]
    outs.append(h)
with torch.no_grad():
    return torch.stack(outs, 1), h"""),
    "a state that begins without gradient": program("""
h = torch.zeros_like(z)
with torch.no_grad():
    for t in range(T):
        h = 0.5 * h + x[:, t]
return h, h * b"""),
    "a state that is overwritten by one without gradient": program("""
h = z
for t in range(T):
    h = 0.5 * h.detach() + x[:, t].detach()
return h, h * b"""),
    "a loop under autocast": program(
        """
h, outs = torch.zeros_like(z), []
with torch.autocast("cpu", dtype=torch.bfloat16):
    for t in range(T):
        h = torch.tanh(x[:, t] @ w + h @ w)
        outs.append(h)
return torch.stack(outs, 1), h""",
        dtype="float32",
    ),
    "an affine loop under autocast": program(
        """
h, outs = torch.zeros_like(z), []
with torch.autocast("cpu", dtype=torch.bfloat16):
    for t in range(T):
        h = 0.5 * h + x[:, t] @ w
        outs.append(h)
return torch.stack(outs, 1), h""",
        dtype="float32",
    ),
    "a transposed state": program("""
h = torch.zeros(D, B, dtype=x.dtype).t()
for t in range(T):
    h = 0.5 * h + x[:, t].t().contiguous().t()
return h"""),
    "top-p with equal scores": program(
        """
p = z.round()
ordered, places = torch.sort(p, descending=True)
dropped = ordered.softmax(-1).cumsum(-1) > 0.6
dropped[..., 1:] = dropped[..., :-1].clone()
dropped[..., 0] = False
return p.masked_fill(dropped.scatter(-1, places, dropped), -torch.inf)""",
        (3, 2, 257),
        roles="constant",
        dtype="float32",
        lock={"sampling": "torch.sampling"},
    ),
    "top-p from below with equal scores": program(
        """
p = z.round()
ordered, places = torch.sort(p, dim=-1, descending=False)
dropped = ordered.softmax(-1).cumsum(-1) <= 0.4
dropped[..., -1:] = 0
return p.masked_fill(dropped.scatter(-1, places, dropped), -torch.inf).softmax(-1)""",
        (3, 2, 257),
        roles="constant",
        dtype="float32",
        lock={"sampling": "torch.sampling"},
    ),
    "a chunked scan over infinities and NaN": program(
        """
h, outs = torch.zeros_like(z), []
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + x[:, t]
    outs.append(h)
return torch.stack(outs, 1)""",
        (2, 33, 3),
        inputs="special({})",
        lock={"scan": "lz.chunked_scan"},
    ),
    "a piece that is returned is a view": program(
        """
h = torch.zeros_like(z)
for t in range(T):
    h = h * 0.5 + y[:, t]
    v = x[:, t]
    v.copy_(h)
return x[:, T // 2], h""",
        roles="constant",
    ),
    "the last of transposed states is overwritten, and read through a view": program(
        """
h = z
for t in range(T):
    h = torch.tanh(x[:, t].t().contiguous().t() + h @ w)
h.add_(1)
return h[:1], h""",
        is_graded=False,
    ),
    "transposed states with gradients": program("""
h = z
for t in range(T):
    h = x[:, t].t().contiguous().t() + h @ w
return h[:1], h"""),
    "a piece is added to without gradients": program("""
h, o, outs = z, torch.zeros_like(x), []
for t in range(T):
    h = F.layer_norm(h + y[:, t], (D,))
    o[:, t] = h + 0.5
    v = o[:, t]
    with torch.no_grad():
        v.add_(h)
    outs.append(v)
return outs[-1], h"""),
    "what a step reads detached": program("""
h = torch.ones_like(z)
for t in range(T):
    h = torch.tanh(x[:, t] + h) + y[:, t] * torch.tanh(y[:, t] @ m.w + m.g).detach()
return h"""),
    "what a backward pass may need is overwritten": program(
        """
h, outs = z.clone(), []
for t in range(T):
    h = 3 * h + y[:, t]
    outs.append(h)
y.select(1, T - 1).add_(-0.3)
h[(outs[0] - x[:, 0]) > 0] = 0.9
return outs[1], h""",
        (2, 16, 3),
        lock={"scan": "lz.associative_matrix_scan"},
    ),
    "one of two results has a gradient": program("""
h, outs = torch.ones_like(z), []
for t in range(T):
    h = torch.tanh(h + h @ w.detach())
    outs.append(h * y[:, t])
return h, torch.stack(outs, 1)"""),
    "a vmap beside what is written in place": program("""
v = torch.vmap(lambda p, q: p * q + torch.tanh(p), in_dims=1)(x[:, 0], x[:, 1])
m.scale.add_(0.5)
return v"""),
    "a state that is selected away takes its NaN along": program(
        """
v = torch.cat([z[:, None] * torch.nan, x[:, 1:].abs()], 1)
h = z
for t in range(T):
    h = torch.where(v[:, t] > 0, v[:, t] * torch.sqrt(v[:, t]), h + v[:, t])
return h""",
        roles="constant",
        lock={"scan": "lz.associative_matrix_scan"},
    ),
    "the last state and the same without gradient": program("""
h = b.expand(B, -1).t().contiguous().t()
for t in range(T):
    h = 0.1 * h + y[:, t]
return h.detach(), h"""),
    "a state of one row begins as a copy of a slice": program(
        """
h, outs = x[:, -1].clone(), []
for t in range(T):
    h = torch.maximum(h, y[:, t].flip(-1))
    outs.append(h)
return h, torch.stack(outs, 1)""",
        (1, 8, 4),
        roles="constant",
    ),
    "views whose base is written to after the loop": program("""
rows = [s.squeeze(1) for s in y.split(1, 1)]
h = z
for t in range(T):
    h = torch.sigmoid(rows[t]) * h + z
y[:, -1].copy_(z)
return h"""),
    "what is joined and read by nobody": program(
        """
h, outs = torch.ones_like(z), []
for t in range(T):
    h = F.silu(h + y[:, t])
    outs.append((h[:, None] @ k)[:, 0])
joined = torch.stack(outs, 1)
return h""",
        roles="leaf",
    ),
    "a last state without gradients is written to with them": program(
        """
h = torch.zeros_like(z)
with torch.no_grad():
    for t in range(T):
        h = torch.lerp(h, y[:, t] - z, 0.1)
h.copy_(x[:, 1])
return h""",
        (2, 16, 1),
        lock={"scan": "lz.associative_matrix_scan"},
    ),
    "zero times a weight": program(
        """
h = 0.0 * m.scale
for t in range(T):
    h = h * b + F.rms_norm(y[:, t], (D,))
return h""",
        lock={"norm": "torch.norm"},
    ),
    "two equal attentions, one of which is overwritten": program(
        """
p = torch.softmax(x @ x.transpose(1, 2) * 0.3, -1) @ x
q = torch.softmax(x @ x.transpose(1, 2) * 0.3, -1) @ x
p.add_(1)
return p, q""",
        is_graded=False,
        lock={"attention": "lz.blocked"},
    ),
    "two equal attentions, the first of them without gradients": program(
        """
s = torch.tanh(y)
with torch.no_grad():
    p = torch.softmax(s @ s.transpose(1, 2) / D ** 0.5, -1) @ s
return p, torch.softmax(s @ s.transpose(1, 2) / D ** 0.5, -1) @ s""",
        lock={"attention": "lz.blocked"},
    ),
    "a state that is zero, and what moves on is only added to it": program(
        """
h, outs = z.t().contiguous().t(), []
o = torch.zeros_like(x)
for t in range(T):
    h = h - h
    o[:, t].add_(h)
    outs.append(h)
return o, h, torch.stack(outs, 1)""",
        lock={"scan": "lz.rolled_scan"},
    ),
    "a norm beside what cancels out": program(
        "return torch.lerp(x, F.rms_norm(y, (D,)) * b, 1)", lock={"norm": "torch.norm"}
    ),
    "memory with a gradient, all of which is stored over before it is read": program(
        """
o, h = y.flip(1) * m.w[0], x[:, 0]
for t in range(T):
    o[:, t] = h * m.g
    h = h * x[:, t] + o[:, t].tanh()
return h""",
        roles="constant",
        loops="keep",
    ),
    "memory that has a gradient since the first step": program("""
h, o = torch.ones_like(z).detach(), x.detach()
for t in range(T):
    h = 0.5 * h + o[:, t]
    o[:, t] = z + z
return h, o"""),
    "zeros that have a gradient since the first step": program("""
h, o = torch.ones_like(z).detach(), torch.zeros_like(x)
for t in range(T):
    h = 0.5 * h + o[:, t]
    o[:, t] = z + z
return h"""),
    "memory with a gradient that is stored over twice before it is read": program(
        """
o, h = y.flip(1) * m.w[0], x[:, 0]
for t in range(T):
    o[:, t] = y[:, t]
    o[:, t] = y[:, t] * m.g
    h = h * x[:, t] + o[:, t]
return h""",
        roles="constant",
    ),
    "a piece is scaled in place inside of a mode": program(
        """
h, o = z, x.new_empty(B, T, D).fill_(0.5)
for t in range(0, T, 2):
    with torch.inference_mode(False):
        h = torch.tanh(o[:, t] + h @ w)
        o[:, t].copy_(o[:, t - 1] * 0.5 + h)
        o[:, t].mul_(h)
return h""",
        loops="keep",
    ),
    "a state without gradient beside a root of negative numbers": program(
        """
h = torch.ones_like(z)
for t in range(T):
    h = torch.tanh(0.5 * h.detach() @ w + torch.where(z > 0, y[:, t] * torch.sqrt(x[:, t]), y[:, t]))
return h, h * b""",
        lock={"scan": "inductor"},
    ),
    "a maximum of what is overwritten in place afterwards": program(
        """
x[:, 1:] = y[:, :-1]
h = torch.zeros(B, D, dtype=x.dtype)
for t in reversed(range(T)):
    h = torch.maximum(h, h @ w.T).clone()
    h[:, 0] = y[:, t - 1][:, 0]
    x[:, t].mul_(h)
return x, h""",
        (2, 8, 1),
        is_graded=False,
    ),
    "a state of one row begins as a slice, sizes are symbols": program(
        """
h = y[:, 1]
for t in range(T):
    h = h + z
return h""",
        (1, 7, 2),
        is_dynamic=True,
    ),
    "what a state is added to cancels out": program(
        """
h = torch.zeros_like(z)
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + (x[:, t] - x[:, t])
return h""",
        roles="leaf",
        lock={"scan": "lz.rolled_scan"},
    ),
    "what is not finite cancels out of what a state is added to": program(
        """
h = torch.zeros_like(z)
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + torch.lerp(x[:, t], z, 1)
return h""",
        roles="constant",
        inputs="special({})",
        lock={"scan": "lz.rolled_scan"},
    ),
    "a vmap of a view whose base is written to later": program("""
rows = x.unbind(1)
v = torch.vmap(lambda a: torch.tanh(a))(rows[0])
x.add_(x)
v = v * 0.1
return v, x"""),
    "a transformer layer of a transposed input": program(
        "return m.layer(x)", (2, 8, 4), roles="constant", inputs="transposed(torch.randn({}))", is_graded=False
    ),
    "memory like an input that was written to in place": program(
        """
x += -0.3
h, o = x[:, 0], torch.zeros_like(x)
for t in range(0, T, 2):
    h = torch.sigmoid(h) * h + o[:, T - 1 - t]
    o[:, t] = h
z[:] = 0.9
return o, h"""
    ),
    "rows stacked without gradients are stored into with them": program("""
h, outs = z.clone(), []
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + x[:, t]
    outs.append(h)
with torch.no_grad():
    o = torch.stack(outs, 1)
o[:, 0] = h
return o"""),
    "what is stored and what is stacked are two tensors": program(
        """
h, outs, o = z, [], torch.zeros_like(x)
for t in range(T):
    h = h * (b > 0) + x[:, T - 1 - t]
    outs.append(h.clone())
    o[:, t] = h
return torch.stack(outs, 1), o""",
        roles="constant",
        is_graded=False,
    ),
    "what repeats elements is stored, read back and transposed": program(
        """
y[:, 0] = z.sum(1, True).expand(B, D)
h = y[:, 0]
o = (h.t() * 0.9).t() + y[:, 1]
return o""",
        roles="made",
        is_graded=False,
    ),
    "a state of width one was scaled through a transpose": program(
        """
z.t().mul_(0.1)
z += y.select(1, -1)
h = z
for t in range(T):
    h = torch.sigmoid(x[:, t].cumsum(-1) * 0.5) * h + y[:, t]
return h""",
        size=(4, 9, 1),
        is_graded=False,
        loops="roll",
        lock={"scan": "inductor"},
    ),
    "a last state is what contiguous has nothing to do for": program(
        """
h, outs = z.t().contiguous().t(), []
for t in range(T):
    h = (h.t() * float(t)).t() + torch.maximum(x[:, t], y[:, t])
    outs.append(h.clone())
return h, h.t().contiguous().t()""",
        is_graded=False,
        loops="roll",
    ),
    "a last state is returned with its data": program(
        """
h = z
for t in range(T):
    h = torch.sigmoid(y[:, t]) * h + x[:, t]
return h, h.data""",
        lock={"scan": "lz.associative_scan"},
    ),
    "a tuple that each step makes is made behind the loop as well": program("""
h, last = z, None
for t in range(T):
    last = torch.broadcast_tensors(h, h)[0]
    h = torch.sigmoid(y[:, t]) * h + x[:, t]
return h, last, torch.broadcast_tensors(h, h)[0]"""),
    "rows of what lies transposed are flattened in each step": program(
        """
h = x[:, 0]
for t in range(T):
    h = torch.maximum(h, x[:, t].flatten(0, 1).view(B, D))
return h""",
        size=(2, 8, 2),
        inputs="transposed(torch.randn({}))",
        roles="constant",
        is_graded=False,
        lock={"scan": "inductor"},
    ),
    "what is stored over is read of no step after all": program(
        """
h = z * 1
o = torch.zeros(B, T, D, dtype=x.dtype)
for t in range(T):
    h = h + torch.sigmoid(torch.cat([y[:, t - 1][:, :1], h[:, 1:]], -1)) * (o[:, t] - h)
    h = h + w[0] * x[:, t].detach()
    o[:, t] = h
    o[:, t].copy_(m.w.T[(x[:, t, 0] > 0).long()])
return h""",
        size=(2, 17, 2),
    ),
    "a piece is written to again behind a write to all of the tensor": replace(
        program("""
h, outs, o = torch.zeros_like(z), [], y
for t in range(T):
    h = torch.maximum(h.detach() * 0.5 + o[:, t], z)
    v = o[:, t]
    v += h
    o.mul_(0.5)
    outs.append(v)
with torch.no_grad():
    outs[1].add_(m.scale.expand(B, D))
return h"""),
        roles={name: "leaf" if name == "z" else "constant" for name in "xyzbwk"},
    ),
    "rows that a loop read are overwritten behind it": program(
        """
h = x[:, -1].contiguous()
for t in range(1, T):
    h = h @ m.w
    h = torch.sigmoid(x[:, t]) * h + x[:, t]
x[:, 2] += h""",
        size=(4, 6, 4),
        roles="constant",
        loops="roll",
    ),
    "a layer without gradients of a batch of one": program(
        "with torch.no_grad():\n    return m.layer(x[:, :])",
        size=(1, 5, 6),
        inputs="transposed(torch.randn({}))",
    ),
    "a layer without gradients in a program with them": program("with torch.no_grad():\n    return m.layer(x)"),
    "a last state that nobody reads, and infinities in the steps before it": program(
        """
h = c = torch.zeros_like(x[:, 0])
for t in range(T):
    h, c = c.tanh() + x[:, t] * y[:, t], h.tanh()
return h""",
        (4, 8, 2),
        inputs="special({})",
    ),
}


@pytest.mark.parametrize("name", CORPUS)
def test_what_once_went_wrong_is_right(name: str):
    verdict = check(CORPUS[name])
    assert verdict.is_run, "the program fails eagerly"
    assert verdict.finding is None, verdict.finding.text()


def test_what_autograd_keeps_of_a_piece_that_is_overwritten_is_kept():
    body = """
h, o = z, x.new_empty(B, T, D).fill_(0.5)
for t in range(T):
    h = torch.tanh(h @ w)
    o[:, t].mul_(h)
return h, o"""
    verdict = check(program(body, loops="keep"))
    assert verdict.finding is None, verdict.finding.text()
    assert verdict.edits["forward_stores"]
    assert not any(name.startswith("refuted") for name in verdict.edits)


def test_what_is_filled_in_every_step_of_layers_keeps_its_gradient():
    body = """
h, o = z.t().contiguous().t(), y.clone()
for layer in range(4):
    for t, r in enumerate(reversed(y.unbind(1))):
        h = 2.0 * h + (y[:, t] + r).tanh() * 2
        o[:, t] = 3 * y[:, t].flip(-1)
return o, h"""
    verdict = check(program(body, (1, 7, 4)))
    assert verdict.finding is None, verdict.finding.text()
    assert verdict.edits["rolled" if SCANS_TAKE_COUNTERS else "loops kept"]
    assert not any(name.startswith("refuted: rolling") for name in verdict.edits)


def test_what_shares_memory_is_left_without_a_trial():
    verdict = check(CORPUS["a view of what a loop wrote is written to and returned"])
    assert verdict.finding is None
    assert not any(name.startswith("refuted") for name in verdict.edits)


@pytest.mark.parametrize("row", ["x[:, t] * w[0]", "h"])
def test_a_tensor_has_its_gradient_of_rows_that_are_stored_over(row: str):
    text = f"""
h, o, rows = z, torch.zeros_like(x), []
for t in reversed(range(T)):
    h = h * 0.5 + x[:, t]
    o[:, t] = {row}
    rows.append(o[:, t - 1].tanh())
    o[:, t] = y[:, t].detach()
return o[:, 1:], rows[-1]"""
    verdict = check(program(text))
    assert verdict.finding is None, verdict.finding.text()
    assert not any(name.startswith("refuted") for name in verdict.edits)


def test_steps_that_read_nothing_that_moves_on_are_rolled():
    verdict = check(program("h = z\nfor t in range(T):\n    h = torch.sigmoid(b) * h + 3 * h\nreturn h"))
    assert verdict.finding is None, verdict.finding.text()
    assert verdict.edits["rolled" if SCANS_TAKE_COUNTERS else "loops kept"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_programs_compute_what_eager_does(first: int):
    verdicts = [check(generate(seed)) for seed in range(first, first + CHUNK)]
    failed = [verdict.finding.text() for verdict in verdicts if verdict.finding is not None]
    assert not failed, "\n\n".join(failed)
    assert any(verdict.is_run and verdict.edits for verdict in verdicts), "nothing was rewritten"


def test_most_random_programs_are_loops():
    assert sum("for t" in generate(seed).source for seed in range(200)) > 100


def test_a_seed_gives_the_same_program_again():
    assert generate(5) == generate(5)
    assert generate(5).text() != generate(6).text()


def test_every_random_program_is_python():
    for seed in range(200):
        ast.parse(generate(seed).source)


def test_a_failing_program_is_made_smaller_while_it_fails():
    def check_for_sqrt(candidate: Program) -> Verdict:
        fails = "sqrt" in candidate.source
        return Verdict(True, Finding(candidate, {"value:": ""}, [], Counter()) if fails else None)

    failing = program("h = z + 1\nfor t in range(T):\n    h = torch.sqrt(h) + x[:, t]\nreturn h, x * 2")
    found = shrink(Finding(failing, {"value:": ""}, [], Counter()), check=check_for_sqrt)
    assert "sqrt" in found.program.source
    assert len(found.program.source) < len(failing.source) / 2


def test_bfloat16_is_held_against_float64():
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    eager = (exact + 0.05).bfloat16()
    for error, is_right in ((0.1, True), (-0.1, True), (1.0, False)):  # eager errs by as much on the other side
        text = difference((exact + error).bfloat16(), eager, exact, 0.01, Open())
        assert (not text) == is_right, text


def test_more_is_allowed_where_eager_has_rounding_alone():
    exact = torch.linspace(1, 2, 100)
    noise, other = exact * 4, exact * -20
    assert not difference(other, noise, exact.double(), 0.01, Open())
    assert difference(3 * other, noise, exact.double(), 0.01, Open())
    assert difference(other, exact, exact.double(), 0.01, Open())


def test_a_view_that_aotautograd_hands_out_is_none_of_ours():
    """Behind the kernel comes a last state that is a view, and needs no gradient in a graph that has some."""
    text = """
h = x.new_zeros(B, D)
for t in range(T):
    h = torch.lerp(h, x[:, t], 0.1)
o = x + w[0]
torch._dynamo.graph_break()
h.copy_(o[:, 0])
return h"""
    found = program(text, roles="constant", lock={"scan": "lz.associative_scan"})
    verdict = check(replace(found, roles={**found.roles, "w": "made"}))
    assert verdict.is_run
    assert verdict.edits["kernel scan"]
    assert verdict.finding is None, verdict.finding.text()


NAN_BEHIND_A_MASK = """
s = x @ x.transpose(1, 2) + {}
return s.softmax(-1) @ y"""


@pytest.mark.parametrize("mask", ["torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)", "x.new_zeros(T, T)"])
def test_numbers_for_the_nan_of_a_key_are_right_only_behind_an_added_mask(mask: str):
    options = {"roles": "constant", "inputs": "special({})", "lock": {"attention": "lz.blocked"}}
    verdict = check(program(NAN_BEHIND_A_MASK.format(mask), **options))
    assert verdict.is_run
    assert verdict.edits["kernel attention"]
    assert verdict.finding is None, verdict.finding.text()
    numbers, nan = torch.ones(3), torch.full((3,), torch.nan)
    assert difference(numbers, nan, None, 1e-6, Open())
    assert not difference(numbers, nan, None, 1e-6, Open(nan=True))
    assert difference(nan, numbers, None, 1e-6, Open(nan=True))


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="eager PyTorch refuses the program, too")
def test_what_is_overwritten_between_graphs_is_pytorchs_to_refuse():
    text = """
p = F.scaled_dot_product_attention(y, torch.softmax(y.roll(1, 1), 1), x.detach())
torch._dynamo.graph_break()
y[:, 0] = 1
return p, y"""
    verdict = check(program(text, lock={"attention": "lz.blocked"}))
    assert verdict.is_run
    assert verdict.edits["kernel attention"]
    assert verdict.is_torchs
    assert verdict.finding is None
