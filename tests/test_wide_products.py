"""Products and convolutions of 16 bits that a CPU would run in plain loops, computed in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.fx.experimental.proxy_tensor import make_fx

from lz_compile.lowering import inductor, wide_products
from lz_compile.lowering.wide_products import widen_products
from lz_compile.runtime.policy import policy
from lz_compile.runtime.policy.settings import Layer, Value

HALF = [torch.bfloat16, torch.float16]
WIDE, GROUPS = torch.ops.layerzero.wide_product_kernel.default, torch.ops.layerzero.wide_groups_kernel.default
KERNELS = {WIDE: wide_products._wide_product, GROUPS: wide_products._wide_groups}


@pytest.fixture(autouse=True)
def looped(monkeypatch):
    """Every processor has loops for 16 bits here, and all products are worth it."""
    monkeypatch.setattr(wide_products, "is_looped", lambda dtype: dtype in HALF)
    monkeypatch.setattr(wide_products, "_LEAST", 1)


def widened(function: Any, *inputs: Any, mode: str = "fake") -> tuple[Any, list[str]]:
    """What a function's graph gives after it was widened, and what it calls then."""
    module = make_fx(function, tracing_mode=mode)(*inputs)
    widen_products(module.graph)
    module.graph.lint()
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    for target, kernel in KERNELS.items():
        for call in module.graph.find_nodes(op="call_function", target=target):
            call.target = kernel  # where the operator's kernel raises loops would complete it
    module.recompile()
    return module(*inputs), names


def assert_rounded_once(found: torch.Tensor, function: Any, *inputs: torch.Tensor) -> None:
    """Nothing but the order of sums may differ from the exact result."""
    exact = function(*(each.double() for each in inputs))
    assert found.dtype in HALF
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=eps / 2 + 1e-4, atol=1e-4 * exact.abs().max().item())


FORMS = {
    "mm": (lambda a, b: a @ b, [(9, 40), (40, 7)]),
    "linear": (F.linear, [(9, 40), (7, 40), (7,)]),
    "transposed": (lambda a, b: a.mT @ b, [(40, 9), (40, 7)]),
    "addmm of a row": (torch.addmm, [(7,), (9, 40), (40, 7)]),
    "addmm of a column": (torch.addmm, [(9, 1), (9, 40), (40, 7)]),
    "addmm of factors": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), [(9, 7), (9, 40), (40, 7)]),
    "bmm": (torch.bmm, [(3, 9, 40), (3, 40, 7)]),
    "bmm of keys": (lambda a, b: torch.bmm(a, b.mT), [(3, 9, 40), (3, 7, 40)]),
    "bmm of heads that lie apart": (
        lambda a, b: torch.bmm(a.transpose(0, 1), b.transpose(0, 1)), [(9, 3, 40), (40, 3, 7)]
    ),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.25), [(3, 9, 7), (3, 9, 40), (3, 40, 7)]),
    "baddbmm of one": (torch.baddbmm, [(1, 1, 7), (3, 9, 40), (3, 40, 7)]),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), [(3, 9, 40), (3, 7, 40)]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("piece", [1 << 20, 700, 1], ids=["whole", "parts", "rows and columns"])
@pytest.mark.parametrize("form", FORMS)
def test_products_are_summed_in_float32_and_rounded_once(form, piece, dtype, monkeypatch):
    monkeypatch.setattr(wide_products, "_PIECE", piece)
    monkeypatch.setattr(wide_products, "_ROWS", 4)
    monkeypatch.setattr(wide_products, "_COLUMNS", 3)
    function, shapes = FORMS[form]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    found, names = widened(function, *inputs)
    assert str(WIDE) in names
    assert not any(f"aten.{each}.default" in names for each in ("mm", "bmm", "addmm", "baddbmm"))
    assert_rounded_once(found, function, *inputs)


