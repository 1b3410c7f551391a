"""What models do to norms, rotations and recurrences beside the plain form: read, or told with what stands in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import row_variants as variants
import torch
from attention_variants import Variant, normal, some
from backends import Rewriting
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LOCK = {"norm": "torch.norm", "rope": "torch.rope"}


def compiled(variant: Variant, *, is_trained: bool = False, is_dynamic: bool = False) -> Rewriting:
    """The backend after a compile whose results, and gradients, are those of eager mode."""
    torch._dynamo.reset()
    inputs = [each.detach().clone().requires_grad_(is_trained) for each in variant.inputs]
    if is_dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 0)
    backend, results = Rewriting(lock=LOCK), []
    for function in (torch.compile(variant.function, backend=backend, fullgraph=True), variant.function):
        outs = pytree.tree_leaves(function(*inputs))
        total = sum(out.square().sum() for out in outs)
        grads = torch.autograd.grad(total, inputs, allow_unused=True) if is_trained else ()
        results.append([*(out.detach() for out in outs), *(each for each in grads if each is not None)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    return backend


def rewritten(backend: Rewriting, op: str) -> list[bool]:
    """Of every match of an op, whether it was rewritten."""
    return [match.rewritten for match in backend.report.matches if match.op == op]


ROTATIONS = variants.rotations()


@pytest.mark.sampled
@pytest.mark.parametrize("name", some(ROTATIONS, 8, lambda name: name.startswith("small")))
@pytest.mark.parametrize("kind", ["static", "dynamic", "trained"])
def test_rotations_by_a_matrix_for_each_pair_are_embeddings(name: str, kind: str) -> None:
    backend = compiled(ROTATIONS[name], is_trained=kind == "trained", is_dynamic=kind == "dynamic")
    assert rewritten(backend, "rope") == [True], backend.why_not()


def _of_three(x: Tensor, matrices: Tensor) -> Tensor:
    """Features in threes, which no pair of tables turns."""
    return torch.einsum("spji,bhspi->bhspj", matrices, x.unflatten(-1, (-1, 3))).flatten(-2)


def _other_pairs(x: Tensor, matrices: Tensor) -> Tensor:
    """Every pair turned by the sum of all matrices' results: it is mixed with the others."""
    return torch.einsum("spji,bhsqi->bhsqj", matrices, x.unflatten(-1, (-1, 2))).flatten(-2)


