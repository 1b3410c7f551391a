"""``deterministic: "batch_invariant"``: linears in pieces of rows, and what nothing covers is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from lz_compile.compile.reading import edit_all
from lz_compile.compile.stages import State
from lz_compile.ground import events
from lz_compile.lowering import frames, ops, rows
from lz_compile.passes.editing.edit import MayEdit
from lz_compile.passes.graph.modes import Ambient, ambient_of, grad_enabled
from lz_compile.passes.graph.refusal import module_of, where_of
from lz_compile.passes.graph.view import read, tensor_of
from lz_compile.passes.proof.row_dependence import why_dependent
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.policy.resolved import Policy

#: What people call operators of ATen that sum, by the beginning of their names; others go by their own.
_NAMES: Mapping[str, str] = {
    **dict.fromkeys("mm addmm bmm baddbmm addbmm dot vdot mv addmv addr _trilinear _cdist linalg".split(), "product"),
    "_scaled_dot_product": "attention",
    **dict.fromkeys("_softmax _log_softmax logsumexp _safe_softmax".split(), "softmax"),
    **dict.fromkeys("native_layer_norm native_group_norm _fused_rms_norm native_batch_norm".split(), "norm"),
    **dict.fromkeys("_native_batch_norm batch_norm cudnn_batch_norm".split(), "norm"),
    **dict.fromkeys("sum mean var std norm prod nansum nanmean trace".split(), "reduction"),
    **dict.fromkeys("nll_loss mse_loss smooth_l1_loss huber_loss binary_cross_entropy".split(), "loss"),
    **dict.fromkeys(
        "index_add scatter_add scatter_reduce index_reduce _embedding_bag index_put".split(), "scattered sum"
    ),
    **dict.fromkeys("cumsum cumprod logcumsumexp _logcumsumexp".split(), "running sum"),
    **dict.fromkeys("convolution _convolution mkldnn_convolution".split(), "convolution"),
    **dict.fromkeys("avg_pool adaptive_avg_pool _adaptive_avg_pool".split(), "pooling"),
    **dict.fromkeys("scan associative_scan while_loop flex_attention".split(), "loop"),
}
_OTHER_BITS = "a row may have other bits in another batch"
#: Places that an event names of each kind.
_MOST_PLACES = 3


def is_wanted(policy: Policy) -> bool:
    """Whether rows are to have the same bits in every batch."""
    return policy.settings.deterministic == "batch_invariant"


def replace_linears(state: State) -> None:
    """Compute linears in pieces of rows, where nothing is to be differentiated."""
    if not is_wanted(state.choices.policy):
        return
    edit_all("computing linears in pieces of rows", "REWRITE_FAILED", _replace_linears, state)


def _replace_linears(graph: fx.Graph, may_edit: MayEdit) -> int:
    ambient = ambient_of(graph.nodes)
    found = [node for node in graph.nodes if _may_be_replaced(node, ambient) and may_edit(node)]
    for node in found:
        call = read(node)
        assert call is not None, "looked for above"
        with graph.inserting_before(node):
            new = graph.call_function(rows.linear, (call.input, call.get("weight"), call.get("bias")))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return len(found)


def _may_be_replaced(node: fx.Node, ambient: Mapping[fx.Node, Ambient]) -> bool:
    call, result = read(node), tensor_of(node)
    if call is None or call.name != "linear" or result is None:
        return False
    input, weight, bias = (tensor_of(each) for each in (call.input, call.get("weight"), call.get("bias")))
    around = ambient[node]
    if around.is_transformed or around.autocast or input is None or weight is None:
        return False
    return rows.serves(input, weight, bias, is_graded=grad_enabled(around))


def tell_original(policy: Policy) -> None:
    """An event of a graph that is compiled as it was."""
    if is_wanted(policy):
        events.record("NOT_BATCH_INVARIANT", f"the graph is compiled as it was: {_OTHER_BITS}")


def tell_last_compile(policy: Policy) -> None:
    """An event where Dynamo gives up: it calls the function eagerly with sizes that none of its compiles is for."""
    if is_wanted(policy) and frames.compiles_left() == 0:
        text = "Dynamo compiles this function no more, and runs it eagerly at any other sizes"
        events.record(
            "NOT_BATCH_INVARIANT", f"{text}: {_OTHER_BITS}. Mark sizes that change as dynamic, or raise its limit"
        )


def tell_uncovered(state: State) -> None:
    """An event that counts what may give a row other bits in another batch, and says where it is."""
    if not is_wanted(state.choices.policy):
        return
    uncovered = {node: why for node in state.module.graph.nodes if (why := why_dependent(node, _keeps_rows))}
    if not uncovered:
        return
    kinds: dict[str, list[fx.Node]] = {}
    for node, why in uncovered.items():
        kinds.setdefault(_called(node, why), []).append(node)
    told = ", ".join(f"{len(of)} {_several(kind) if len(of) > 1 else kind}" for kind, of in kinds.items())
    are = "is" if len(uncovered) == 1 else "are"
    text = f"{told} {are} not covered: {_OTHER_BITS}"
    if any(result.requires_grad for result in map(tensor_of, uncovered) if result is not None):
        text += "; kernels whose rows have bits of their own give no gradients: use torch.no_grad()"
    events.record("NOT_BATCH_INVARIANT", f"{text} ({'; '.join(map(_places, kinds, kinds.values()))})")


def _keeps_rows(kernel_id: str) -> bool:
    """Whether a kernel of ours or of the user's says so of itself, or computes the linears that are replaced here."""
    specs = [found for op in ops.names() if (found := kernels(op).get(kernel_id)) is not None]
    return kernel_id == rows.KERNEL_ID or any(spec.batch_invariant and spec.split_invariant for spec in specs)


def _places(kind: str, nodes: Sequence[fx.Node]) -> str:
    """Where some calls are: their modules, or lines of the user's code outside of any."""
    places = [*dict.fromkeys(module_of(node) or where_of(node) for node in nodes)]
    return f"{kind}: {', '.join(places[:_MOST_PLACES])}{', ...' if len(places) > _MOST_PLACES else ''}"


def _called(node: fx.Node, operator: str) -> str:
    """What people call a call that comes to an operator."""
    call = read(node)
    if call is not None and call.name == "linear":
        return "linear"
    names = [name for name in _NAMES if operator.startswith(name)]
    return _NAMES[max(names, key=len)] if names else f"{call.name if call else node.target} ({operator})"


def _several(kind: str) -> str:
    return kind if kind == "pooling" else f"{kind}es" if kind.endswith(("x", "s")) else f"{kind}s"