CONVOLUTIONS = {
    "one dimension": (lambda x, w, b: F.conv1d(x, w, b, padding=2), [(2, 6, 20), (8, 6, 3), (8,)]),
    "two": (lambda x, w, b: F.conv2d(x, w, b, stride=2), [(2, 6, 9, 9), (8, 6, 3, 3), (8,)]),
    "each channel by itself": (lambda x, w: F.conv1d(x, w, padding=3, groups=6), [(2, 6, 20), (6, 1, 4)]),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 6, 5, 5), (6, 4, 3, 3)]),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_convolutions_are_computed_in_float32(form, dtype):
    function, shapes = CONVOLUTIONS[form]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    found, names = widened(function, *inputs)
    assert "prims.convert_element_type.default" in names
    assert_rounded_once(found, function, *inputs)


@pytest.mark.parametrize("form", [*FORMS, *CONVOLUTIONS])
def test_backward_passes_are_too(form):
    function, shapes = {**FORMS, **CONVOLUTIONS}[form]
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]

    def gradients(*given: torch.Tensor) -> Any:
        leaves = [each.detach().requires_grad_() for each in given]
        return torch.autograd.grad(function(*leaves).sin().sum(), leaves)

    found, names = widened(gradients, *inputs)
    assert names.count(str(WIDE)) + names.count("aten.convolution_backward.default") in (1, 3)
    assert not any(f"aten.{each}.default" in names for each in ("mm", "bmm", "addmm", "baddbmm"))
    for ours, exact in zip(found, gradients(*(each.double() for each in inputs)), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())


GROUPED = {
    "rows": [(40, 16), (4, 16, 24)],
    "columns": [(4, 24, 16), (16, 40)],
    "sums": [(24, 40), (40, 16)],
}


@pytest.mark.parametrize("ends", [[8, 8, 30, 40], [0, 0, 0, 40], [1, 2, 3, 32]], ids=str)
@pytest.mark.parametrize("form", GROUPED)
def test_products_of_groups_are_summed_in_float32(form, ends):
    factors = [torch.randn(shape).bfloat16() for shape in GROUPED[form]]
    found, names = widened(torch._grouped_mm, *factors, torch.tensor(ends, dtype=torch.int32))
    assert names == [str(GROUPS)]
    parts = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
    left, right = (each.double() for each in factors)
    exact = {
        "rows": lambda: torch.cat([left[part] @ right[i] for i, part in enumerate(parts)]),
        "columns": lambda: torch.cat([left[i] @ right[:, part] for i, part in enumerate(parts)], -1),
        "sums": lambda: torch.stack([left[:, part] @ right[part] for part in parts]),
    }[form]()
    whole = found[: ends[-1]] if form == "rows" else found[:, : ends[-1]] if form == "columns" else found
    assert whole.shape == exact.shape
    assert_rounded_once(whole, lambda _: exact, whole)
    looped = wide_products._looped_groups(*factors, torch.tensor(ends))
    torch.testing.assert_close(looped, found, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("named", "count"), [({"offs": True}, 1), ({"out_dtype": torch.bfloat16}, 0), ({}, 0)], ids=str
)
def test_what_else_a_call_asks_for_stays_pytorchs_own(named, count):
    dims = 2 if "offs" in named else 3
    graph = torch.fx.Graph()
    shapes = [(4, 40, 16)[-dims:], (4, 16, 24), (4,)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    given = [graph.placeholder(f"x{i}") for i in range(3)]
    for node, tensor in zip(given, tensors, strict=True):
        node.meta["val"] = tensor
    named = {name: given[2] if name == "offs" else each for name, each in named.items()}
    call = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(given[:2]), named)
    widen_products(graph)
    assert (call.target is GROUPS) == bool(count)


