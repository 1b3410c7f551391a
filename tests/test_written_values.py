"""What is written in place, ahead of all recognisers: ops in any such spelling are read, and nobody sees another value."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

from lz_compile.runtime.policy import policy

SIZE = 32


def rms_norm(x: Tensor, y: Tensor) -> Tensor:
    """Augmented assignments."""
    row = x * 1.0
    row *= torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6)
    row *= y[0]
    return row


def layer_norm(x: Tensor, y: Tensor) -> Tensor:
    """Methods, the statistic too, and a sum into a copy."""
    row = x - x.mean(-1, keepdim=True)
    row.mul_(row.pow(2).mean(-1, keepdim=True).add_(1e-5).rsqrt_())
    out = y[1].expand_as(row).clone()
    return out.addcmul_(row, y[0])


def given_outputs(x: Tensor, y: Tensor) -> Tensor:
    """Memory that is handed in."""
    out = torch.empty_like(x)
    torch.mul(x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), out=out)
    torch.mul(out, y[0], out=out)
    return out


def rotation(x: Tensor, y: Tensor) -> Tensor:
    """A product, and the rotated one added to it."""
    first, second = x.chunk(2, -1)
    return (x * y.cos()).addcmul_(torch.cat((-second, first), -1), y.sin())


def rotated_halves(x: Tensor, y: Tensor) -> Tensor:
    """Halves that are overwritten by views of them, as in flash-attn."""
    x, cos, sin = x * 1.0, y.cos()[..., : SIZE // 2], y.sin()[..., : SIZE // 2]
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    turned = first * cos - second * sin, first * sin + second * cos
    first.copy_(turned[0])
    second.copy_(turned[1])
    return x


def attention_by_views(x: Tensor, y: Tensor) -> Tensor:
    """Scores that are masked in another shape, and by an index that is a mask of two dimensions."""
    q = x.view(2, 2, 4, SIZE)
    scores = q @ q.mT
    scores.view(4, 4, 4).mul_(0.25)
    scores[:, :, torch.ones(4, 4).triu(1).bool()] = -torch.inf
    return scores.softmax(-1) @ q


def gated(x: Tensor, y: Tensor) -> Tensor:
    """An activation that is multiplied where it is."""
    gate = F.linear(x, y)
    hidden = gate.sigmoid()
    hidden.mul_(gate).mul_(F.linear(x, y * 2))
    return F.linear(hidden, y)


SPELLINGS: dict[Callable[..., Tensor], str] = {
    rms_norm: "norm",
    layer_norm: "norm",
    given_outputs: "norm",
    rotation: "rope",
    rotated_halves: "rope",
    attention_by_views: "attention",
    gated: "mlp",
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A tensor of 16 rows, and 32 other ones."""
    torch.manual_seed(0)
    return torch.randn(16, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)


