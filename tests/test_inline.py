"""Attention calls spelled out: what is replaced, what it computes, and what is refused."""

import functools
import math
import runpy
import warnings

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting, traces_the_fast_path
from torch import nn

import lz_compile as lz
from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.inlining import attention_calls
from lz_compile.passes.inlining.attention_calls import BODIES, multi_head_attention
from lz_compile.passes.inlining.inline import Inlined, _difference, inline
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.match import Match

EMBED, HEADS, BATCH, QUERIES, KEYS = 24, 3, 2, 6, 9
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Recorder:
    """A backend that inlines and runs the graph as it is, remembering everything."""

    def __init__(self):
        self.found, self.recognised, self.graphs = [], [], []

    def __call__(self, module, _inputs):
        before = set(module.graph.nodes)
        self.found += inline(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append(module.graph)
        self.recognised += recognisers()["attention"](module.graph, Effects(module.graph))
        for node in set(module.graph.nodes) - before:
            assert {"example_value", "stack_trace"} <= node.meta.keys(), node
        return module.forward

    @property
    def calls_left(self):
        return [node for graph in self.graphs for node in graph.nodes if node.target in BODIES]

    def targets(self, name):
        return [n for graph in self.graphs for n in graph.nodes if getattr(n.target, "__name__", n.target) == name]


def run(function, *args, dynamic=None, **kwargs):
    """What eager and the inlined graph give (tuples of tensors), and the recorder."""
    torch._dynamo.reset()
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = function(*args, **kwargs)
        given = torch.compile(function, backend=recorder, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    return expected, given, recorder


def check(function, *args, count=1, **kwargs):
    """Everything was inlined, is recognised as attention, and equals eager."""
    expected, given, recorder = run(function, *args, **kwargs)
    assert [type(found) for found in recorder.found] == count * [Inlined], recorder.found
    assert not recorder.calls_left
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert given.stride() == expected.stride()
    misses = [str(found.reason) for found in recorder.recognised if not isinstance(found, Match)]
    assert not misses
    assert len(recorder.recognised) == count
    return recorder


def attention(need_weights=False, **options):
    """A module whose weights are not read, with biases that are not zero."""
    torch.manual_seed(1)
    module = nn.MultiheadAttention(EMBED, HEADS, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)

    def call(query, key, value, **masks):
        return module(query, key, value, need_weights=need_weights, **masks)[0]

    call.module = module
    return call


def tokens(length=QUERIES, features=EMBED, batch=BATCH, dtype=torch.float32, batch_first=False):
    shape = (batch, length) if batch_first else (length, batch)
    return torch.randn(*shape, features, dtype=dtype)


def causal(length=QUERIES):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_self_attention_is_inlined(need_weights, batch_first, bias):
    call = attention(need_weights, batch_first=batch_first, bias=bias)
    x = tokens(batch_first=batch_first)
    recorder = check(call, x, x, x)
    assert len(recorder.targets("scaled_dot_product_attention")) == (not need_weights)
    assert len(recorder.targets("linear")) == 2  # one packed projection and that of the output


@pytest.mark.parametrize("need_weights", [False, True])
def test_cross_attention_projects_keys_and_values_together(need_weights):
    memory = tokens(KEYS)
    recorder = check(attention(need_weights), tokens(), memory, memory)
    assert len(recorder.targets("linear")) == 3


def test_three_different_inputs_are_projected_separately():
    assert len(check(attention(), tokens(), tokens(KEYS), tokens(KEYS)).targets("linear")) == 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kdim", "vdim"), [(10, 14), (24, 14), (10, 10)])
def test_separate_key_and_value_sizes(kdim, vdim, bias):
    check(attention(kdim=kdim, vdim=vdim, bias=bias), tokens(), tokens(KEYS, kdim), tokens(KEYS, vdim))


def masks_2d():
    return torch.rand(QUERIES, KEYS) > 0.5


def masks_3d():
    return torch.rand(BATCH * HEADS, QUERIES, KEYS) > 0.5


def padding():
    return torch.arange(KEYS) >= torch.tensor([[KEYS - 3], [KEYS]])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("mask", [None, masks_2d, masks_3d])
def test_masks_of_all_kinds(need_weights, is_float, has_padding, mask):
    torch.manual_seed(2)
    masks = {}
    if mask is not None:
        masks["attn_mask"] = mask()
        masks["attn_mask"][..., 3, :] = True  # a row without keys: NaN through softmax, zero through SDPA
    if has_padding:
        masks["key_padding_mask"] = padding()
    if is_float:
        masks = {name: torch.randn(m.shape).masked_fill(m, -math.inf) for name, m in masks.items()}
    memory = tokens(KEYS)
    check(attention(need_weights), tokens(), memory, memory, **masks)


def functional(call):
    """The module's parameters through the function itself, whose masks may be bool."""
    module = call.module

    def function(query, key, value, **options):
        weights = (module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0)
        out = (module.out_proj.weight, module.out_proj.bias)
        return F.multi_head_attention_forward(query, key, value, EMBED, HEADS, *weights, *out, **options)[0]

    return function


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", [None, masks_2d, masks_3d])
@pytest.mark.parametrize("has_padding", [False, True])
def test_bool_masks_of_the_function(need_weights, mask, has_padding):
    masks = {} if mask is None else {"attn_mask": mask()}
    if has_padding:
        masks["key_padding_mask"] = padding()
    check(functional(attention()), tokens(), tokens(KEYS), tokens(KEYS), need_weights=need_weights, **masks)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_the_causal_hint_replaces_the_mask_where_torch_lets_it(need_weights, has_padding):
    x = tokens()
    masks = {"attn_mask": causal(), "is_causal": True}
    if has_padding:
        masks["key_padding_mask"] = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
        masks["key_padding_mask"][0, -1] = True
    recorder = check(attention(need_weights), x, x, x, **masks)
    is_causal = [node.args[5] for node in recorder.targets("scaled_dot_product_attention")]
    assert is_causal == ([] if need_weights else [not has_padding])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", [None, (QUERIES, QUERIES), (HEADS, QUERIES, QUERIES)])
def test_unbatched_inputs(need_weights, mask):
    x = torch.randn(QUERIES, EMBED)
    masks = {} if mask is None else {"attn_mask": torch.rand(mask) > 0.6}
    masks["key_padding_mask"] = torch.arange(QUERIES) > 3
    check(attention(need_weights), x, x, x, **masks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_other_dtypes(dtype, need_weights):
    call = attention(need_weights)
    call.module.to(dtype)
    x = tokens(dtype=dtype)
    check(call, x, x, x, attn_mask=causal())


@pytest.mark.parametrize("need_weights", [False, True])
def test_an_autocast_region(need_weights):
    call = attention(need_weights)

    def function(x, mask):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x, x, x, attn_mask=mask)

    recorder = check(function, tokens(), causal())
    assert recorder.targets("linear")[0].meta["example_value"].dtype == torch.bfloat16


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_gradients_equal_those_of_float64(need_weights, has_mask):
    call = attention(need_weights)
    call.module.train()
    masks = {"attn_mask": torch.zeros(QUERIES, KEYS).masked_fill(causal(KEYS)[:QUERIES], -math.inf)} if has_mask else {}
    x, memory = tokens(), tokens(KEYS)

    def gradients(function, module, dtype):
        leaves = [x.to(dtype).requires_grad_(), memory.to(dtype).requires_grad_(), *module.to(dtype).parameters()]
        output = function(leaves[0], leaves[1], leaves[1], **{name: mask.to(dtype) for name, mask in masks.items()})
        return torch.autograd.grad(output.square().sum(), leaves)

    expected = gradients(call, call.module, torch.float64)
    torch._dynamo.reset()
    recorder = Recorder()
    given = gradients(torch.compile(call, backend=recorder, fullgraph=True), call.module, torch.float32)
    assert [type(found) for found in recorder.found] == [Inlined]
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_draws_what_eager_draws(need_weights):
    call = attention(need_weights, dropout=0.4)
    call.module.train()

    def function(x):
        return call(x, x, x)

    x = tokens()
    torch.manual_seed(3)
    expected = function(x)
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, fullgraph=True)
    compiled(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), expected)
    assert not recorder.calls_left


