"""Which calls may give a row other bits in another batch: all that are not known to compute element by element.

A call is run on fake tensors, and the operators that it comes to are asked: PyTorch says of its own which of them work on
one element at a time, and which give views. What is known of nobody, operators of other libraries too, may sum in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.lowering.checkpointed_scan import is_smooth
from lz_compile.lowering.kept import kernel_behind
from lz_compile.lowering.opaque import kernel_of
from lz_compile.passes.graph.modes import changes_mode
from lz_compile.passes.graph.view import read, value_of
from lz_compile.passes.proof.running import run

#: Operators of ATen that move or look up elements, or whose results no order changes: the largest, whether any is true.
_EXACT = frozenset(
    (
        *"_to_copy copy fill zero cat stack index gather embedding repeat constant_pad_nd index_select take".split(),
        *"slice_scatter select_scatter diagonal_scatter as_strided_scatter index_put index_copy index_fill".split(),
        *"scatter masked_scatter masked_select flip roll tril triu one_hot nonzero _local_scalar_dense".split(),
        *"max min amax amin aminmax argmax argmin topk any all equal cummax cummin max_pool2d_with_indices".split(),
        *"pixel_shuffle pixel_unshuffle channel_shuffle repeat_interleave unfold lift_fresh set resize".split(),
        *"_reshape_copy _unsafe_view _assert_async _assert_scalar upsample_nearest1d upsample_nearest2d".split(),
        *"empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full".split(),
        *"copysign reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d".split(),
    )
)
#: Operators on elements that vectors and scalars round alike: IEEE 754 gives one result, or nothing is rounded.
_ROUNDED = frozenset(
    (
        *"add sub rsub mul div true_divide neg abs sqrt rsqrt reciprocal square sign sgn relu relu6 threshold".split(),
        *"eq ne lt le gt ge where maximum minimum fmax fmin clamp clamp_min clamp_max clip hardtanh heaviside".split(),
        *"floor ceil round trunc frac fix positive isnan isinf isfinite isposinf isneginf nan_to_num signbit".split(),
        *"logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor".split(),
        *"clone _to_copy copy fill masked_fill copysign leaky_relu addcmul addcdiv lerp".split(),
        *"hardswish hardsigmoid hardshrink softshrink".split(),
    )
)
#: Functions of elements that come, on CPUs, to code that this package has written element by element (``rounds_alike``).
_FUNCTIONS = frozenset(
    (
        *"exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh".split(),
        *"sigmoid silu gelu mish softplus elu celu selu log_sigmoid_forward erf erfc hypot pow fmod".split(),
    )
)
#: Operators that call graphs, which are looked at by themselves.
_CALLERS = frozenset(("cond", "invoke_subgraph", "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint"))
#: Calls that read a number off a tensor, which no fake one has.
_NUMBERS = frozenset(("item", "tolist"))
#: Namespaces of operators that guard and profile.
_OTHERS = frozenset(("prim", "prims_guard", "profiler"))
#: Whether a kernel, by its name, gives a row the same bits in every batch.
KeepsRows: TypeAlias = Callable[[str], bool]


class _Listing(TorchDispatchMode):
    """Notes the operators that may sum."""

    def __init__(self, keeps_rows: KeepsRows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch says no types
        self.keeps_rows, self.found = keeps_rows, list[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        is_ours = operator.namespace == "layerzero"
        if not (
            self.keeps_rows(kernel_of(kernel_behind(name, args)))
            if is_ours
            else _is_exact(operator, args, kwargs or {}, result)
        ):
            self.found.append(name)
        return result


def _is_exact(operator: Any, args: Any, kwargs: Any, result: Any) -> bool:
    if operator.namespace in _OTHERS or operator.is_view:
        return True
    name = operator.overloadpacket.__name__.removesuffix("_")
    given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    made = pytree.tree_leaves(result)
    if not given and operator.namespace == "aten":
        return torch.Tag.nondeterministic_seeded not in operator.tags
    if torch.Tag.pointwise in operator.tags or (operator.namespace == "aten" and name in _ROUNDED | _FUNCTIONS):
        return not any(map(is_smooth, [*given, *made])) or _is_computed_alone(name, [*given, *made])
    if operator.namespace == "aten" and name in _EXACT:
        accumulates = name == "index_put" and ((len(args) > 3 and args[3]) or kwargs.get("accumulate"))
        return not (accumulates or (name == "scatter" and "reduce" in operator._overloadname))
    # Sums of integers that stay integers are one number.
    return operator.namespace == "aten" and not any(map(is_smooth, [*given, *made]))


def _is_computed_alone(name: str, tensors: Sequence[Any]) -> bool:
    """Whether an element has the same bits wherever it stands, next to whatever others."""
    of = [each for each in tensors if isinstance(each, torch.Tensor)]
    is_real = not any(
        each.is_complex() for each in of
    )  # the others are left to ATen, which computes ends by other code
    return is_real and (name in _ROUNDED or (name in _FUNCTIONS and all(each.device.type == "cpu" for each in of)))


def why_dependent(node: fx.Node, keeps_rows: KeepsRows) -> str:
    """By which operator a call may give a row other bits in another batch; empty where it does not."""
    call = read(node)
    if call is None or call.name in _NUMBERS or changes_mode(node):
        return ""
    if isinstance(node.target, HigherOrderOperator):
        return "" if node.target.name() in _CALLERS else node.target.name()
    listing = _Listing(keeps_rows)
    try:
        with isolated(), FakeTensorMode(allow_non_fake_inputs=True), listing:
            run([node], {each: _known(each) for each in node.all_input_nodes})
    except Exception as error:  # noqa: BLE001 whatever a call raises without its surroundings, it is told
        text = f"{call.name} is taken to give a row other bits in another batch: it does not run by itself"
        events.record("PROBE_FAILED", text, error, level=logging.INFO)
        return f"unknown ({type(error).__name__})"
    return listing.found[0] if listing.found else ""


def _known(node: fx.Node) -> Any:
    """A value like a node's, at the sizes that were traced, in the fake mode that is on."""

    def like(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            sizes = [[_hint(size) for size in of] for of in (each.shape, each.stride())]
            return torch.empty_strided(*sizes, dtype=each.dtype, device=each.device)
        return _hint(each)

    value = value_of(node)
    if value is None:
        raise LookupError(f"nothing is known of {node.name}")
    return pytree.tree_map(like, value)


def _hint(number: Any) -> Any:
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    if number.node.hint is None:
        raise LookupError(f"data decide {number}")
    return number.node.hint
