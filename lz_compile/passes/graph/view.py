"""One reading for the many spellings of an operation.

``x.softmax(-1)``, ``F.softmax(x, dim=-1)``, ``torch.softmax(x, 2)`` and ``aten.softmax.int`` are all the call
``softmax(input=x, dim=2)``. Nothing here knows what an operation means; that is :mod:`algebra`, :mod:`contraction`
and the recognisers.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Parameter names in positional order, where the function and the method form agree (a method's self is the first), and of
# which calls these are.
_PARAMETERS: Mapping[str, str] = {
    "input other alpha": "add sub rsub",
    "input other": (
        "mul and or xor logical_xor bitwise_xor eq ne floordiv floor_divide mod fmod remainder rshift "
        "bitwise_right_shift lshift bitwise_left_shift maximum minimum gt ge lt le reshape_as matmul bmm mm "
        "expand_as view_as type_as outer logaddexp ldexp hypot"
    ),
    "input other rounding_mode": "div",
    "input exponent": "pow",
    "condition input other": "where",
    "input mask value": "masked_fill",
    "input min max": "clamp",
    "input min": "clamp_min",
    "input max": "clamp_max",
    "input dim keepdim": "min logsumexp amax amin any all count_nonzero max argmax",
    "input min_val max_val": "hardtanh",
    "input approximate": "gelu",
    "input beta threshold": "softplus",
    "input negative_slope inplace": "leaky_relu",
    "input alpha": "elu",
    "input threshold value": "threshold",
    "input dim": "glu unsqueeze squeeze unbind",
    "input #1 dim": "chunk split tensor_split split_with_sizes",
    "input k dim": "topk kthvalue",
    "input dim descending": "sort argsort",
    "input nan posinf neginf": "nan_to_num",
    "input tensor1 tensor2 value": "addcmul addcdiv",
    "input kernel_size stride padding ceil_mode count_include_pad divisor_override": "avg_pool1d avg_pool2d avg_pool3d",
    "input end weight": "lerp",
    "input dim dtype": "softmax log_softmax cumsum cumprod logcumsumexp",
    "input n dim prepend append": "diff",
    "input diagonal": "tril triu",
    "input offset dim1 dim2": "diagonal",
    "input dim keepdim dtype": "sum mean",
    "input dim unbiased keepdim": "var std var_mean std_mean",
    "input p dim keepdim": "norm",
    "input ord dim keepdim": "linalg_norm linalg_vector_norm",
    "input normalized_shape weight bias eps": "layer_norm",
    "input normalized_shape weight eps": "rms_norm",
    "input p dim eps": "normalize",
    "input p training inplace": "dropout",
    "input other dims": "tensordot",
    "input batch1 batch2 beta alpha": "baddbmm addmm",
    "input weight bias": "linear",
    "input dim0 dim1": "transpose",
    "input source destination": "movedim",
    "input start_dim end_dim": "flatten",
    "input dim sizes": "unflatten",
    "input repeats dim": "repeat_interleave",
    "tensors dim": "cat stack",
    "input dim start length": "narrow",
    "input dim start end step": "slice",
    "input src dim start end step": "slice_scatter",
    "input src dim index": "select_scatter",
    "input dim index": "select gather index_select",
    "input dim index src": "index_copy",
    "input index dim": "take_along_dim",
    "input index": "take",
    "input weight": "embedding conv1d conv2d conv3d",
    "input shifts dims": "roll",
    "input dimension size step": "unfold",
    "input size stride storage_offset": "as_strided as_strided_copy",
    "input pad mode value": "pad",
    "input value": "fill",
    "input other p": "cdist",
    "input other dim eps": "cosine_similarity",
    "query key value attn_mask dropout_p is_causal scale enable_gqa": "scaled_dot_product_attention",
}
_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    name: tuple(parameters.split()) for parameters, names in _PARAMETERS.items() for name in names.split()
}

# Functions whose positional order differs from the method of the same name.
_FUNCTION_SIGNATURES: Mapping[Any, tuple[str, ...]] = {
    F.softmax: ("input", "dim", "_stacklevel", "dtype"),
    F.log_softmax: ("input", "dim", "_stacklevel", "dtype"),
    F.embedding: ("input", "weight", "padding_idx", "max_norm"),
}

_SPELLINGS: Mapping[str, str] = {
    "div": "true_divide truediv divide",
    "mul": "multiply",
    "sub": "subtract",
    "neg": "negative",
    "not": "logical_not bitwise_not invert inv not_",
    "and": "logical_and bitwise_and and_",
    "or": "logical_or bitwise_or or_",
    "transpose": "swapaxes swapdims",
    "movedim": "moveaxis",
    "cat": "concat concatenate",
    "clamp": "clip",
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "ne": "not_equal",
    "view": "_unsafe_view",
    "softmax": "_softmax special_softmax",
    "expand": "broadcast_to",
    "T": "numpy_T",
    "H": "matrix_H",
    **{name: f"special_{name}" for name in "log_softmax logsumexp exp2 expm1 erf erfc ndtr".split()},
    "sigmoid": "special_expit",
    "logsigmoid": "log_sigmoid",
    "silu": "swish",
    "abs": "absolute",
    "pow": "float_power",
}
_SYNONYMS: Mapping[str, str] = {other: name for name, others in _SPELLINGS.items() for other in others.split()}

# Keyword spellings of the same parameter.
_PARAMETER_SYNONYMS: Mapping[str, str] = dict(
    zip(
        "self x1 axis mat2 x2 vec2 keepdims train axis0 axis1 mat1".split(),
        "input input dim other other other keepdim training dim0 dim1 batch1".split(),
        strict=True,
    )
)

_INPLACE_OPERATORS: Mapping[Any, str] = {
    getattr(operator, f"i{name}"): name
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
    if hasattr(operator, f"i{name}")
}
#: The same, called as methods of a tensor (which has no in-place product of matrices).
_INPLACE_METHODS = {
    f"__{function.__name__}__": _SYNONYMS.get(name, name) for function, name in _INPLACE_OPERATORS.items()
}


@dataclass(frozen=True)
class Call:
    """A node read as ``name(**arguments)``.

    ``arguments`` holds what was given, by parameter name (positional extras as ``"#3"``); nothing is filled in, so ask
    with ``get``. ``is_inplace`` says that the first argument is overwritten.
    """

    name: str
    node: fx.Node
    arguments: Mapping[str, Any]
    is_inplace: bool = False

    def get(self, parameter: str, default: Any = None) -> Any:
        """An argument by its parameter's name."""
        return self.arguments.get(parameter, default)

    @property
    def input(self) -> Any:
        """The first argument."""
        return self.arguments.get("input")

    def positional(self) -> tuple[Any, ...]:
        """The arguments after the first, as ``view(2, -1)`` and ``view((2, -1))`` both give ``(2, -1)``."""
        rest = tuple(value for name, value in self.arguments.items() if name != "input")
        if len(rest) == 1 and isinstance(rest[0], (tuple, list, torch.Size)):
            return tuple(rest[0])
        return rest