@pytest.mark.parametrize(("dtype", "counts"), [(torch.bfloat16, [2, 3]), (torch.float16, [2, 0])], ids=str)
def test_experts_of_transformers_are_trained_with_such_products(dtype, counts):
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    experts = transformers.MixtralForCausalLM(config).to(dtype).model.layers[0].mlp.experts
    shares, places = torch.rand(48, 4).topk(2)
    x, seen = torch.randn(48, 32), []
    with torch._inductor.config.patch(
        post_grad_custom_post_pass=lambda graph: seen.append([str(node.target) for node in graph.nodes]),
        force_disable_caches=True,
    ):
        result = torch.compile(experts, backend="layerzero")(x.to(dtype), places, shares.to(dtype))
        result.float().square().sum().backward()
    assert [names.count(str(GROUPS)) for names in seen] == counts  # nobody asked for the gradient of the input
    exact = copy.deepcopy(experts).double()
    exact.zero_grad()
    exact.config._experts_implementation = "eager"
    exact(x.double(), places, shares.double()).square().sum().backward()
    for one, two in zip(experts.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad.double(), two.grad, rtol=0.05, atol=0.05 * two.grad.abs().max().item())


def test_sizes_may_be_symbols():
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(a @ b)

    a, b = torch.randn(9, 40).bfloat16(), torch.randn(40, 7).bfloat16()
    module = make_fx(product, tracing_mode="symbolic")(a, b)
    widen_products(module.graph)
    assert module.graph.find_nodes(op="call_function", target=WIDE)
    module.recompile()
    for rows in (1, 31):  # every call is asked whether it pays
        other = torch.randn(rows, 40).bfloat16()
        torch.testing.assert_close(module(other, b), product(other, b), rtol=1e-2, atol=1e-2)


def test_a_call_that_gains_nothing_is_pytorchs_own(monkeypatch):
    called = []
    monkeypatch.setattr(wide_products, "_looped", lambda *given: called.append(given) or torch.mm(*given[:2]))
    kept = torch.randn(700, 4000).bfloat16()
    wide_products._wide_product(torch.randn(8, 4000).bfloat16(), kept.mT, None, 1, 1)
    assert not called
    wide_products._wide_product(torch.randn(1, 4000).bfloat16(), kept.mT, None, 1, 1)
    assert called


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(value):
    a, b = torch.randn(9, 40).bfloat16(), torch.randn(40, 7).bfloat16()
    a[3, 5] = value
    found, _ = widened(torch.mm, a, b)
    torch.testing.assert_close(found, a @ b, equal_nan=True, rtol=1e-2, atol=1e-2)
    assert found[[0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()


def test_nothing_that_is_added_counts_by_a_factor_of_zero():
    c, a, b = torch.full((7,), float("nan")).bfloat16(), torch.randn(9, 40).bfloat16(), torch.randn(40, 7).bfloat16()
    found, _ = widened(lambda *given: torch.addmm(*given, beta=0), c, a, b)
    assert found.isfinite().all()


def test_no_rows_and_no_columns_give_what_the_product_gives(monkeypatch):
    for shapes in ([(0, 40), (40, 7)], [(9, 0), (0, 7)], [(9, 40), (40, 0)]):
        a, b = (torch.randn(shape).bfloat16() for shape in shapes)
        assert torch.equal(WIDE(a, b, None, 1, 1), a @ b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.randn(9, 400), torch.randn(400, 700)),
        (torch.randn(9, 4).bfloat16(), torch.randn(4, 7).bfloat16()),
        (torch.randn(2, 4000).bfloat16(), torch.randn(700, 4000).bfloat16().mT),
        (torch.randn(16, 1, 400).bfloat16(), torch.randn(16, 400, 700).bfloat16()),
        (torch.randn(16, 700, 400).bfloat16(), torch.randn(16, 400, 1).bfloat16()),
    ],
    ids=["float32", "little", "few rows of keys", "one row of each head", "one column of each head"],
)
def test_what_gains_nothing_stays(a, b, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(wide_products, "is_looped", lambda dtype: dtype in HALF)
    name = "mm" if a.dim() == 2 else "bmm"
    assert widened(getattr(torch, name), a, b)[1] == [f"aten.{name}.default"]


@pytest.mark.parametrize(("rows", "count"), [(16, 0), (128, 1)])
def test_groups_of_a_few_rows_stay(rows, count, monkeypatch):
    monkeypatch.setattr(wide_products, "_LEAST", 1 << 21)
    factors = torch.randn(rows, 512).bfloat16(), torch.randn(8, 512, 512).bfloat16().mT
    ends = torch.arange(1, 9, dtype=torch.int32) * (rows // 8)
    assert widened(torch._grouped_mm, *factors, ends)[1].count(str(GROUPS)) == count


def test_what_a_processor_has_instructions_for_stays(monkeypatch):
    monkeypatch.setattr(wide_products, "is_looped", lambda dtype: False)
    a, b = torch.randn(9, 400).bfloat16(), torch.randn(400, 700).bfloat16()
    assert widened(torch.mm, a, b)[1] == ["aten.mm.default"]


@pytest.mark.slow
def test_a_model_is_trained_with_such_products():
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(112, 8))
    model, x = model.bfloat16(), torch.randn(9, 4, 16).bfloat16()
    seen: list[list[str]] = []

    def look(graph: torch.fx.Graph) -> None:
        seen.append([str(node.target) for node in graph.nodes])

    with torch._inductor.config.patch(post_grad_custom_post_pass=look, force_disable_caches=True):
        other = copy.deepcopy(model)
        torch.compile(model, backend="layerzero")(x).float().square().sum().backward()
    other(x).float().square().sum().backward()
    forward, backward = seen
    assert str(WIDE) in forward
    assert backward.count(str(WIDE)) == 2
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0.05, atol=0.05 * two.grad.abs().max().item())


