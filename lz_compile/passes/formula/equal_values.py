"""Which values of a graph are equal because they are computed alike, and which calls do nothing but give a value.

Equal calls of equal operands are one number (value numbering), whatever they are named. A reader that meets two nodes of one
number in one formula notes them: then :mod:`editing.merge` makes them one node, and the graph is read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.expressions import is_constant, specialised
from lz_compile.passes.formula.pointwise import BENDS, is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.view import Call, value_of

#: Calls that do nothing but compute their result, beyond those that :mod:`algebra` and :mod:`layout` can read.
_PURE = BENDS.keys() | frozenset(
    "mean sum prod amax amin max min var std var_mean std_mean norm linalg_norm linalg_vector_norm all any argmax argmin "
    "topk sort argsort cumsum cumprod logsumexp softmax log_softmax layer_norm rms_norm group_norm normalize "
    "sign sin cos log2 log10 floor ceil round trunc isnan isinf isfinite floordiv mod remainder xor lshift rshift "
    "cat stack chunk split split_with_sizes unbind tensor_split gather take_along_dim index_select select narrow diagonal "
    "tril triu arange eye detach cpu cuda long int short char byte size dim numel".split()
)
#: Calls that give memory as it happens to be.
_UNWRITTEN = frozenset({"empty", "empty_like", "new_empty"})


def only_computes(call: Call) -> bool:
    """Whether nothing but its result tells that a call was made: it neither writes nor draws random numbers."""
    if call.is_inplace or call.get("out") is not None or call.node.meta.get("unbacked_bindings"):
        return False
    if not is_torchs(call.node.target) and call.node.target is not getattr:
        return False
    if call.name == "dropout":
        return not call.get("training", True) or specialised(call.get("p", 0.5)) == 0
    is_known = call.name in _PURE or call.name in contraction.PRODUCTS
    return is_known or is_pointwise(call) or layout.rearranges(call) or is_constant(call)


def is_torchs(target: Any) -> bool:
    """Whether a name means what it means in torch: a method's does, others may have functions of the same name."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten"
    module = getattr(target, "__module__", None)
    return isinstance(target, str) or module in (None, "_operator") or module.partition(".")[0] == "torch"


def numbers(effects: Effects) -> Mapping[fx.Node, int]:
    """Every node's number, which those have in common that hold equal values.

    Nothing that is overwritten anywhere, and nothing that is made of such, has another one's number.
    """
    found: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node, call in effects.calls.items():
        key = _key(effects, node, call, found)
        found[node] = len(found) if key is None else known.setdefault(key, len(found))
    return found


def _key(effects: Effects, node: fx.Node, call: Call | None, found: Mapping[fx.Node, int]) -> Any:
    """What a value is; None where it is a value of its own."""
    value = value_of(node)
    if isinstance(value, (torch.SymInt, torch.Size)):  # a size is what it is, whatever it is read of
        return tuple(map(as_size, value)) if isinstance(value, torch.Size) else as_size(value)
    if call is None or not only_computes(call) or call.name in _UNWRITTEN:
        return None
    if any(map(effects.is_overwritten, (node, *node.all_input_nodes))):
        return None
    ambient = effects.ambient(node)
    modes = ambient.autocast, grad_enabled(ambient), ambient.other
    return call.name, _plain(call.arguments, found), _kind(value), modes


def _plain(value: Any, found: Mapping[fx.Node, int]) -> Any:
    """Arguments with the numbers of nodes; constants are equal if they are of one type, too."""
    if isinstance(value, fx.Node):
        return fx.Node, found[value]
    if isinstance(value, Mapping):
        return tuple((name, _plain(value[name], found)) for name in sorted(value))
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item, found) for item in value)
    if isinstance(value, slice):
        return slice, _plain((value.start, value.stop, value.step), found)
    return type(value), repr(value)


def _kind(value: Any) -> Any:
    """What else makes a difference: it is the same for equal calls, unless a call is not what its name says."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    strides = value.stride() if value.layout is torch.strided and not value.is_nested else ()
    sizes = tuple(map(as_size, (*value.shape, *strides)))
    return type(value), sizes, value.dtype, value.device, value.requires_grad
