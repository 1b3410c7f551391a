"""Which kernel an eager attention runs: one fused call, chosen like those of compiled graphs, found again in under 2 us.

A decision is found by a key of everything that its validity depends on: shapes, dtypes, devices, the order in memory,
attributes, gradients, and the versions of policy, kernels and health, which change in this process only. What other
processes measure meanwhile, environment variables that change and the memory that is left are noticed when an entry is
too old (``cache.ttl_seconds``, a minute): to ask the database at each call would cost more than all else.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F

from lz_compile.api.attention_arguments import Call, check
from lz_compile.api.given import read
from lz_compile.errors import KernelExecutionError, NoKernelFoundError
from lz_compile.ground import events, health, hooks, memory
from lz_compile.ground.records import Reason
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.opaque import is_forward
from lz_compile.lowering.ops.attention import Operands
from lz_compile.runtime.choose.calls import SDPA, eager_kernel, needs_compile
from lz_compile.runtime.choose.decision_cache import DecisionCache
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.policy import policy
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.policy.settings import CacheSettings
from lz_compile.runtime.problem.context import SelectionContext, known_size, of_facts
from lz_compile.runtime.ranks.agree import decide, in_turn
from lz_compile.runtime.tables import loaded as loaded_tables

#: Runs an attention over query, key, value and mask: a kernel, with everything else bound to it.
Run: TypeAlias = Callable[..., torch.Tensor]
Built = TypeVar("Built", bound=Callable[..., Any])


class _Decisions:
    """The cache of this process, by the policy's settings; ``cache`` is None where they switch it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settings: CacheSettings | None = None
        self.cache: DecisionCache[Any] | None = None

    def follow(self, settings: CacheSettings) -> DecisionCache[Any] | None:
        """The cache with these settings; what an older one holds is dropped."""
        if settings != self._settings:
            with self._lock:
                if settings != self._settings:
                    self.cache = DecisionCache(settings) if settings.enabled else None
                    self._settings = settings
        return self.cache


_decisions = _Decisions()


def plan(call: Call) -> Run:
    """What to call with these tensors, or with others of which the key holds: ``plan(call)(query, key, value, mask)``.

    Raises:
        ArgumentError: the tensors are no attention's.
        NoKernelFoundError: no kernel can run, and falling back is switched off.
        ConfigError: the configuration is wrong.
    """
    query, key, value, mask, causal, scale, dropout_p, layout = call
    # Every field costs 30 to 100 ns here and 15 to 40 in the hash; a stride is asked for as part of all of them, which is
    # quicker than by its position.
    names = (
        policy.version(),
        registry.version(),
        health.version(),
        loaded_tables.version(),
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        query.stride()[-1] == key.stride()[-1] == value.stride()[-1] == 1,
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad, mask is not None and mask.requires_grad),
        None if mask is None else (mask.dtype, mask.shape, mask.device, mask.layout),
        causal,
        scale,
        dropout_p,
        layout,
        torch.are_deterministic_algorithms_enabled(),
        query.is_cuda and torch.cuda.is_current_stream_capturing(),
    )
    cache = _decisions.cache
    found: Run | None = None if cache is None else cache.get(names)
    return _built("attention", names, _Problem(call).plan) if found is None else found


def has_choice(op: str, platform: str, never: frozenset[str] = frozenset()) -> bool:
    """Whether an eager call of an op could run anything but PyTorch's own on a kind of device.

    ``never`` are features that no call has: kernels for these only do not count.
    """
    registry.kernels(op)  # looking may be what changes the version
    return (platform != "cpu" and policy.debugging()) or _has_choice(op, platform, never, registry.version())


@lru_cache(maxsize=64)
def _has_choice(op: str, platform: str, never: frozenset[str], _version: int) -> bool:
    own = eager_kernel(op)
    specs = (spec for name, spec in registry.kernels(op).items() if name != own and not any(needs_compile(spec)))
    platforms = {"cuda", "rocm"} if platform == "cuda" else {platform}
    return any(
        spec.platforms & {*platforms, "*"} and never.isdisjoint(spec.requires_features.get("*", ())) for spec in specs
    )


def kernel_for(
    op: str, attributes: Any, facts: Any, device: torch.device, operands: Mapping[str, Any] | None = None
) -> KernelSpec | None:
    """The kernel of another op for an eager call, None for PyTorch's own: always in forward mode, which ours do not know.

    With ``operands``, those of the call by name, a kernel that is not shipped with this package is proven on them first.

    With ``LAYERZERO_DEBUG``, PyTorch's own is a kernel like any other on an accelerator: what waits for that is its guard.

    Raises:
        NoKernelFoundError: no kernel can run, and falling back is switched off.
        ConfigError: the configuration is wrong.
    """
    if is_forward():
        return None
    is_proven = operands is not None
    names = (*_versions(op), op, attributes, facts, device, torch.are_deterministic_algorithms_enabled(), is_proven)
    present = policy.current()
    cache = _decisions.follow(present.settings.cache)
    choose = partial(_chosen, op, attributes, facts, device, operands, present)
    found: tuple[KernelSpec | None] = choose() if cache is None else cache.get_or_compute(names, choose)
    if found[0] is None and present.settings.debug and device.type != "cpu":
        return registry.kernels(op).get(eager_kernel(op))
    return found[0]


