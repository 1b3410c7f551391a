"""Scans that stay: Inductor does not compile those whose steps give nothing. Of those that went, the steps go, too."""

from __future__ import annotations

import operator

import torch
from torch import fx

from lz_compile.passes.view import tensor_of, value_of

_SCAN = torch.ops.higher_order.scan


#: What the steps of our own making are called.
_OURS = ("loop_body_", "scan_part_")


def drop_steps(module: fx.GraphModule) -> None:
    """Delete the steps of our own making that no scan calls any more."""
    named = module.graph.find_nodes(op="get_attr")
    for node in named:
        if not node.users and str(node.target).startswith(_OURS):
            module.graph.erase_node(node)
    used = {str(node.target) for node in named if node.users}
    for name, child in list(module.named_children()):
        if isinstance(child, fx.GraphModule) and name.startswith(_OURS) and name not in used:
            module.delete_submodule(name)


def give_results(module: fx.GraphModule) -> int:
    """Let the steps of such scans give a zero that nobody reads, in place; how many scans there were."""
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=_SCAN):
        callee, init, xs = node.args[:3]
        body = operator.attrgetter(str(callee.target))(module)
        (output,) = body.graph.find_nodes(op="output")
        outputs = list(output.args[0])
        if len(outputs) > len(init) + 1 or len(value_of(node)) > len(init):
            continue
        if len(outputs) == len(init):
            like = tensor_of(outputs[0]) if tensor_of(outputs[0]) is not None else tensor_of(init[0])
            assert like is not None, "what is carried is a tensor"
            with body.graph.inserting_before(output):
                zero = body.graph.call_method("new_zeros", (outputs[0], ()))
            zero.meta["example_value"] = like.new_zeros(())
            output.args = ([*outputs, zero],)
            body.recompile()
        steps = tensor_of(xs[0])
        assert steps is not None, "steps are counted by a tensor"
        node.meta["example_value"] = (*value_of(node), steps.new_empty(steps.shape[:1], dtype=value_of(node)[0].dtype))
        count += 1
    return count
