"""``torch.compile(model, backend="layerzero")``: recognise, choose, prove, rewrite, and hand the rest to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lz_compile.ground import garbage

if TYPE_CHECKING:
    from torch import fx


def layerzero(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile a Dynamo graph. Registered as a backend of ``torch.compile`` under the name ``layerzero``.

    Args:
        module: Dynamo's graph; it is rewritten in place.
        example_inputs: real tensors and symbolic integers, as Dynamo passes them.
        mode: Inductor's mode, such as ``"max-autotune"``.
        options: ours (``layerzero.*``, see :class:`lz_compile.compile.options.Options`) and Inductor's.

    Raises:
        OptionError: an option of ours is unknown or has a wrong value.
        RewriteFailedError: something of ours failed and ``layerzero.strict`` is set.
    """
    with garbage.of_new_objects():
        from lz_compile.compile.finished import Attempt

        return Attempt.at(module, example_inputs, mode, options).compiled()


def _reset() -> None:
    """Called by ``torch._dynamo.reset()``: forget what was learned in memory (reports stay)."""
    from lz_compile.passes.proof import validate

    validate.forget()


layerzero.reset = _reset  # type: ignore[attr-defined]