def _spelled(name: str) -> tuple[str, bool]:
    if name in _INPLACE_METHODS:
        return _INPLACE_METHODS[name], True
    is_inplace = name.endswith("_") and not name.endswith("__") and name not in _SYNONYMS
    stem = name[:-1] if is_inplace else name
    if stem.startswith("__") and stem.endswith("__"):
        stem = stem[2:-2]
    return _SYNONYMS.get(stem, stem), is_inplace


@cache
def _function_name(target: Any) -> tuple[str, bool]:
    if target is operator.imatmul:  # tensors have no in-place product: it makes a new one
        return "matmul", False
    if target in _INPLACE_OPERATORS:
        return _SYNONYMS.get(_INPLACE_OPERATORS[target], _INPLACE_OPERATORS[target]), True
    if isinstance(target, torch._ops.OpOverload):
        return _spelled(target.overloadpacket.__name__)
    return _spelled(getattr(target, "__name__", str(target)))


def read(node: fx.Node) -> Call | None:
    """The call that ``node`` makes, or None for placeholders, attributes and outputs."""
    if node.op == "call_method":
        name, is_inplace = _spelled(str(node.target))
        signature = _SIGNATURES.get(name, ("input",))
        if name == "where":  # x.where(condition, other): the one method whose self is not the first parameter
            signature = ("input", "condition", "other")
    elif node.op == "call_function":
        name, is_inplace = _function_name(node.target)
        signature = _FUNCTION_SIGNATURES.get(node.target, _SIGNATURES.get(name, ("input",)))
    else:
        return None
    arguments: dict[str, Any] = {}
    for position, value in enumerate(node.args):
        arguments[signature[position] if position < len(signature) else f"#{position}"] = value
    given = {key: value for key, value in node.kwargs.items() if key != "out" or value is not None}
    arguments |= {_PARAMETER_SYNONYMS.get(key, key): value for key, value in given.items()}
    if name == "addmm" and "other" in arguments:
        arguments["batch2"] = arguments.pop("other")
    if name in ("softmax", "log_softmax") and isinstance(
        arguments.get("dtype"), bool
    ):  # aten._softmax(x, dim, half_to_float)
        del arguments["dtype"]
    return Call(name, node, arguments, is_inplace or _inplace_flag(node))


