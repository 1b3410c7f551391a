"""``deterministic: "batch_invariant"``: linears in pieces of rows, and what nothing covers is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lz_compile.compile.stages import State
from lz_compile.ground import events
from lz_compile.lowering import rows
from lz_compile.passes.editing.edit import Rewrite
from lz_compile.passes.graph.modes import Ambient, ambient_of, grad_enabled
from lz_compile.passes.graph.view import read, tensor_of

#: Calls that stay PyTorch's or Inductor's and sum over something, as people call them.
_SUMMING: Mapping[str, str] = {
    "linear": "linear",
    **dict.fromkeys(
        "matmul mm bmm addmm baddbmm addbmm einsum dot mv tensordot bilinear inner trace".split(), "product"
    ),
    **dict.fromkeys("vecdot linalg_vecdot multi_dot linalg_multi_dot cdist cosine_similarity".split(), "product"),
    **dict.fromkeys("linalg_solve linalg_inv linalg_cholesky pairwise_distance".split(), "product"),
    "scaled_dot_product_attention": "attention",
    "multi_head_attention_forward": "attention",
    **dict.fromkeys("softmax log_softmax logsumexp softmin gumbel_softmax".split(), "softmax"),
    **dict.fromkeys("layer_norm rms_norm group_norm batch_norm instance_norm normalize".split(), "norm"),
    **dict.fromkeys("sum mean var std norm linalg_norm vector_norm linalg_vector_norm".split(), "reduction"),
    **dict.fromkeys("var_mean std_mean prod nansum nanmean cov".split(), "reduction"),
    **dict.fromkeys("cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div".split(), "loss"),
    **dict.fromkeys("binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss".split(), "loss"),
    **dict.fromkeys(
        "index_add scatter_add scatter_reduce index_reduce embedding_bag bincount".split(), "scattered sum"
    ),
    **dict.fromkeys("cumsum cumprod logcumsumexp".split(), "running sum"),
    **{f"{kind}{dims}d": "convolution" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3)},
    **{f"{kind}avg_pool{dims}d": "pooling" for kind in ("", "adaptive_") for dims in (1, 2, 3)},
    **dict.fromkeys("scan associative_scan while_loop flex_attention".split(), "loop"),
}


def is_wanted(state: State) -> bool:
    """Whether rows are to have the same bits in every batch."""
    return state.choices.policy.settings.deterministic == "batch_invariant"


def replace_linears(state: State) -> None:
    """Compute linears in pieces of rows, where nothing is to be differentiated."""
    if not is_wanted(state):
        return
    module, ambient = state.module, ambient_of(state.module.graph.nodes)
    found = [node for node in module.graph.nodes if _may_be_replaced(node, ambient)]
    if not found:
        return

    def replaced() -> bool:
        for node in found:
            call = read(node)
            assert call is not None, "looked for above"
            operands = (call.input, call.get("weight"), call.get("bias"))
            with module.graph.inserting_before(node):
                new = module.graph.call_function(rows.linear, operands)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
        return True

    state.change(Rewrite("computing linears in pieces of rows", replaced))


def _may_be_replaced(node: fx.Node, ambient: Mapping[fx.Node, Ambient]) -> bool:
    call, result = read(node), tensor_of(node)
    if call is None or call.name != "linear" or result is None or result.device.type != "cpu":
        return False
    tensors = [tensor_of(each) for each in (call.input, call.get("weight"), call.get("bias"))]
    given = [each for each in tensors if each is not None]
    around = ambient[node]
    if any(map(is_traceable_wrapper_subclass, given)):  # sharded ones know no operator of ours
        return False
    if around.is_transformed or around.autocast or tensors[0] is None or tensors[1] is None:
        return False
    is_graded = grad_enabled(around) and any(each.requires_grad for each in given)
    is_plain = result.is_floating_point() and tensors[1].dim() == 2 and {each.dtype for each in given} == {result.dtype}
    return is_plain and not is_graded


def tell_uncovered(state: State) -> None:
    """An event that counts what may give a row other bits in another batch."""
    if not is_wanted(state):
        return
    calls = [call for node in state.module.graph.nodes if (call := read(node)) is not None]
    counts = Counter(_SUMMING[call.name] for call in calls if call.name in _SUMMING)
    if counts:
        told = ", ".join(f"{count} {_several(kind) if count > 1 else kind}" for kind, count in counts.items())
        are = "is" if sum(counts.values()) == 1 else "are"
        events.record("NOT_BATCH_INVARIANT", f"{told} {are} not covered: a row may have other bits in another batch")


def _several(kind: str) -> str:
    return kind if kind == "pooling" else f"{kind}es" if kind.endswith(("x", "s")) else f"{kind}s"