def _pairs_of_tokens(x: Tensor, matrices: Tensor) -> Tensor:
    """Neighbouring tokens are turned into each other, all features alike."""
    return torch.einsum("tji,bhtid->bhtjd", matrices, x.unflatten(2, (-1, 2))).flatten(2, 3)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_of_three, [(2, 4, 7, 12), (7, 4, 3, 3)]),
        (_other_pairs, [(2, 4, 7, 12), (7, 6, 2, 2)]),
        (_pairs_of_tokens, [(2, 4, 8, 12), (4, 2, 2)]),
    ],
)
def test_products_with_matrices_that_turn_no_pairs_are_left_alone(
    function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    backend = compiled(Variant(function, tuple(normal(*shape) for shape in shapes)))
    assert not rewritten(backend, "rope")


class Turned(nn.Module):
    """A product with matrices that are a buffer."""

    def __init__(self, function: Callable[..., Tensor], matrix: Tensor) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("matrix", matrix.clone())

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        return self.function(x, self.matrix, *tables)


LARGE = {name: variant for name, variant in ROTATIONS.items() if not name.startswith("small")}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("kind", ["dynamic", "trained"])
def test_rotations_by_a_matrix_of_all_features_are_embeddings_where_its_values_are_known(name: str, kind: str) -> None:
    function, (x, matrix, *tables) = LARGE[name]
    turned = Variant(Turned(function, matrix), (x, *tables))
    backend = compiled(turned, is_trained=kind == "trained", is_dynamic=kind == "dynamic")
    assert rewritten(backend, "rope") == [True], backend.why_not()


@pytest.mark.parametrize("name", ["large-einsum-halves", "swapped-matmul-neighbours"])
def test_a_matrix_that_is_changed_later_is_read_again(name: str) -> None:
    function, (x, matrix, *tables) = LARGE[name]
    module = Turned(function, matrix)
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    run = torch.compile(module, backend=backend, fullgraph=True)
    torch.testing.assert_close(run(x, *tables), module(x, *tables))
    assert rewritten(backend, "rope") == [True], backend.why_not()
    with torch.no_grad():
        module.matrix[..., 0, 3] = 2.0
    torch.testing.assert_close(run(x, *tables), module(x, *tables))


def _moved(shift: int) -> Tensor:
    """[16, 16]: features that are moved round by some places."""
    return torch.eye(16).roll(shift, 0)


def _full(kind: str) -> Tensor:
    matrix = variants.large_matrices(False)
    matrix[..., 0, 3] = 0.5 if kind == "one entry more" else matrix[..., 0, 3]
    return matrix.flip(-1) if kind == "columns in reverse order" else matrix


@pytest.mark.parametrize(
    "kind", ["moved by one", "moved by half", "one entry more", "columns in reverse order", "given"]
)
def test_matrices_of_all_features_that_turn_no_pairs_or_are_not_known_are_left_alone(kind: str) -> None:
    function, (x, matrix, *tables) = LARGE[
        "swapped-matmul-halves" if kind.startswith("moved") else "large-einsum-halves"
    ]
    if kind == "given":
        backend = compiled(Variant(function, (x, matrix, *tables)))
    else:
        matrix = _moved(1) if kind == "moved by one" else _moved(4) if kind == "moved by half" else _full(kind)
        backend = compiled(Variant(Turned(function, matrix), (x, *tables)))
    assert not rewritten(backend, "rope")


RESIDUALS = variants.residuals()
SEVERAL = variants.several()


def _is_by_hand(name: str) -> bool:
    return ("rms-" in f"{name}-" and "F." not in name) or "-layer" in name


@pytest.mark.parametrize("name", some(RESIDUALS, 8, _is_by_hand))
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_norm_of_a_sum_is_one_whether_or_not_the_sum_goes_on(name: str, is_trained: bool) -> None:
    backend = compiled(RESIDUALS[name], is_trained=is_trained)
    assert rewritten(backend, "norm") == [True], backend.why_not()


@pytest.mark.parametrize("name", [name for name in SEVERAL if name.startswith("cat") and _is_by_hand(name)])
def test_a_norm_over_a_concatenation_is_one(name: str) -> None:
    backend = compiled(SEVERAL[name], is_trained=True)
    assert rewritten(backend, "norm") == [True], backend.why_not()


@pytest.mark.parametrize("name", [name for name in SEVERAL if name.partition("-")[0] in variants.NEVER_JOINED])
def test_a_norm_over_tensors_that_are_never_joined_is_told_once(name: str) -> None:
    backend = compiled(SEVERAL[name])
    (miss,) = backend.report.near_misses
    assert miss.reason.code == "SEVERAL_TENSORS"
    assert "normalise the concatenation" in miss.edit


def test_a_row_divided_by_the_root_mean_square_of_another_is_none_and_not_told() -> None:
    backend = compiled(SEVERAL["by_the_other"])
    assert not rewritten(backend, "norm")
    assert not backend.report.near_misses


SPACES = variants.log_space()


@pytest.mark.sampled
@pytest.mark.parametrize("name", some(SPACES, 17, lambda name: "segsum" not in name))
@pytest.mark.parametrize("is_trained", [False, True])
def test_recurrences_by_running_sums_are_scans(name: str, is_trained: bool) -> None:
    function, inputs = SPACES[name]
    exact = Variant(function, tuple(each.double() for each in inputs))  # eager gradients of logarithms are rough
    backend = compiled(exact, is_trained=is_trained)
    assert rewritten(backend, "scan") == [True], backend.why_not()
    assert "cumsum(" not in str(backend.graphs[0].graph) or name.startswith("triangle")


def _sums(gate: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(gate).cumsum(1)


#: One edit away from a recurrence.
NO_SPACES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of two decays": lambda x, gate: _sums(gate).exp() * (x * (-_sums(gate * 2)).exp()).cumsum(1),
    "of the decay twice": lambda x, gate: (2 * (s := _sums(gate))).exp() * (x * (-s).exp()).cumsum(1),
    "with the wrong sign": lambda x, gate: (s := _sums(gate)).exp() * (x * s.exp()).cumsum(1),
    "with logarithms that are scaled": lambda x, gate: ((s := _sums(gate)) + 2 * (x - s).logcumsumexp(1)).exp(),
    "turned over time": lambda x, gate: (s := _sums(gate)).flip(1).exp() * (x * (-s).exp()).cumsum(1),
}


@pytest.mark.parametrize("name", NO_SPACES)
def test_running_sums_that_are_no_recurrence_are_left_alone(name: str) -> None:
    function = NO_SPACES[name]
    backend = compiled(Variant(function, (normal(2, 16, 16), normal(2, 16, 16, seed=1))))
    assert not rewritten(backend, "scan")


@pytest.mark.parametrize("name", ["method-segsum", "torch-segsum"])
def test_recurrences_by_a_matrix_of_decays_are_told(name: str) -> None:
    backend = compiled(SPACES[name])
    assert [miss.reason.code for miss in backend.report.near_misses if miss.op == "scan"] == ["CHUNKED_ALREADY"]


STATES = variants.complex_states()
TOLD = {"complex": "COMPLEX_STATE", "viewed": "NOT_AFFINE", "matrices": "NOT_AFFINE"}


def test_a_complex_state_as_two_real_ones_is_a_scan() -> None:
    backend = compiled(STATES["pairs"])
    assert rewritten(backend, "scan") == [True], backend.why_not()


@pytest.mark.parametrize("spelled", TOLD)
def test_complex_states_in_other_forms_are_told(spelled: str) -> None:
    backend = compiled(STATES[spelled])
    assert not rewritten(backend, "scan")
    assert {miss.reason.code for miss in backend.report.near_misses if miss.op == "scan"} == {TOLD[spelled]}


def _attention_by(turn: Callable[[Tensor, Tensor], Tensor], *, is_scored: bool = True) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, matrices: Tensor) -> Tensor:
        q, k = turn(q, matrices), turn(k, matrices)
        return (q @ k.mT * 0.3).softmax(-1) @ v if is_scored else q + k

    return attention