def _inplace_flag(node: fx.Node) -> bool:
    """Whether ``inplace=True`` was given, by keyword or by position."""
    if node.kwargs.get("inplace") is True:
        return True
    is_asked = node.op == "call_function" and getattr(node.target, "__module__", "").startswith("torch.nn.functional")
    position = inplace_position(node.target) if is_asked else None
    return position is not None and position < len(node.args) and node.args[position] is True


@cache
def inplace_position(target: Any) -> int | None:
    """Which argument of a function says whether it writes to its input."""
    try:
        parameters = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


def target_name(op: str, target: Any) -> str:
    """What a node calls, the same in every process; nothing for inputs and what is held by a module."""
    if op in ("placeholder", "get_attr"):
        return ""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def value_of(node: Any) -> Any:
    """What Dynamo or ``make_fx`` knows of a node's value: a fake tensor, a symbolic number or None; constants stay."""
    if not isinstance(node, fx.Node):
        return node
    value = node.meta.get("example_value")
    return node.meta.get("val") if value is None else value


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, None where it is not a tensor."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def is_floating(node: Any) -> bool:
    """Whether a node holds a tensor of real floating-point numbers."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_floating_point()


def is_boolean(node: Any) -> bool:
    """Whether a node holds a tensor of truth values."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype == torch.bool


def is_integer(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor holds integers that are no truth values."""
    return not (tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """What a node reads of tensors."""
    return [each for each in node.all_input_nodes if tensor_of(each) is not None]


def known_tensor(node: Any) -> torch.Tensor:
    """The fake tensor of a node that is known to hold one."""
    tensor = tensor_of(node)
    assert tensor is not None, f"{node} is no tensor"
    return tensor


def memory_of(node: Any) -> int | None:
    """A number for the memory that a tensor lies in, None where there is none to be told (sparse, mapped over, no tensor)."""
    tensor = tensor_of(node)
    if tensor is None or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # as inside torch.vmap
        return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor of a value; of one that is made of others, those."""
    found = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
    return [tensor for each in found for _, tensor in inner_tensors(each)]


def memories_of(node: fx.Node) -> list[int]:
    """The memory that a node's tensors lie in, as numbers."""
    return [memory for each in tensors_in(value_of(node)) if (memory := memory_of(each)) is not None]


def is_symbolic(node: Any) -> bool:
    """Whether a node is a symbolic number."""
    return isinstance(value_of(node), (torch.SymInt, torch.SymFloat))


def hint_of(node: Any) -> int | float:
    """The number that a symbolic number was traced with (0.5 where there is none, as for data-dependent ones)."""
    hint = getattr(getattr(value_of(node), "node", None), "hint", None)
    return hint if isinstance(hint, (int, float)) else 0.5


def called(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives, or a method, if ``target`` is a name."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor of a class of its own around others, which PyTorch asks by ``__tensor_flatten__``."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def inner_tensors(value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors inside of one, each with the attributes that lead to it."""
    if not is_subclass(value):
        yield (), value
        return
    for name in value.__tensor_flatten__()[0]:
        for path, tensor in inner_tensors(getattr(value, name)):
            yield (name, *path), tensor


def rebuilt(value: Any, left: Iterator[torch.Tensor]) -> Any:
    """A tensor of the same class around other tensors."""
    if not is_subclass(value):
        return next(left)
    names, context = value.__tensor_flatten__()
    inner = {name: rebuilt(getattr(value, name), left) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


# ---- what we emitted -------------------------------------------------------------------------------------------------


#: In the metadata of every node that is ours: what a kernel emitted is not recognised again.
EMITTED = "layerzero_emitted"


def reached(
    start: Iterable[fx.Node],
    following: Callable[[fx.Node], Iterable[fx.Node]] = operator.attrgetter("all_input_nodes"),
    most: int = sys.maxsize,
) -> Iterator[fx.Node]:
    """Some nodes and what follows, each once, the nearest first; once ``most`` are known, nothing is followed any more."""
    known = dict.fromkeys(start)
    queue = deque(known)
    while queue:
        node = queue.popleft()
        yield node
        for each in following(node) if len(known) < most else ():
            if each not in known:
                known[each] = None
                queue.append(each)


def needed(
    wanted: Iterable[fx.Node],
    given: Container[fx.Node],
    operands: Callable[[fx.Node], Iterable[fx.Node]] = operator.attrgetter("all_input_nodes"),
) -> list[fx.Node]:
    """Some nodes and everything that they need, back to what is ``given``, in graph order."""
    start = (node for node in wanted if node not in given)
    return sorted(reached(start, lambda node: (each for each in operands(node) if each not in given)))