def problem_of(x: Any, **given: Any) -> tuple[Any, Any]:
    """The attributes of a call over operands, of which some are given, and the facts that it selects its kernel by.

    Every size is a number, also while the call is traced.
    """
    module = sys.modules[type(x).__module__]
    attrs, facts = module.from_operands(x, x.sizes(known_size), **given)
    traced = {
        name: known_size(each) for name, each in vars(facts).items() if isinstance(each, (torch.SymInt, torch.Tensor))
    }
    return attrs, replace(facts, **traced) if traced else facts


def through_kernel(x: Any, attrs: Any, facts: Any, own: Built, *, is_traced: bool) -> Built:
    """A call of operands like these by the kernel that is chosen, which may bind what stays the same; else ``own``."""
    op = type(x).__module__.rpartition(".")[2]
    kernel = kernel_for(op, attrs, facts, x.tensors[0].device, None if is_traced else x.given())
    if kernel is None or kernel.call is None:
        return own
    bind = None if is_traced or facts.needs_grad else getattr(kernel.call, "bind", None)
    call = None if bind is None else bind(x, attrs)
    found: Any = guarded(kernel.kernel_id, partial(kernel.call, attrs=attrs) if call is None else call, own)
    return found  # type: ignore[no-any-return]


def bound(op: str, names: tuple[Any, ...], build: Callable[[], Built]) -> Built:
    """What ``build`` gives for a call of an op: a kernel, with all that does not change from call to call bound to it.

    Args:
        op: the operation.
        names: everything that ``build`` looks at: shapes, strides, dtypes, devices, attributes, gradients.
        build: chooses (:func:`kernel_for`) and binds.
    """
    key = (
        policy.version(),
        registry.version(),
        health.version(),
        loaded_tables.version(),
        op,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        names,
    )
    cache = _decisions.cache
    found: Built | None = None if cache is None else cache.get(key)
    return _built(op, key, build) if found is None else found


def _built(op: str, key: tuple[Any, ...], build: Callable[[], Built]) -> Built:
    """What is kept for a key from now on, by the policy that holds now."""
    cache = _decisions.follow(policy.current().settings.cache)
    if cache is None:
        return build()
    names = (*_versions(op), *key[4:])  # looking at policy and kernels may have been what changed them
    found: Built = cache.get_or_compute(names, build)
    return found


