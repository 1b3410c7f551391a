"""What is a weight of the model, rather than computed from its inputs."""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.graph.walks import reached

#: How many nodes are looked at.
_FAR = 64
#: A weight is a matrix; what was made of parameters and has more dimensions may be learned queries.
_WEIGHT_RANK = 2


def is_weight(node: fx.Node) -> bool:
    """Whether a factor is a parameter, or a matrix that was made of parameters alone."""
    source = node
    while source.op != "placeholder" and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if isinstance(tensor_of(source), torch.nn.Parameter):
        return True
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() > _WEIGHT_RANK:
        return False
    above = [*reached([node], most=_FAR)]
    inputs = [tensor_of(each) for each in above if each.op == "placeholder"]
    return 0 < len(inputs) <= len(above) < _FAR and all(isinstance(each, torch.nn.Parameter) for each in inputs)