@pytest.mark.parametrize("setting", [("enabled", False), ("deterministic", "batch_invariant")])
def test_whoever_asks_for_inductors_code_or_for_bits_gets_loops(setting, monkeypatch):
    seen: list[bool] = []
    monkeypatch.setattr(inductor, "widen_products", lambda _: seen.append(True))
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        with policy.Override(Layer(values=(Value(*setting, "a test"),)), None):
            torch.compile(lambda x: (x @ x).sin(), backend="layerzero")(torch.randn(8, 8))
        assert not seen
        torch.compile(lambda x: (x @ x).cos(), backend="layerzero")(torch.randn(8, 8))
        assert seen


def test_what_is_measured_is_what_would_be_compiled(monkeypatch):
    widened_graphs = []
    monkeypatch.setattr(inductor, "widen_products", widened_graphs.append)
    with torch._inductor.config.patch(force_disable_caches=True):
        inductor.compile_apart(lambda x: x @ x, [torch.randn(8, 8)])
    assert widened_graphs


def test_factors_are_floats_for_c_plus_plus_that_passes_the_bits_of_numbers():
    inputs = [torch.randn(shape, dtype=torch.bfloat16) for shape in [(7,), (9, 40), (40, 7)]]
    module = make_fx(lambda c, a, b: torch.addmm(c, a, b, beta=2) @ b.mT, tracing_mode="fake")(*inputs)
    widen_products(module.graph)
    calls = module.graph.find_nodes(op="call_function", target=WIDE)
    assert [[(type(each), each) for each in call.args[3:]] for call in calls] == [
        [(float, 2.0), (float, 1.0)],
        [(float, 1.0)] * 2,
    ]


def test_groups_may_be_a_size():
    inputs = [torch.randn(shape, dtype=torch.bfloat16) for shape in [(2, 8, 20), (8, 1, 3)]]
    result, _ = widened(lambda x, weight: F.conv1d(x, weight, groups=x.shape[1]), *inputs, mode="symbolic")
    assert_rounded_once(result, lambda x, weight: F.conv1d(x, weight, groups=8), *inputs)