def _told_of_matrices(function: Callable[..., Tensor]) -> list[str]:
    inputs = (
        *(normal(2, 3, variants.TOKENS, 2 * variants.PAIRS, seed=i) for i in range(3)),
        variants.large_matrices(True),
    )
    report = compiled(Variant(function, inputs)).report
    assert not report.events
    return [str(miss.reason) for miss in report.near_misses]


@pytest.mark.parametrize(
    "turn",
    [
        lambda x, r: torch.einsum("bhsi,sji->bhsj", x, r),
        lambda x, r: torch.einsum("bhsi,sji->bhsj", x, r[torch.arange(variants.TOKENS)]),
        lambda x, r: (r[: x.shape[2]] @ x[..., None]).squeeze(-1) * 0.5,
    ],
    ids=["einsum", "of positions", "columns"],
)
def test_queries_and_keys_that_are_turned_by_given_matrices_are_told(turn: Callable[[Tensor, Tensor], Tensor]) -> None:
    (told,) = _told_of_matrices(_attention_by(turn))
    assert told.startswith("[MATRICES_GIVEN] queries and keys are multiplied by matrices, a matrix of 16 x 16")


@pytest.mark.parametrize(
    "function",
    [
        _attention_by(lambda x, r: torch.einsum("bhsi,sji->bhsj", x, r), is_scored=False),
        _attention_by(lambda x, r: torch.einsum("bhsi,ji->bhsj", x, r[0])),
        _attention_by(lambda x, r: torch.einsum("bhsi,sji->bhsj", x, r.cumsum(0))),
        _attention_by(
            lambda x, r: torch.einsum("bhsi,sji->bhsj", x, (r * 2).split((len(r) - 1, 1))[0][:1].expand_as(r))
        ),
        _attention_by(lambda x, r: torch.einsum("bhsi,sji->bhsj", x, (r * 2).topk(16, dim=-1).values)),
    ],
    ids=["no scores", "one for all positions", "computed", "one of several results", "of a named result"],
)
def test_given_matrices_that_turn_no_queries_and_keys_are_not_told(function: Callable[..., Tensor]) -> None:
    assert _told_of_matrices(function) == []


def test_queries_and_keys_that_are_turned_by_a_buffer_of_matrices_are_embeddings() -> None:
    """The edit that the near miss asks for."""
    attention = _attention_by(lambda x, r: torch.einsum("bhsi,sji->bhsj", x, r))
    turned = Turned(lambda q, matrices, k, v: attention(q, k, v, matrices), variants.large_matrices(True))
    inputs = tuple(normal(2, 3, variants.TOKENS, 2 * variants.PAIRS, seed=i) for i in range(3))
    backend = compiled(Variant(turned, inputs))
    assert rewritten(backend, "rope") == [True, True], backend.why_not()
