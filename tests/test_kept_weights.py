"""Weights that are brought into the form of a kernel once for all calls, and every way in which they may change after that."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F

import lz_compile as lz
from lz_compile.lowering import kept
from lz_compile.lowering.ops import linear as op
from tests.backends import Rewriting, Traced
from tests.test_linear import words

pytestmark = pytest.mark.usefixtures("no_preference")
X = torch.randn(3, 32)
COLUMNS, OUT, GROUPS = 32, 16, 4
SHUFFLED = (torch.arange(COLUMNS) // 8)[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]


class Packed(torch.nn.Module):
    """As GPTQ stores a weight: eight numbers in a word, down a column, scales by an index of groups."""

    def __init__(self, index=None, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        index = torch.arange(COLUMNS) // 8 if index is None else index
        buffers = {
            "weight": words(torch.randint(0, 16, (OUT, COLUMNS))).T.contiguous(),
            "zeros": words(torch.randint(0, 16, (GROUPS, OUT))),
            "scales": torch.rand(GROUPS, OUT) * 0.05 + 0.01,
            "index": index.int(),
            "shifts": torch.arange(0, 32, 4, dtype=torch.int32)[None],
        }
        for name, each in buffers.items():
            self.register_buffer(name, each)

    def numbers(self):
        shifted = torch.bitwise_right_shift(self.weight.unsqueeze(1).expand(-1, 8, -1), self.shifts.unsqueeze(-1))
        return (shifted.to(torch.int16) & 15).reshape(COLUMNS, OUT)

    def forward(self, x):
        zeros = torch.bitwise_right_shift(self.zeros.unsqueeze(2).expand(-1, -1, 8), self.shifts.unsqueeze(0))
        zeros = (zeros.to(torch.int16) & 15).reshape(GROUPS, OUT)
        index = self.index.long()
        return x @ (self.scales[index] * (self.numbers() - zeros[index]))


class Apart(torch.nn.Module):
    """Numbers of eight bits whose rows lie apart, which the kernel would copy."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (COLUMNS, OUT), dtype=torch.int8))
        self.scales = torch.nn.Parameter(torch.rand(OUT))

    def forward(self, x):
        return x @ (self.weight.float() * self.scales)


def compiled(module, kind=Traced, **options):
    torch._dynamo.reset()
    backend = kind(lock={"linear": "lz.cpp_linear"}, **options)
    return torch.compile(module, backend=backend), backend


def is_kept(backend):
    return ["WEIGHT_KEPT" in {reason.code for reason in match.reasons} for match in backend.report.matches]


def agree(call, module, x=X):
    with torch.no_grad():
        torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-4)


def made(monkeypatch):
    """The texts by which something was made, in order."""
    texts, own = [], kept.function
    monkeypatch.setattr(kept, "function", lambda text: texts.append(text) or own(text))
    return texts