def layout(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What a kernel that is bound may look at beside the elements."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def guarded(kernel_id: str, call: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, a kernel that is retired if it fails; the call is then completed by ``own``, PyTorch's, if policy lets it."""
    fallback_enabled = policy.current().settings.fallback_enabled

    def complete(*operands: Any, **named: Any) -> Any:
        forget()  # every decision in which the kernel took part: it may be retired, or the memory may be full
        return own(*operands, **named)

    return partial(health.guarded, kernel_id, call, complete, fallback_enabled=fallback_enabled)


def _chosen(
    op: str, attributes: Any, facts: Any, device: torch.device, operands: Mapping[str, Any] | None, present: Policy
) -> tuple[KernelSpec | None]:
    return (_choice(of_facts(op, attributes, facts, device=device), attributes, operands, present),)


def _choice(
    context: SelectionContext, attributes: Any, operands: Mapping[str, Any] | None, present: Policy
) -> KernelSpec | None:
    """The kernel to run; None: PyTorch's own, whatever speaks against it."""
    own, settings = eager_kernel(context.op), present.settings
    if not settings.enabled:
        return None
    try:
        kernel = _loaded(Problem(context, own, is_eager=True), present, attributes, operands)
        return None if kernel.kernel_id == own else kernel
    except NoKernelFoundError as error:
        if not settings.fallback_enabled:
            raise
        # One line: why each kernel cannot run is said by ``lz.which``, and a traceback would say it twice.
        what = f"{context.operation} in {context.dtype_name} on {context.device_type} runs on {own} all the same"
        events.record("NO_KERNEL", f"{what}: none of {len(error.failures)} kernels can (lz.which says why)")
        return None


def forget() -> None:
    """Forget every decision."""
    if _decisions.cache is not None:
        _decisions.cache.clear()


def statistics() -> dict[str, int]:
    """What the cache of decisions did so far; empty where it is switched off."""
    return {} if _decisions.cache is None else _decisions.cache.statistics().to_dict()


def _versions(op: str) -> tuple[int, ...]:
    """Of everything that decides beside the call itself, read anew; the first fields of a key."""
    registry.kernels(op)
    return policy.version(), registry.version(), health.version(), loaded_tables.version()


class _Problem:
    """One eager attention for which no decision is known."""

    def __init__(self, call: Call) -> None:
        check(call)
        call = call._replace(causal=bool(call.causal))  # 1 finds what is bound here, as True does
        given = read("attention", "attention", (), call._asdict())
        context = given.context
        if not context.is_cuda_graph_capturing:
            context = replace(context, memory_headroom_bytes=memory.headroom_bytes(call.query.device))
        self.context, self.layout, self.operands = context, call.layout, given.x
        self.mask_name = "bias" if given.attrs.has_bias else "mask"
        self.attrs = replace(given.attrs, masked_rows="zero", score_dtype=torch.float32)

    def plan(self) -> Run:
        """Choose, and bind everything but the tensors."""
        present = policy.current()
        run = self._run(_choice(self.context, self.attrs, self.operands.given(), present), present)
        return run if self.layout == "BHSD" else partial(_transposed, run)

    def _run(self, kernel: KernelSpec | None, present: Policy) -> Run:
        settings = present.settings
        sdpa = self._sdpa()
        if kernel is None:
            run, kernel_id = sdpa, SDPA
        else:
            assert kernel.call is not None, f"{kernel.kernel_id} cannot be called eagerly"
            run, kernel_id = partial(_canonical, kernel.call, self.attrs, self.mask_name), kernel.kernel_id
        if run is sdpa and settings.fallback_enabled and not settings.debug:
            return run
        return partial(_unwrapped, guarded(kernel_id, run, sdpa))

    def _sdpa(self) -> Run:
        """What every kernel is measured against and falls back to: one call of C++ where it does without help."""
        attrs = self.attrs
        if attrs.is_causal and (attrs.has_mask or attrs.has_bias or (attrs.scale is not None and attrs.scale <= 0)):
            from lz_compile.lowering.kernels.attention import torch_sdpa

            return partial(_canonical, torch_sdpa.attention, attrs, self.mask_name)
        given = {name: getattr(attrs, name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}
        changed = {name: value for name, value in given.items() if value != getattr(AttentionAttrs(), name)}
        return partial(F.scaled_dot_product_attention, **changed)


def _loaded(problem: Problem, present: Policy, attributes: Any, operands: Mapping[str, Any] | None) -> KernelSpec:
    """The kernel for a problem, or the best of the others where its library does not import, or it is proven wrong."""
    operation, failures = problem.context.operation, dict[str, list[Reason]]()

    def why_not(kernel: KernelSpec) -> Reason | None:
        missing = kernel.load()
        if missing is None and operands is not None and not kernel.is_shipped:
            from lz_compile.passes.proof import eager_proof  # which chooses kernels in turn

            missing = eager_proof.why_not(kernel, operation.partition(".")[0], attributes, operands)
        if missing is not None:
            failures[kernel.kernel_id] = [missing]
        return missing

    decision = decide(problem, present, why_not=why_not)
    if decision.refused_lock is not None:
        events.record(decision.refused_lock.code, f"{operation}: {decision.refused_lock.message}")
    for kernel, _ in in_turn(decision, lambda: [*failures.values()][-1][-1], problem, present, why_not=why_not):
        if why_not(kernel) is None:
            return kernel
    raise NoKernelFoundError(operation, failures)


def _canonical(kernel: Run, attrs: AttentionAttrs, mask_name: str, *tensors: Any) -> torch.Tensor:
    return kernel(_operands(mask_name, *tensors), attrs)


def _operands(mask_name: str, *tensors: Any) -> Operands:
    mask = tensors[3]
    over = {} if mask is None else {mask_name: mask[(None,) * (4 - mask.dim())]}  # with all four dimensions
    return Operands(*tensors[:3], **over)


def _transposed(
    run: Run, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Over ``[B, S, H, D]``: views, nothing is moved."""
    return run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask).transpose(1, 2)


def _unwrapped(run: Run, *operands: torch.Tensor | None) -> torch.Tensor:
    """What a guarded call gives; a failure that an opaque operator tells itself is told once."""
    try:
        return run(*operands)
    except KernelExecutionError as error:
        if isinstance(error.__cause__, KernelExecutionError):
            raise error.__cause__ from error.__cause__.__cause__
        raise


def _attend(x: Any, is_causal: bool, scale: float | None) -> torch.Tensor:
    mask = x.bias if x.mask is None else x.mask
    return plan(Call(x.query, x.key, x.value, mask, is_causal, scale, 0.0, "BSHD"))(x.query, x.key, x.value, mask)


hooks.answer(attend=_attend)
