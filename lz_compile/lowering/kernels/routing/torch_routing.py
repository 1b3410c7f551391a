"""A routed adapter by PyTorch's operations, which Inductor fuses: two products instead of four in each direction.

Frozen and trainable factors are joined, so that ``x``, the result and the gradients of both are passed over once.
"""

from __future__ import annotations

from lz_compile.lowering.kernels.routing.function import operator
from lz_compile.lowering.kernels.routing.steps import PYTORCH

routing = operator("torch_routing", PYTORCH)