@pytest.mark.sampled
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("has_masks", [False, True])
def test_dynamic_batch_and_lengths(need_weights, has_masks):
    call = attention(need_weights, batch_first=True)
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=recorder, fullgraph=True, dynamic=True)
    for batch, queries, keys in ((4, 6, 9), (5, 11, 7), (3, 13, 8)):
        x, memory = tokens(queries, batch=batch, batch_first=True), tokens(keys, batch=batch, batch_first=True)
        masks = {}
        if has_masks:
            masks = {"attn_mask": torch.rand(batch * HEADS, queries, keys) > 0.5}
            masks["key_padding_mask"] = torch.arange(keys).expand(batch, keys) > 4
        expected = call(x, memory, memory, **masks)
        torch.testing.assert_close(compiled(x, memory, memory, **masks), expected, equal_nan=True)
    assert [type(found) for found in recorder.found] == [Inlined], recorder.found
    assert [type(found) for found in recorder.recognised] == [Match], recorder.recognised


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda function: torch.func.grad(lambda x: function(x).sum())])
@pytest.mark.parametrize(
    "call", [F.scaled_dot_product_attention, nn.MultiheadAttention(EMBED, 4).requires_grad_(False)]
)
def test_calls_inside_of_a_transform_stay_and_are_told(call, transform):
    def first(x):
        found = call(x, x, x)
        return found[0] if isinstance(found, tuple) else found

    x = torch.randn(3, 5, 2, EMBED) if transform is torch.func.vmap else torch.randn(5, 2, EMBED)
    report = lz.explain(transform(first), x, print_report=False)
    assert [(miss.op, miss.reason.code) for miss in report.near_misses] == [("attention", "FUNCTION_TRANSFORM")]
    assert not report.matches
    assert not report.graphs[0].events


