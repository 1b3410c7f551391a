"""Which memory a call writes to, however it is spelled, and whether it draws random numbers.

PyTorch says so in most schemas. Those of running statistics and renormalised embeddings say nothing, which the table here
does. Who asks a packet of overloads asks all of them.

So it is said which calls may be in a step that runs in a loop, out of it, or not at all.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import Call, inplace_position, read, value_of

#: Calls that make a tensor of which nobody knows another name.
NEW = frozenset(
    "empty zeros ones full empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full "
    "empty_strided".split()
)
#: Calls of which every element is a function of that element, and of other tensors: activations, and others.
ACTIVATIONS = frozenset("relu relu6 hardtanh hardswish hardsigmoid leaky_relu elu celu selu silu mish gelu".split())
ELEMENTWISE = ACTIVATIONS | frozenset(
    "add sub mul div pow exp exp2 expm1 log log2 log1p neg abs sign square sqrt rsqrt reciprocal sigmoid tanh sin cos erf "
    "clamp clamp_min clamp_max floor ceil round trunc nan_to_num masked_fill addcmul addcdiv lerp and or xor not "
    "tril triu scatter".split()
)
#: A call: what is called, and its arguments.
Form: TypeAlias = "tuple[Any, tuple[Any, ...], Mapping[str, Any]]"
_STATISTICS = ("running_mean", "running_var")
#: By a call's name: what it overwrites, the argument that says whether it does (none: always), and what that is if not given.
_UNSAID: Mapping[str, tuple[tuple[str, ...], str, Any]] = {
    "embedding": (("weight",), "max_norm", None),
    "embedding_bag": (("weight",), "max_norm", None),
    "batch_norm": (_STATISTICS, "training", False),
    "native_batch_norm": (_STATISTICS, "training", False),
    "cudnn_batch_norm": (_STATISTICS, "training", False),
    "miopen_batch_norm": (_STATISTICS, "training", False),
    "instance_norm": (_STATISTICS, "use_input_stats", True),
    "fused_moving_avg_obs_fake_quant": (("running_min", "running_max", "scale", "zero_point"), "", None),
}


def overwritten(call: Call) -> list[fx.Node]:
    """The tensors that a call writes into."""
    targets: list[Any] = []
    if call.is_inplace or call.name == "setitem":
        targets.extend(call.input if isinstance(call.input, (tuple, list)) else (call.input,))
    if isinstance(call.node.target, torch._ops.HigherOrderOperator) and _writes_inside(call.node):
        targets.extend(call.node.all_input_nodes)
    if "out" in call.arguments:
        out = call.arguments["out"]
        targets.extend(out if isinstance(out, (tuple, list)) else (out,))
    for schema in [overload._schema for overload in _overloads(call.node.target)]:
        if schema.is_mutable:
            given = _named(schema, call.node)
            targets.extend(given.get(each.name) for each in schema.arguments if each.is_write)
    if call.name in _UNSAID:
        targets.extend(_unsaid(call))
    return [each for each in dict.fromkeys(targets) if isinstance(each, fx.Node)]


def writes(call: Call) -> bool:
    """Whether a call writes to anything."""
    return call.is_inplace or call.name == "setitem" or "out" in call.arguments or bool(overwritten(call))


def without_writing(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form | None:
    """The call that gives what ``node``, made with these arguments, leaves in the first; None where there is none."""
    call, name = read(node), str(getattr(node.target, "__name__", node.target))
    if call is None or not call.is_inplace:
        return None
    stem, position = name.removesuffix("_"), inplace_position(node.target)
    if node.op == "call_method":
        return (stem, args, kwargs) if name.endswith("_") and callable(getattr(torch.Tensor, stem, None)) else None
    if position is not None:
        named = {key: value for key, value in kwargs.items() if key != "inplace"}
        return (
            node.target,
            (*args[:position], *[False for _ in args[position : position + 1]], *args[position + 1 :]),
            named,
        )
    if getattr(operator, name, None) is node.target:
        return getattr(operator, name[1:], None) or getattr(operator, f"{name[1:]}_"), args, kwargs
    twin = getattr(torch, stem, None) if name.endswith("_") and getattr(torch, name, None) is node.target else None
    return None if twin is None else (twin, args, kwargs)


def is_seeded(target: Any) -> bool:
    """Whether an operator, or any overload of it, says that it draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(target))


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def _named(schema: Any, node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names in a schema."""
    positional = [each.name for each in schema.arguments if not each.kwarg_only]
    return dict(zip(positional, node.args, strict=False)) | node.kwargs


def _unsaid(call: Call) -> list[Any]:
    names, switch, default = _UNSAID[call.name]
    given = dict(zip(_parameters(call.node.target, call.name), call.node.args, strict=False)) | call.node.kwargs
    said = given.get(switch, default)
    is_off = bool(switch) and (said is None or said is False)
    return [] if is_off else [given.get(name) for name in names]


@cache
def _parameters(target: Any, name: str) -> tuple[str, ...]:
    """The names of a function's parameters; those of a builtin are the operator's of its name."""
    for overload in _overloads(target):
        return tuple(each.name for each in overload._schema.arguments)
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        packet = getattr(torch.ops.aten, name, None)
        return _parameters(packet.default, name) if packet is not None else ()


def _writes_inside(node: fx.Node) -> bool:
    """Whether a graph that a higher-order operator calls overwrites anything, or a kernel that it launches may."""
    if "mutation" in str(node.target):  # a Triton kernel of the user's
        return True
    return any(overwritten(call) for body in bodies_of(node) for inner in body.graph.nodes if (call := read(inner)))


def bodies_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator calls."""
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    return [body for name in names if isinstance(body := getattr(node.graph.owning_module, name, None), fx.GraphModule)]


#: Calls that draw random numbers, beside dropouts.
RANDOM = frozenset(
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


class WithoutEffects(TorchDispatchMode):
    """Refuses what gives nothing, such as the check that a matrix had an inverse: AOTAutograd (2.13) loses count of them."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it.

        Raises:
            RefusedError: it is an operator without results that writes to nothing.
        """
        if not operator._schema.returns and not operator._schema.is_mutable:
            text = f"it calls {operator}, which gives nothing: PyTorch's scan cannot"
            raise RefusedError("EFFECT_INSIDE", text, "call what checks nothing, such as torch.linalg.inv_ex")
        return operator(*args, **(kwargs or {}))


def refuse_transformed(ambient: Ambient) -> None:
    """Refuse what stands inside of a transform of ``torch.func``.

    Raises:
        RefusedError: it does.
    """
    if ambient.is_transformed:
        raise RefusedError("FUNCTION_TRANSFORM", "it is inside torch.func.vmap or grad", "transform outside")


def _objection(node: fx.Node, call: Call) -> tuple[str, str, str] | None:
    name = str(getattr(node.target, "__name__", node.target))
    if call.name in RANDOM or drops(call) or is_seeded(node.target):
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


def drops(call: Call) -> bool:
    """Whether a call draws which numbers it drops."""
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