def compiled(function: Callable[..., Any], *given: Tensor) -> tuple[Rewriting, Any]:
    """The backend, and what it gives."""
    torch._dynamo.reset()
    backend = Rewriting()
    result = torch.compile(function, backend=backend, fullgraph=True)(*(each.clone() for each in given))
    assert not [event for event in backend.report.events if event.code != "MACHINE_BUSY"], backend.why_not()
    return backend, result


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda function: function.__name__)
def test_an_op_that_is_computed_in_place_is_recognised(function: Callable[..., Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, y = inputs(dtype)
        y = y[:16] if SPELLINGS[function] == "rope" else y
        backend, found = compiled(function, x, y)
        torch.testing.assert_close(found, function(x.clone(), y.clone()))
        assert SPELLINGS[function] in [match.op for match in backend.report.matches], backend.why_not()
        assert not backend.report.near_misses


# ---- lookalikes ------------------------------------------------------------------------------------------------------


def half_of_a_wider_sum(x: Tensor, y: Tensor) -> Any:
    """In place, a sum has the dtype of what it is added to."""
    half = x.half()
    half += y[0].double()
    half.mul_(y[1].float())
    return half.softmax(-1), half


def views_taken_before(x: Tensor, y: Tensor) -> Any:
    """All of them see what is written, by whichever name it is."""
    base = x * 2
    turned, flat, corner = base.t(), base.view(-1), base[2:, 1:]
    turned.mul_(2)
    corner += 1
    flat.neg_()
    return base.softmax(-1), turned, corner, flat


def read_before(x: Tensor, y: Tensor) -> Any:
    """What was computed of it keeps the old value."""
    base = x * 2
    old = base.exp()
    base.zero_()
    return old, base, old.softmax(-1)


def copied_from_itself(x: Tensor, y: Tensor) -> Any:
    """A piece of the same memory, moved."""
    base = x * 2
    base[:, 1:3] = base[:, 3:5].clone()
    base[1:4].copy_(base[4:7])
    return base.softmax(-1)


def an_input_through_a_view(x: Tensor, y: Tensor) -> Any:
    """The caller sees it."""
    x[2:].mul_(2)
    x.t().add_(1)
    return x.softmax(-1)


def what_is_copied_is_overwritten(x: Tensor, y: Tensor) -> Any:
    """A copy is none of what comes later."""
    source, target = x * 2, torch.empty_like(x)
    target.copy_(source)
    source.add_(1)
    return target.softmax(-1), source


def every_other_column(x: Tensor, y: Tensor) -> Any:
    """A view with gaps, and one of that."""
    base = x * 2
    part = base[:, ::2]
    turned = part.t()
    part.neg_()
    turned[1:] += 1
    return base.softmax(-1), turned


def eval_dropout(x: Tensor, y: Tensor) -> Any:
    """It gives its input back, which Dynamo does not note."""
    base = x * 2
    alias = F.dropout(base, 0.5, training=False)
    alias.add_(1)
    base.mul_(3)
    return alias.softmax(-1), base


def reshaped_in_place(x: Tensor, y: Tensor) -> Any:
    """The tensor itself is another one."""
    base = x * 2
    base.mul_(2).t_()
    base.add_(1)
    return base.softmax(-1), base


def reshaped_once_read(x: Tensor, y: Tensor) -> Any:
    """Who read it before saw another shape than Dynamo notes, and so did what it is a view of."""
    base = x * 2
    base += 1
    turned = base.t()
    part = y * 1.0
    part[:, :16] = turned
    turned.unsqueeze_(0)
    base.t().unsqueeze_(0)
    other = base * 3
    other += y[:16]
    base.unsqueeze_(1)
    return other.softmax(-1), part, turned, base


def turned_once_rotated(x: Tensor, y: Tensor) -> Any:
    """Of a square, only strides tell that it was turned in place after it was read."""
    square = x[:, :16] * 1.0
    first, second = square.chunk(2, -1)
    rotated = square * y[:16, :16].cos() + torch.cat((-second, first), -1) * y[:16, :16].sin()
    late = rotated * 2
    rotated.unsqueeze_(0)
    square.t_()
    return rotated, late, square


def without_gradients_in_between(x: Tensor, y: Tensor) -> Any:
    """What is written keeps the gradient of before."""
    base = x * 2
    with torch.no_grad():
        base.mul_(3)
    return base * y[:16], base.detach().softmax(-1)


def half_detached(x: Tensor, y: Tensor) -> Any:
    """A view without a gradient, which is written to."""
    base = x * 2
    base.detach()[1:].mul_(2)
    return base + y[:16], base.detach().softmax(-1)


def returned_beside_a_view_of_what_is_written_to(x: Tensor, y: Tensor) -> Any:
    """Rows apart, of one memory that whoever calls sees by both."""
    base = x * 1.5
    row, others = base[0], base[1::2]
    shown = row[1:]
    row.mul_(2)
    return others, shown, x.softmax(-1)


def every_second_row_of_every_third_column(x: Tensor, y: Tensor) -> Any:
    """Pieces of pieces, by methods, operators and stores."""
    base = x.tanh()
    rows = base[:, 1::3]
    rows[::2].mul_(y[:8, :11])
    base[1::2] += 1
    rows[1::2] = base[::2, ::3]
    base.unflatten(1, (-1, 2))[..., 1].neg_()
    return base.softmax(-1)


def filled_by_what_has_a_gradient(x: Tensor, y: Tensor) -> Any:
    """Memory without a gradient has one once something with one is written to it."""
    out, early = torch.zeros_like(y[:16]), []
    early.append(out + 1)
    out.add_(x.tanh())
    out[1:] += y[:15]
    return out * out, early[0].softmax(-1)


def filled_in_place_and_forgotten(x: Tensor, y: Tensor) -> Any:
    """What stays written in place gives it a gradient, too, before all of it is overwritten: one of zeros."""
    out = torch.empty_like(x)
    out[:, :1] = y[:16, :1]
    out[:, 1:] = x[:, 1:]
    out[1:] = out[:-1] * 2
    out.zero_()
    return out.softmax(-1), x * 2


def an_expansion(x: Tensor, y: Tensor) -> Tensor:
    base = x * y[0]
    base[:1].expand(4, -1).masked_fill_(base[:1].expand(4, -1) > 0, 0.25)
    return base.sin()


def stored_with_a_new_dimension(x: Tensor, y: Tensor) -> Tensor:
    base = x * y[0]
    base[2][None] = y[:1]
    base[3, 4][None] = y[1, :1]
    return base.sin()


LOOKALIKES = (
    half_of_a_wider_sum,
    views_taken_before,
    read_before,
    copied_from_itself,
    an_input_through_a_view,
    what_is_copied_is_overwritten,
    every_other_column,
    eval_dropout,
    reshaped_in_place,
    reshaped_once_read,
    without_gradients_in_between,
    half_detached,
    returned_beside_a_view_of_what_is_written_to,
    every_second_row_of_every_third_column,
    filled_by_what_has_a_gradient,
    filled_in_place_and_forgotten,
    an_expansion,
    stored_with_a_new_dimension,
)


def outcome(function: Callable[..., Any], with_grad: bool) -> tuple[Any, ...]:
    """Results, whose memory is whose, inputs afterwards, and gradients."""
    given = [each.requires_grad_(with_grad) for each in inputs()]
    handed = [each.clone() for each in given]
    found = function(*handed)
    found = found if isinstance(found, tuple) else (found,)
    memory = [each.untyped_storage()._cdata for each in found]
    shared = [[one == other for other in memory] for one in memory]
    strides = [(each.stride(), each.requires_grad) for each in found]
    weighed = [(each.double() * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in found]
    loss = sum(weighed)
    gradients = torch.autograd.grad(loss, given, allow_unused=True) if with_grad else ()  # type: ignore[call-overload]
    return [each.detach() for each in found], shared, strides, [each.detach() for each in handed], gradients


@pytest.mark.parametrize("with_grad", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("function", LOOKALIKES, ids=lambda function: function.__name__)
def test_what_is_seen_by_other_names_is_what_eager_gives(function: Callable[..., Any], with_grad: bool) -> None:
    backend = Rewriting()
    torch._dynamo.reset()
    try:
        expected = outcome(function, with_grad)
    except RuntimeError as error:
        assert with_grad
        assert "does not require grad" not in str(error)  # noqa: PT017  the source itself has no gradient
        return
    found = outcome(torch.compile(function, backend=backend, fullgraph=True), with_grad)
    rough = {"rtol": 1e-2, "atol": 1e-2} if function is half_of_a_wider_sum else {}
    torch.testing.assert_close(found, expected, equal_nan=True, **rough)
    assert not [event for event in backend.report.events if event.code != "MACHINE_BUSY"], backend.why_not()


# ---- random programs ---------------------------------------------------------------------------------------------------

VIEWS = (
    ".t()",
    "[1:]",
    "[:, 1:3]",
    "[0]",
    ".mT",
    "[:, ::2]",
    ".unsqueeze(1)",
    ".reshape(-1)",
    ".chunk(2, 0)[1]",
    "[...]",
)
WRITES = (
    "{0}.add_({1})",
    "{0} *= {1}",
    "{0}.sub_({1})",
    "{0}.copy_({1})",
    "{0}.tanh_()",
    "{0}.masked_fill_({0} > 1, 0.25)",
    "{0}[...] = {1}",
    "{0}[{0} < -1] = 0.5",
    "{0}.addcmul_({0}, {1}, value=0.5)",
    "torch.add({0}, {1}, out={0})",
    "{0}.zero_()",
    "{0}[1:] = {0}[:-1] * 2",
    "{0}[-1:].neg_()",
    "{0}[0] = {1}[0]",
)


def program(seed: int) -> str:
    """Lines that make tensors and views of them, write to any of these, and read others."""
    draw = random.Random(seed)
    shapes = {"a": (4, 6), "b": (4, 6)}
    lines = ["a = x * 1.5", "b = y.tanh()"]
    tensor = torch.empty(4, 6)
    values = {"a": tensor, "b": tensor}
    for _ in range(draw.randint(6, 12)):
        name = draw.choice([*shapes])
        if draw.random() < 0.35:
            new, views = f"t{len(shapes)}", VIEWS if len(shapes[name]) == 2 else VIEWS[1:2] + VIEWS[-1:]
            view = draw.choice(views)
            made = eval(f"value{view}", {"value": values[name]})
            if made.dim() and made.numel() > 1 and made.shape[0] > 1:
                lines.append(f"{new} = {name}{view}")
                values[new], shapes[new] = made, tuple(made.shape)
        elif draw.random() < 0.75:
            others = [other for other, shape in shapes.items() if shape == shapes[name]]
            lines.append(draw.choice(WRITES).format(name, draw.choice(others)))
        else:
            new = f"t{len(shapes)}"
            lines.append(f"{new} = {name}.softmax(-1) - {name}")
            values[new], shapes[new] = torch.empty(shapes[name]), shapes[name]
    chosen = draw.sample([*shapes], min(4, len(shapes)))
    body = "\n    ".join([*lines, f"return {', '.join(chosen)}, x.softmax(-1)"])
    return f"def function(x, y):\n    {body}\n"


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_give_what_eager_gives(seed: int, tmp_path: Any) -> None:
    file, names = tmp_path / "program.py", {"torch": torch}
    file.write_text(program(seed))
    exec(compile(file.read_text(), str(file), "exec"), names)
    function, given = names["function"], [each[:4, :6] for each in inputs()]
    torch._dynamo.reset()
    backend = Rewriting()
    with torch.no_grad():
        try:
            expected = function(*(each.clone() for each in given))  # type: ignore[operator]
        except RuntimeError as error:
            assert "single memory location" in str(error)  # noqa: PT017  a piece of itself is written to a tensor
            return
        found = torch.compile(function, backend=backend)(*(each.clone() for each in given))  # type: ignore[call-overload]
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    numbers = [[each.untyped_storage()._cdata for each in side] for side in (found, expected)]
    assert len({*zip(*numbers, strict=True)}) == len({*numbers[0]}) == len({*numbers[1]})
    assert not [event for event in backend.report.events if event.code not in ("MACHINE_BUSY", "EDIT_UNPROVEN")]


def test_what_lays_out_all_that_follows_is_written_in_place_still() -> None:
    """A pyramid's top is one pixel, whose strides say in which order the next level lies; operators give it others."""
    top, level = torch.empty_strided((2, 16, 1, 1), (16, 1, 16, 16)).normal_(), torch.randn(2, 16, 2, 2)

    def pyramid(x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(F.group_norm(x, 4), inplace=True)
        down = F.interpolate(x, size=(2, 2), mode="nearest")
        down += y
        return down.flatten(2).softmax(-1)

    torch._dynamo.reset()
    backend = Rewriting()
    with torch.no_grad():
        found, expected = torch.compile(pyramid, backend=backend)(top, level), pyramid(top, level)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert not [event for event in backend.report.events if event.code != "MACHINE_BUSY"]


def test_a_rotation_of_what_is_turned_afterwards_is_a_near_miss() -> None:
    policy.prefer("torch.rope")
    torch._dynamo.reset()
    backend = Rewriting()
    with torch.no_grad():
        found = torch.compile(turned_once_rotated, backend=backend)(*inputs())
    torch.testing.assert_close(found, turned_once_rotated(*inputs()))
    assert "OPERAND_RESHAPED" in [miss.reason.code for miss in backend.report.near_misses]
    assert [reason.code for reason in backend.report.unproven] == ["OPERAND_RESHAPED"], "the graph was not edited"


def test_what_a_dropout_passes_on_may_be_scaled_in_place() -> None:
    """As a layer's scale in DINOv2: Dynamo notes other memory for it, and for all that is made of it in place."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        scaled = F.dropout(F.linear(x, y), 0.1, training=False).mul_(y[0])
        return F.layer_norm(x + scaled, (SIZE,)) + scaled

    given = inputs()
    backend, found = compiled(function, *given)
    torch.testing.assert_close(found, function(*given))
    assert "mul_" not in [node.target for node in backend.graphs[0].graph.nodes]


def test_a_piece_of_every_second_element_is_a_value() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        base = x.tanh()
        base[:, 1::3][::2].mul_(2)
        base[1::2] = y[1:16:2]
        return base.softmax(-1)

    torch._dynamo.reset()
    backend = Rewriting()
    torch.testing.assert_close(torch.compile(function, backend=backend)(*inputs()), function(*inputs()))
    code = str(backend.graphs[0].graph)
    assert "slice_scatter" in code
    assert "target=mul_]" not in code
    assert "setitem" not in code


def test_values_are_given_where_strides_are_symbolic() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        row = x + y
        row *= torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6)
        return row

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        wide = [torch.arange(4 * width).view(4, width).sin() for width in (40, 50, 60)]
        return [*(call(each[:, 3 : 3 + SIZE], torch.ones(SIZE)) for each in wide), *wide]

    backend = Rewriting(lock={"norm": "torch.norm"})
    torch.testing.assert_close(run(torch.compile(model, backend=backend)), run(model))
    assert [graph.matches[0].rewritten for graph in backend.report.graphs] == [True, True], backend.why_not()
    assert not backend.report.events, backend.why_not()


def test_what_is_written_in_place_may_have_no_elements() -> None:
    torch._dynamo.reset()
    backend = Rewriting()
    found = torch.compile(lambda x: torch.cat((x, x)).mul_(2), backend=backend, fullgraph=True)(torch.ones(0))
    assert not backend.report.events
    assert found.shape == (0,)


@pytest.mark.parametrize("columns", [1, 4])
def test_a_scatter_is_proven_where_zero_is_the_only_index(columns: int) -> None:
    """DeepSeek-V3 chooses one group of experts of one; a scatter raises no IndexError for another place."""

    def chosen(x: Tensor, places: Tensor) -> Tensor:
        return (torch.zeros_like(x).scatter_(1, places, 1) * x).sum(-1)

    torch._dynamo.reset()
    x, backend = torch.randn(3, columns), Rewriting(strict=True)
    given = x, x.topk(1, -1).indices
    torch.testing.assert_close(torch.compile(chosen, backend=backend, fullgraph=True)(*given), chosen(*given))
    assert not backend.report.unproven