def encoder_layer(**options):
    torch.manual_seed(4)
    options = {"batch_first": True, "dropout": 0.0} | options
    return nn.TransformerEncoderLayer(EMBED, 4, 40, **options)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_transformer_encoder(is_training):
    model = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False).train(is_training)
    check(model, tokens(batch_first=True), count=2)


@pytest.mark.sampled
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": padding()}, {"mask": causal(KEYS)}])
def test_the_fast_path_of_a_transformer_encoder(norm_first, activation, masks):
    layer = encoder_layer(norm_first=norm_first, activation=activation)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        recorder = check(model, tokens(KEYS, batch_first=True), count=2, **masks)
    assert {found.call for found in recorder.found} == {"_transformer_encoder_layer_fwd"}
    assert len(recorder.targets("scaled_dot_product_attention")) == (0 if masks else 2)


@traces_the_fast_path
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_fast_path_with_dynamic_sizes(dtype):
    layer = encoder_layer().eval().to(dtype)
    with torch.no_grad():
        check(layer, tokens(batch=5, batch_first=True, dtype=dtype), dynamic=True)


@pytest.mark.parametrize(("mask_type", "shape"), [(None, None), (0, (5, 5)), (1, (2, 5)), (2, (2, HEADS, 5, 5))])
def test_the_native_attention_call(mask_type, shape):
    module = attention().module
    mask = None if shape is None else torch.rand(shape) > 0.6

    def function(x):
        weights = (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
        return torch._native_multi_head_attention(x, x, x, EMBED, HEADS, *weights, mask, False, True, mask_type)[0]

    with torch.no_grad():
        check(function, tokens(5, batch_first=True))


@pytest.mark.parametrize("is_training", [False, True])
def test_a_transformer_decoder_layer(is_training):
    model = nn.TransformerDecoderLayer(EMBED, HEADS, 40, dropout=0.0, batch_first=True).train(is_training)
    target, memory = tokens(batch_first=True), tokens(KEYS, batch_first=True)
    masks = {"tgt_mask": causal(), "tgt_is_causal": True, "memory_key_padding_mask": padding()}
    check(model, target, memory, count=2, **masks)


# ---- refusals ----------------------------------------------------------------------------------------------------------


def refused(function, *args, **kwargs):
    expected, given, recorder = run(function, *args, **kwargs)
    torch.testing.assert_close(given, expected)
    assert len(recorder.calls_left) == 1
    (miss,) = recorder.found
    assert miss.op == "attention"
    assert miss.reason.code == "MHA_CALL_NOT_INLINED"
    assert miss.where.split(":")[0] == __file__
    return miss.reason.message


def test_used_weights_are_refused():
    module = attention().module
    x = tokens()
    assert refused(lambda x: module(x, x, x), x) == "its attention weights are used"


@pytest.mark.parametrize(
    ("options", "name"), [({"add_bias_kv": True}, "bias_k"), ({"add_zero_attn": True}, "add_zero_attn")]
)
def test_appended_keys_are_refused(options, name):
    x = tokens()
    assert refused(attention(**options), x, x, x) == f"{name} adds or replaces keys and values after their projection"


def test_given_keys_are_refused():
    call, x = functional(attention()), tokens()
    static = torch.randn(BATCH * HEADS, QUERIES, EMBED // HEADS)
    text = refused(call, x, x, x, static_k=static, static_v=static)
    assert text == "static_k adds or replaces keys and values after their projection"


def test_a_causal_hint_without_its_mask_is_refused():
    x, weight = tokens(), torch.randn(3 * EMBED, EMBED)
    options = {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0, "out_proj_bias": None}
    with pytest.raises(RefusedError, match="is_causal is a hint about attn_mask, and there is none"):
        multi_head_attention(x, x, x, EMBED, HEADS, weight, None, out_proj_weight=weight, is_causal=True, **options)


def test_a_native_mask_of_unknown_type_is_refused():
    module, mask = attention().module, torch.rand(BATCH, HEADS, 5, 5) > 0.6

    def function(x):
        weights = (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
        return torch._native_multi_head_attention(x, x, x, EMBED, HEADS, *weights, mask, False, True)[0]

    with torch.no_grad():
        assert refused(function, tokens(5, batch_first=True)) == "mask_type None of a mask is not documented"


def test_inlining_twice_changes_nothing():
    x = tokens()
    _, _, recorder = run(attention(True), x, x, x)
    (graph,) = recorder.graphs
    before = str(graph)
    assert inline(graph) == []
    assert str(graph) == before


@pytest.fixture
def wrong_body(monkeypatch):
    """A spelling of the fast path that is one percent off."""
    right = BODIES[torch._transformer_encoder_layer_fwd]

    @functools.wraps(right)
    def wrong(*args, **kwargs):
        return right(*args, **kwargs) * 1.01

    monkeypatch.setitem(BODIES, torch._transformer_encoder_layer_fwd, wrong)
    _difference.cache_clear()
    yield
    _difference.cache_clear()


@traces_the_fast_path
@pytest.mark.usefixtures("wrong_body")
def test_a_wrong_spelling_is_an_event_and_changes_nothing():
    with events.collect() as seen, torch.no_grad():
        expected, given, recorder = run(encoder_layer().eval(), tokens(batch_first=True))
    torch.testing.assert_close(given, expected)
    assert len(recorder.calls_left) == 1
    assert not recorder.targets("linear"), "what was emitted is erased again"
    assert [event.code for event in seen] == ["INLINE_FAILED"]
    assert "the output in torch.float64 is off by" in seen[0].message


@traces_the_fast_path
@pytest.mark.usefixtures("wrong_body")
def test_a_wrong_spelling_raises_if_strict():
    def backend(module, _inputs):
        with pytest.raises(RewriteFailedError, match="is off by"):
            inline(module.graph, strict=True)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(encoder_layer().eval(), backend=backend)(tokens(batch_first=True))


def test_a_torch_that_is_written_otherwise_costs_the_spelling_and_not_the_import(monkeypatch):
    known, seen = F.multi_head_attention_forward, []

    @functools.wraps(known)
    def wrapped(*args, **kwargs):
        return known(*args, **kwargs)

    def backend(module, _inputs):
        with monkeypatch.context() as patch, events.collect() as happened:
            patch.setattr(F, "multi_head_attention_forward", wrapped)
            patch.delattr(F, "_in_projection_packed")
            runpy.run_path(attention_calls.__file__)
            assert not inline(module.graph)
        seen.extend(happened)
        assert any(node.target is known for node in module.graph.nodes)
        return module.forward

    x = tokens()
    torch._dynamo.reset()
    torch.compile(attention(), backend=backend)(x, x, x)
    assert [event.code for event in seen] == ["INLINE_FAILED"]


@traces_the_fast_path
def test_a_structure_is_proven_once():
    _difference.cache_clear()
    model = nn.TransformerEncoder(encoder_layer(), 4, enable_nested_tensor=False).eval()
    with torch.no_grad():
        check(model, tokens(batch_first=True), count=4)
    assert _difference.cache_info().misses == 1


def test_a_module_that_forms_its_weights_is_spelled_out_at_dynamic_sizes():
    module, backend = nn.MultiheadAttention(6, 2, batch_first=True), Rewriting()
    compiled = torch.compile(lambda x: module(x, x, x)[0], backend=backend, dynamic=True)
    for x in (torch.randn(2, 2, 6), torch.randn(3, 5, 6)):
        torch.testing.assert_close(compiled(x), module(x, x, x)[0])
    assert not backend.report.events
    assert {match.op for match in backend.report.matches if match.rewritten} == {"attention"}, backend.why_not()
