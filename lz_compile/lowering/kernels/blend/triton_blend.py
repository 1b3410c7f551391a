"""Blends in Triton (see ``lowering/kernels/blend/triton_source.py``), which is imported when it is called."""

from __future__ import annotations

from lz_compile.lowering.kernels.blend.opaque_blend import blender

blend = blender("triton_blend", "lz.triton_blend", "triton_source", is_cuda_graph_safe=True)
