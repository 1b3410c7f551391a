"""Which calls may be in a step that runs in a loop, out of it, or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import Call, read, value_of
from lz_compile.passes.graph.writes import is_seeded, writes

_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson binomial rrelu "
    "uniform exponential geometric cauchy log_normal random gumbel_softmax native_dropout _standard_gamma _sample_dirichlet "
    "fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices "
    "rrelu_with_noise".split()
)
DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout".split()
)
_DECIDED_BY_DATA = frozenset(
    "item tolist nonzero argwhere masked_select unique unique_consecutive _local_scalar_dense bincount".split()
)
_MODES = ("_enter_", "_exit_", "_set_grad_enabled", "_sdpa_kernel", "_saved_tensors_hooks")
_ARITHMETIC = frozenset("add sub rsub mul div pow lt le gt ge eq ne remainder mod maximum minimum lerp where".split())
_LAYOUTS = frozenset({"as_strided", "set", "resize", "stride", "data_ptr", "storage_offset", "untyped_storage"})


def is_arithmetic(node: fx.Node) -> bool:
    """Whether a call computes elementwise and takes a tensor of one element wherever it takes a number."""
    call = read(node)
    return call is not None and call.name in _ARITHMETIC


def is_pure(node: fx.Node) -> bool:
    """Whether a call gives the same whenever it is made."""
    call = read(node)
    return call is not None and not writes(call) and _objection(node, call) is None


def refuse_impure(node: fx.Node) -> None:
    """Refuse a call that may not be in a step.

    Raises:
        RefusedError: it is random, switches modes, decides by data, or calls a graph of its own.
    """
    call = read(node)
    objection = None if call is None else _objection(node, call)
    if objection is not None:
        code, text, edit = objection
        raise RefusedError(code, f"{told(node)} {text}", edit)


def refuse_transformed(ambient: Ambient) -> None:
    """Refuse what stands inside of a transform of ``torch.func``.

    Raises:
        RefusedError: it does.
    """
    if ambient.is_transformed:
        raise RefusedError("FUNCTION_TRANSFORM", "it is inside torch.func.vmap or grad", "transform outside")


def _objection(node: fx.Node, call: Call) -> tuple[str, str, str] | None:
    name = str(getattr(node.target, "__name__", node.target))
    if call.name in _RANDOM or _drops(call) or is_seeded(node.target):
        text = "draws random numbers: a loop that is rolled up would draw them in another order"
        return "RANDOM", text, "draw those of all steps before the loop"
    if name.startswith(_MODES) or name.endswith("_nesting"):
        return "MODE_CHANGES_INSIDE", "switches a mode", "enter or leave the mode outside of the loop"
    if call.name in _DECIDED_BY_DATA or _is_unbacked(value_of(node)):
        return "DATA_DEPENDENT", "depends on data in its size or as a number", "use torch.where"
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
        return "NESTED_GRAPH", "calls a graph of its own", "leave out the checkpoint or transform inside the step"
    if call.name in _LAYOUTS:
        return "LAYOUT_ASKED", "asks for strides or memory", "use view, reshape or index instead"
    return None


def _drops(call: Call) -> bool:
    if call.name == "scaled_dot_product_attention":
        return bool(call.get("dropout_p", 0.0) != 0.0)
    if call.name == "multi_head_attention_forward":
        return True
    if call.name not in DROPOUTS:
        return False
    probability, training = call.get("p", call.get("#1", 0.5)), call.get("training", call.get("#2", True))
    return training is not False and not (isinstance(probability, (int, float)) and probability == 0)


def _is_unbacked(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_is_unbacked(each) for each in value)
    sizes = (*value.shape,) if isinstance(value, torch.Tensor) else (value,)
    return any(
        isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))
        and any(str(symbol).startswith(("u", "zuf")) for symbol in size.node.expr.free_symbols)
        for size in sizes
    )