@pytest.mark.sampled
@pytest.mark.parametrize("index", [None, SHUFFLED, torch.arange(31, -1, -1) // 8, torch.arange(32) % 4], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_words_become_bytes_of_two_numbers_once_for_all_calls(index, rows, monkeypatch):
    module = Packed(index)
    call, backend = compiled(module)
    x = torch.randn(rows, COLUMNS)
    agree(call, module, x)
    (match,) = backend.report.matches
    assert (match.kernel, match.rewritten) == ("lz.cpp_linear", True), backend.why_not()
    assert match.attributes["packing"] == "low_half"
    assert match.attributes["has_order"] == (index is not None)
    assert "4 groups in a row" in match.context["features"]["groups"]
    (text,) = [each.message for each in match.reasons if each.code == "WEIGHT_KEPT"]
    assert "bytes, made once for all calls, are kept beside" in text
    texts = made(monkeypatch)
    agree(call, module, 2 * x)
    assert not texts


def renewed(module, name):
    return torch.randint_like(getattr(module, name), 2**30) if name != "scales" else torch.rand(GROUPS, OUT)


CHANGES = {
    "in place": lambda module, name: getattr(module, name).copy_(renewed(module, name)),
    "one number": lambda module, name: getattr(module, name)[1].add_(1),
    "a view of it": lambda module, name: getattr(module, name).T[-1:].add_(1),
    "other memory": lambda module, name: setattr(getattr(module, name), "data", renewed(module, name)),
    "behind autograd's back": lambda module, name: getattr(module, name).data.copy_(renewed(module, name)),
    "a row behind its back": lambda module, name: getattr(module, name).data[1].add_(1),
    "a column behind its back": lambda module, name: getattr(module, name).data[:, -1].add_(1),
    "another tensor": lambda module, name: setattr(module, name, renewed(module, name)),
    "a state": lambda module, name: module.load_state_dict({**module.state_dict(), name: renewed(module, name)}),
    "a state, assigned": lambda module, name: module.load_state_dict(
        {**module.state_dict(), name: renewed(module, name)}, assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_is_made_again(change):
    module = Packed(SHUFFLED)
    call, backend = compiled(module)
    agree(call, module)
    assert is_kept(backend) == [True]
    for name in ("weight", "zeros", "scales"):
        before = call(X)
        CHANGES[change](module, name)
        agree(call, module)
        assert not torch.equal(call(X), before)
        agree(call, module)


def test_an_index_of_groups_that_changes_is_another_order():
    module = Packed(SHUFFLED)
    call, _ = compiled(module)
    agree(call, module)
    for index in (SHUFFLED.flip(0), torch.arange(COLUMNS) // 8, torch.arange(COLUMNS) // 9, SHUFFLED):
        module.index.copy_(index)
        agree(call, module)


def test_layers_that_share_their_code_have_weights_of_their_own():
    layers = [Packed(SHUFFLED, seed) for seed in range(3)]
    torch._dynamo.reset()
    backend = Traced(lock={"linear": "lz.cpp_linear"})

    def call(layer, x):
        return layer(x)

    run = torch.compile(call, backend=backend)
    with torch.no_grad():
        for layer in (*layers, *layers[::-1]):
            torch.testing.assert_close(run(layer, X), layer(X), rtol=1e-5, atol=1e-4)
    assert is_kept(backend) == [True], "one compilation for all"


def test_equal_layers_are_one_region_that_keeps_each_of_their_weights():
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Packed(seed=seed) for seed in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = x + torch.relu(layer(torch.tanh(x) * 2).repeat(1, 2).sin().cos() + 1)
            return x

    module = Layers()
    call, backend = compiled(module, layers="fold")
    agree(call, module)
    assert is_kept(backend) == [True] * 6
    assert [each.folded for each in backend.report.layers] == [True], "one region"
    graphs = [each.graph for each in backend.graphs[0].modules() if isinstance(each, torch.fx.GraphModule)]
    assert not [node for graph in graphs for node in graph.nodes if "cpp_linear" in str(node.target)]
    module.layers[2].weight.bitwise_xor_(5)
    agree(call, module)


def test_only_weights_in_another_form_are_kept():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Packed(), Wrapped(int8, w=torch.randint(-9, 9, (OUT, OUT), dtype=torch.int8))

        def forward(self, x):
            return self.first(self.second(self.first(x)).repeat(1, 2))

    def int8(self, x):
        return F.linear(x, self.w.float())

    module = Both()
    call, backend = compiled(module)
    agree(call, module)
    assert is_kept(backend) == [True, False, True]
    calls = [node for node in backend.graphs[0].graph.nodes if "kept_call" in str(node.target)]
    assert len(calls) == 2


def test_what_is_kept_goes_with_the_weight():
    module = Apart()
    call, backend = compiled(module)
    agree(call, module)
    assert is_kept(backend) == [True]
    assert not backend.report.matches[0].attributes["is_transposed"]
    entries = kept._kept.get(module.weight)
    (values,) = [each.values for each in entries.values()]
    first = weakref.ref(values[0])
    torch._dynamo.reset()
    del module, call, backend, entries, values
    gc.collect()
    assert first() is None


def test_a_copy_of_a_model_has_weights_of_its_own():
    module = Packed()
    call, _ = compiled(module)
    agree(call, module)
    other = copy.deepcopy(module)
    other.weight.bitwise_xor_(3)
    agree(torch.compile(other, backend=Traced(lock={"linear": "lz.cpp_linear"})), other)
    agree(call, module)


def test_a_new_parameter_over_the_same_memory_is_another_one():
    """Its version counts anew, and may be that of the one before when it was looked at."""
    module = Packed()
    module.weight.add_(0)
    call, _ = compiled(module)
    agree(call, module)
    module.weight = module.weight.data
    module.weight[0, 3] += 1 << 20
    agree(call, module)


def test_threads_make_the_same():
    module = Packed(SHUFFLED)
    call, _ = compiled(module)
    agree(call, module)
    module.weight.bitwise_xor_(7)
    with torch.no_grad():
        expected, found = module(X), []
    threads = [threading.Thread(target=lambda: found.append(call(X))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-4)


def test_inference_mode_is_as_good_as_any():
    module = Packed(SHUFFLED)
    call, backend = compiled(module)
    with torch.inference_mode():
        torch.testing.assert_close(call(X), module(X), rtol=1e-5, atol=1e-4)
        module.weight.bitwise_xor_(9)
        torch.testing.assert_close(call(X), module(X), rtol=1e-5, atol=1e-4)
    assert is_kept(backend) == [True]
    agree(call, module)


def test_inductor_compiles_it():
    module = Packed(SHUFFLED)
    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(module, backend="layerzero", options={"layerzero.lock": {"linear": "lz.cpp_linear"}})
        agree(call, module)
        module.weight.bitwise_xor_(9)
        agree(call, module)
        report = lz.explain(module, X, print_report=False, options={"layerzero.lock": {"linear": "lz.cpp_linear"}})
    assert "WEIGHT_KEPT" in {reason.code for match in report.matches for reason in match.reasons}


# ---- what is not kept ------------------------------------------------------------------------------------------------


def test_a_user_may_say_that_nothing_is_kept():
    module = Packed()
    call, backend = compiled(module, keep_weights=False)
    agree(call, module)
    assert is_kept(backend) == [False]
    (reason,) = backend.report.matches[0].mask_reasons
    assert str(reason) == "[WEIGHT_UNPACKED] in every call: layerzero.keep_weights is off"


def in_every_call(module, why, *inputs):
    call, backend = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs), module(*inputs), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(call(*inputs), module(*inputs), rtol=1e-5, atol=1e-4)
    assert not any(is_kept(backend))
    told = [str(each) for match in backend.report.matches for each in match.mask_reasons]
    told += [str(each.reason) for each in backend.report.near_misses]
    assert any(why in each for each in told), told


class Wrapped(torch.nn.Module):
    def __init__(self, function, **buffers):
        super().__init__()
        self.function = function
        for name, each in buffers.items():
            self.register_buffer(name, each)

    def forward(self, *given):
        return self.function(self, *given)


W2 = torch.randint(0, 256, (OUT, COLUMNS // 4), dtype=torch.uint8)
P4 = torch.randint(0, 2**31, (OUT, COLUMNS // 8), dtype=torch.int32)
SHIFTS = torch.arange(0, 32, 4)


def unpacked(words_):
    return ((words_[:, :, None] >> SHIFTS) & 15).flatten(1)


def test_two_bits_would_take_more_than_twice_the_memory():
    def product(self, x):
        return F.linear(x, (((self.w[:, :, None] >> torch.arange(0, 8, 2)) & 3).flatten(1) - 1).float() * self.s)

    in_every_call(Wrapped(product, w=W2, s=torch.rand(OUT, 1)), "256 bytes beside 128 are more than twice as many", X)


def test_a_weight_that_is_given_is_unpacked_in_every_call():
    def product(self, x, w):
        return F.linear(x, unpacked(w).float() * self.s)

    in_every_call(Wrapped(product, s=torch.rand(OUT, 1)), "is no tensor of a module", X, P4)


@pytest.mark.parametrize("through", ["itself", "a view"])
def test_a_weight_that_the_graph_writes_to_is_none_to_keep(through):
    def product(self, x):
        found = F.linear(x, unpacked(self.w).float() * self.s)
        (self.w if through == "itself" else self.w.view(-1)[3:]).bitwise_xor_(3)
        return found

    module = Wrapped(product, w=P4.clone(), s=torch.rand(OUT, 1))
    call, backend = compiled(module)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(X), other(X), rtol=1e-5, atol=1e-4)
    assert not any(is_kept(backend))


def test_numbers_that_depend_on_the_input_are_none_to_keep():
    def product(self, x):
        return F.linear(x, (unpacked(self.w) & (x[0, 0] > 0).int() * 15).float() * self.s)

    module = Wrapped(product, w=P4, s=torch.rand(OUT, 1))
    call, backend = compiled(module)
    agree(call, module)
    agree(call, module, -X)
    assert not any(is_kept(backend))


def test_noise_is_none_to_keep():
    def product(self, x):
        return F.linear(x, ((unpacked(self.w) + torch.randint(0, 3, (OUT, COLUMNS))) & 15).float() * self.s)

    call, backend = compiled(Wrapped(product, w=P4, s=torch.rand(OUT, 1)))
    with torch.no_grad():
        assert not torch.equal(call(X), call(X))
    assert not any(is_kept(backend))


def test_weights_that_do_not_tell_of_writes_are_unpacked_in_every_call():
    with torch.inference_mode():
        module = Packed()
    call, backend = compiled(module)
    with torch.inference_mode():
        torch.testing.assert_close(call(X), module(X), rtol=1e-5, atol=1e-4)
        module.weight.bitwise_xor_(7)
        torch.testing.assert_close(call(X), module(X), rtol=1e-5, atol=1e-4)
    assert not any(is_kept(backend))


def test_scales_that_are_trained_have_their_gradients():
    module = Apart()
    call, _ = compiled(module, Rewriting)
    call(X).square().sum().backward()
    found, module.scales.grad = module.scales.grad, None
    module(X).square().sum().backward()
    torch.testing.assert_close(found, module.scales.grad)


# ---- orders of groups that are none ----------------------------------------------------------------------------------


def gathered_twice(self, x):
    return x @ (self.scales[self.index] * self.others[self.other] * (self.numbers & 15))


def gathered_and_in_a_row(self, x):
    return x @ (self.scales[self.index] * self.others.repeat_interleave(8, 0) * (self.numbers & 15))


def in_a_row_and_gathered(self, x):
    grouped = (self.numbers & 15).view(GROUPS, 8, OUT) * self.others[:, None]
    return x @ (grouped.view(COLUMNS, OUT) * self.scales[self.index])


def of_columns_too(self, x):
    return x @ (self.scales[self.index] * (self.numbers & 15) * self.column[:, None])


def indexed(index, function, other=SHUFFLED):
    torch.manual_seed(0)
    return Wrapped(
        function,
        numbers=torch.randint(0, 2**20, (COLUMNS, OUT)),
        scales=torch.rand(GROUPS, OUT),
        others=torch.rand(GROUPS, OUT),
        index=index,
        other=other,
        column=torch.rand(COLUMNS),
    )


LOOKALIKES = {
    "groups of unequal size": (indexed(torch.arange(COLUMNS) // 9, lambda m, x: x @ (m.scales[m.index] * (m.numbers & 15))), "groups of 5 to 9 columns"),
    "a group less": (indexed(torch.arange(COLUMNS) // 16, lambda m, x: x @ (m.scales[m.index] * (m.numbers & 15))), "groups that there are not"),
    "two orders": (indexed(SHUFFLED, gathered_twice, SHUFFLED.flip(0)), "NOT_DEQUANTISED"),
    "neighbours, too": (indexed(SHUFFLED, gathered_and_in_a_row), "NOT_DEQUANTISED"),
    "neighbours first": (indexed(SHUFFLED, in_a_row_and_gathered), "groups of 1 columns"),
    "columns, too": (indexed(SHUFFLED, of_columns_too), "NOT_DEQUANTISED"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKALIKES)
def test_orders_that_are_none_stay_what_they_are(name):
    module, why = LOOKALIKES[name]
    call, backend = compiled(module, Rewriting)
    with torch.no_grad():
        torch.testing.assert_close(call(X), module(X), rtol=0, atol=0)
    assert why in backend.why_not()


def test_two_indices_of_one_order_are_one():
    module = indexed(SHUFFLED, gathered_twice)
    call, backend = compiled(module, Rewriting)
    agree(call, module)
    assert not [match for match in backend.report.matches if match.rewritten and not match.attributes["has_order"]]


def test_numbers_of_eight_bits_may_be_in_another_order():
    def product(self, x):
        return x @ (self.s[self.index] * (self.w.float() - 3))

    w = torch.randint(-128, 128, (COLUMNS, OUT), dtype=torch.int8)
    module = Wrapped(product, w=w, s=torch.rand(GROUPS, OUT), index=SHUFFLED)
    call, backend = compiled(module)
    agree(call, module)
    assert is_kept(backend) == [True]
    assert backend.report.matches[0].attributes["has_order"]


def test_an_order_is_an_operand_like_any_other():
    x, weight = torch.randn(2, 8), torch.randint(-8, 8, (3, 8), dtype=torch.int8)
    given = op.Operands(x, weight, order=torch.arange(7, -1, -1))
    attrs, _ = op.from_operands(given, {"N": 2, "K": 8, "O": 3, "W": 8, "G": 1})
    torch.testing.assert_close(op.reference(given, attrs), x.flip(1) @ weight.float().t())
    with pytest.raises(lz.ArgumentError, match="expected order"):
        lz.which("linear", x, weight, order=torch.arange(7))


@pytest.mark.parametrize("index", [None, SHUFFLED], ids=["neighbours", "anywhere"])
def test_what_is_kept_lies_as_the_kernel_reads_it(index):
    module = Packed(index)
    call, backend = compiled(module)
    agree(call, module)
    assert is_kept(backend) == [True]
    made = [value for entries in kept._kept.values() for each in entries.values() for value in each.values]
    assert made
    assert all(value.is_contiguous() for value in made)


def test_an_index_of_groups_that_had_other_values_is_named_by_the_near_miss():
    torch._dynamo.reset()
    backend = Traced()
    for seed in range(3):
        index = SHUFFLED[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(seed))]
        module = Packed(index)
        agree(torch.compile(module, backend=backend), module)
    (miss,) = backend.report.near_misses
    assert miss.reason.code == "NOT_DEQUANTISED"
    assert "whose values are not known" in miss.reason.message
    assert "had other values in a call before" in miss.reason.message
