"""``lz.register_kernel``: a Python function as a kernel, with limits that are checked when it is registered."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

import torch

from lz_compile.errors import RegistrationError, UnknownOperationError, no_such
from lz_compile.ground import health
from lz_compile.ground.hardware import GENERATIONS, INSTRUCTION_SETS
from lz_compile.ground.records import Reason
from lz_compile.runtime.kernels import capabilities, registry
from lz_compile.runtime.kernels.capabilities import WITHOUT_MEANING, Prior
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.problem.context import SelectionContext, name_of, operations

Function = TypeVar("Function", bound=Callable[..., Any])

#: What a kernel is registered with that is expected to be as fast as Inductor's own code.
INDUCTORS_PRIORITY = 50
#: How often each id was registered in this process.
_registrations: Counter[str] = Counter()


def register_kernel(
    *,
    operation: str,
    kernel_id: str,
    platform: str | Sequence[str],
    supported_dtypes: Iterable[torch.dtype | str],
    supports: Iterable[str] = (),
    is_traceable: bool = False,
    min_sm: int | None = None,
    max_sm: int | None = None,
    supported_generations: Iterable[str] = (),
    min_tensor_core_generation: int | None = None,
    instruction_set: str | None = None,
    requires_isa: Iterable[str] = (),
    min_head_dim: int | None = None,
    max_head_dim: int | None = None,
    head_dim_multiple: int = 1,
    max_seq_len: int | None = None,
    limits: Mapping[str, tuple[int, int | None]] | None = None,
    multiples: Mapping[str, int] | None = None,
    requires_layouts: Iterable[str] = ("BHSD",),
    produces_layout: str | None = None,
    requires_last_dim_stride1: bool = False,
    is_cuda_graph_safe: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    split_invariant: bool = False,
    priority: int = INDUCTORS_PRIORITY,
    fuses_ops: Iterable[str] = (),
    workspace: str = "0",
    grid: Mapping[str, str | None] | None = None,
    package: str | None = None,
    backend_version: str | None = None,
    check: Callable[[SelectionContext], Iterable[Reason]] | None = None,
    **unknown: Any,
) -> Callable[[Function], Function]:
    """Make a function a kernel; a decorator that leaves the function as it is.

    The function is ``f(x, attrs)``: ``x`` are the op's operands in one object, in its canonical layout (``x.query`` of an
    attention, ``x.input`` and ``x.weight`` of a norm; None what is not given), ``attrs`` its attributes; both are described
    in ``lowering/ops/<op>.py``. One of attention may be ``f(q, k, v)`` instead, with any of ``scale=None, causal=True,
    attn_mask=None, dropout_p=0.0, enable_gqa=False, softcap=None, sinks=None``. It must give what the op's reference gives,
    in a new tensor, and leave its inputs as they are. What is not declared is not supported; causality is where the
    function takes ``causal`` or ``is_causal``, or computes ``attention.causal``. A kernel of the same id is replaced, which
    is an event.

    Args:
        operation: an op or a variant: ``attention``, ``attention.causal``, ``norm``, ``norm.rms``, ``rope``, ``mlp``, ...
        kernel_id: such as ``my_org.attention``; what stands before the first dot is its source.
        platform: ``cpu``, ``cuda``, ``rocm``, ``xpu``, ``mps`` or ``*``, or several of them.
        supported_dtypes: of the operands (of an attention of query, key and value).
        supports: features that it has: ``gqa``, ``bool_mask``, ``float_mask``, ``dropout``, ``training``, ...
        is_traceable: it consists of torch functions and becomes part of the compiled graph, instead of one opaque call;
            only then it may have gradients (``supports=["training"]``).
        min_sm: the oldest SM version, 80 for 8.0.
        max_sm: the first SM version that is too new.
        supported_generations: of GPUs, such as ``hopper``; by default all.
        min_tensor_core_generation: of NVIDIA's tensor cores.
        instruction_set: ``mma.sync``, ``wgmma`` or ``tcgen05.mma``, if it needs one.
        requires_isa: what a CPU must have, such as ``avx512_bf16``.
        min_head_dim: the smallest head dim.
        max_head_dim: the largest head dim.
        head_dim_multiple: what a head dim must be a multiple of.
        max_seq_len: the longest sequence.
        limits: the least and the most of any size by its name, ``{"vocab_size": (1, 4096)}``; None for any.
        multiples: what a size must be a multiple of, by its name.
        requires_layouts: ``BHSD`` or ``BSHD``: how it takes query, key and value of an attention.
        produces_layout: how it gives its result, by default as it takes the query.
        requires_last_dim_stride1: features must lie next to one another.
        is_cuda_graph_safe: CUDA graphs may capture it.
        deterministic: same bits for same inputs.
        batch_invariant: the bits of a row depend neither on the other rows and their number, nor on chunks of a prefill.
        split_invariant: nor on how many threads or blocks share its keys.
        priority: 0 to 100: what to expect of the kernel before it was measured here. Inductor's own code counts 50, so that
            95 promises 50/95 of its latency. Of kernels that are equally fast, that of the higher priority is taken.
        fuses_ops: other operations that it computes along.
        workspace: bytes beside operands and result, a formula over sizes: ``"batch_size * num_heads * seq_len_q * 4"``.
        grid: of a CUDA launch, formulas for ``x``, ``y``, ``z`` (blocks) and ``threads`` (per block).
        package: the distribution that it needs.
        backend_version: the versions of that which will do (PEP 440).
        check: further reasons against a problem.
        unknown: nothing; a misspelt argument is told the nearest one.

    Raises:
        RegistrationError: an argument is unknown or wrong, or the function cannot do what is declared.
        UnknownOperationError: there is no such operation.
    """
    given = {name: value for name, value in locals().items() if name not in ("unknown", "check", "is_traceable")}
    for name in unknown:
        raise RegistrationError(kernel_id, _about_unknown(name))
    if not isinstance(kernel_id, str):
        raise RegistrationError(kernel_id, f"expected kernel_id as text, received {type(kernel_id).__name__}")
    if not isinstance(is_traceable, bool):
        text = f"expected is_traceable as True or False, received {type(is_traceable).__name__}"
        raise RegistrationError(kernel_id, text)
    if check is not None and not callable(check):
        raise RegistrationError(kernel_id, f"expected check as a function, received {type(check).__name__}")
    given |= {name: _names(kernel_id, name, given[name]) for name in _SEVERAL}
    if not isinstance(operation, str) or operation not in operations():
        raise UnknownOperationError(f"registering kernel '{kernel_id}'", operation, operations())

    def decorate(function: Function) -> Function:
        registry.register(_spec(function, given, is_traceable=is_traceable, check=check))
        health.restore(kernel_id)  # what failed under this name was another function
        return function

    return decorate


def _about_unknown(name: str) -> str:
    if name in WITHOUT_MEANING:
        return f"'{name}' has no meaning here: {WITHOUT_MEANING[name]}. Leave it out"
    return no_such(
        "argument", name, (each for each in inspect.signature(register_kernel).parameters if each != "unknown")
    )


def _spec(
    function: Callable[..., Any],
    given: dict[str, Any],
    *,
    is_traceable: bool,
    check: Callable[[SelectionContext], Iterable[Reason]] | None,
) -> KernelSpec:
    from lz_compile.runtime.kernels.convention import Form, Layouts, Registered, code_digest, operator_name

    kernel_id, operation = given["kernel_id"], given["operation"]
    described = _described(kernel_id, function, given, is_opaque=not is_traceable)
    form = Form.of(kernel_id, operation, function, is_traceable=is_traceable)
    if described.fuses_ops and not is_traceable:
        text = "fuses_ops needs is_traceable=True: what is computed along is no operand of one call"
        raise RegistrationError(kernel_id, text)
    supports = form.supports(given["supports"])
    layouts = Layouts()
    if operation.partition(".")[0] == "attention":
        takes_tokens = "BHSD" not in described.requires_layouts
        layouts = Layouts(takes_tokens, (given["produces_layout"] or ("BSHD" if takes_tokens else "BHSD")) == "BSHD")
        if form.takes_operands and layouts != Layouts():
            raise RegistrationError(
                kernel_id, "a function of (x, attrs) takes and gives the op's canonical layout BHSD"
            )
    generation = _registrations[kernel_id]  # two closures may share their code
    _registrations[kernel_id] += 1
    registered = Registered(
        form,
        function,
        operator_name(kernel_id, function, generation),
        is_cuda_graph_safe=described.is_cuda_graph_safe,
        takes_float_mask="float_mask" in supports,
        layouts=layouts,
    )
    code = f"{described.capabilities_hash}/{generation}/{sorted(supports)}/{code_digest(function)}"
    return replace(
        described,
        supports=supports,
        supports_scale=form.supports_scale,
        implementation=registered.kernel(),
        extra_check=check,
        capabilities_hash=hashlib.sha256(code.encode()).hexdigest(),
    )


def _described(kernel_id: str, function: Callable[..., Any], given: dict[str, Any], *, is_opaque: bool) -> KernelSpec:
    """The kernel as a descriptor of its own would describe it, checked in the same way."""
    values = {name: value for name, value in given.items() if name not in ("operation", "platform", "supported_dtypes")}
    package, backend_version = values.pop("package"), values.pop("backend_version")
    values |= {name: given[name] or {} for name in ("limits", "multiples")}
    values["platforms"] = _known(kernel_id, "platform", given["platform"], get_args(capabilities.Platform))
    values["dtypes"] = _known(kernel_id, "dtype", given["supported_dtypes"], get_args(capabilities.Dtype))
    produced, required = values.pop("produces_layout"), given["requires_layouts"]
    _known(kernel_id, "layout", [*required, *([] if produced is None else [produced])], ("BHSD", "BSHD"))
    is_attention = given["operation"].partition(".")[0] == "attention"
    values["requires_layouts"] = required if is_attention else ["*"]  # operands come as the op has them
    generations = [name for _, name, _ in GENERATIONS]
    wanted = [name for name in given["supported_generations"] if not name.startswith("gfx")]
    _known(kernel_id, "generation", wanted, generations)
    if given["instruction_set"] is not None:
        _known(kernel_id, "instruction set", [given["instruction_set"]], list(INSTRUCTION_SETS))
    source = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}, registered"
    descriptor = {
        "backend": kernel_id.partition(".")[0],
        "source": source,
        "package": package,
        "backend_version": backend_version,
        "ops": {given["operation"]: [{**values, "is_opaque": is_opaque}]},
    }
    try:
        (spec,) = registry.specs_of(capabilities.build(descriptor), "").values()
    except ValueError as error:  # msgspec's errors are ValueErrors too
        text = re.sub(r" - at `\$\.ops\[\.\.\.\]\[0\]\.(\w+).*`", r" for the argument '\1'", str(error))
        raise RegistrationError(kernel_id, text) from error
    return replace(spec, prior=_promised(spec.priority), prior_source="the priority that it is registered with")


def _promised(priority: int) -> tuple[Prior, ...]:
    """What a priority says about a kernel that was never measured; that of Inductor's own code says nothing."""
    ratio = INDUCTORS_PRIORITY / max(priority, 1)
    return () if ratio == 1 else (Prior("*", frozenset({"*"}), ratio),)


#: The arguments that are one name, or several.
_SEVERAL = tuple(
    "platform supported_dtypes supports supported_generations requires_isa requires_layouts fuses_ops".split()
)


def _names(kernel_id: str, argument: str, value: Any) -> list[str]:
    """Several names, or one; dtypes have names, too."""
    kinds = (str, torch.dtype)
    is_list = isinstance(value, Iterable) and not isinstance(value, (*kinds, torch.Tensor))
    names = list(value) if is_list else [value]
    if not all(isinstance(each, kinds) for each in names):
        raise RegistrationError(kernel_id, f"expected {argument} as a name or several, received {value!r}")
    return [each if isinstance(each, str) else name_of(each) for each in names]


def _known(kernel_id: str, what: str, names: list[str], valid: Sequence[str]) -> list[str]:
    for name in names:
        if not isinstance(name, str) or name not in valid:
            raise RegistrationError(kernel_id, no_such(what, name, valid))
    return names
