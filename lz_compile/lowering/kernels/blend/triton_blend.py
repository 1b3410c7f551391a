"""Blends in Triton (see ``lowering/kernels/blend/triton_source.py``), which is imported when it is called."""

from __future__ import annotations

from lz_compile.lowering.kernels.blend.opaque_blend import BlendCode, blender


def _code() -> BlendCode:
    from lz_compile.lowering.kernels.blend import triton_source as code

    return code


blend = blender("triton_blend", "lz.triton_blend", _code, is_cuda_graph_safe=True)
