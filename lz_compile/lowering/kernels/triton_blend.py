"""Blends in Triton (see ``lowering/triton/blend.py``), which is imported when it is called."""

from __future__ import annotations

from lz_compile.lowering.opaque_blend import BlendCode, blender


def _code() -> BlendCode:
    from lz_compile.lowering.triton import blend as code

    return code


blend = blender("triton_blend", "lz.triton_blend", _code, is_cuda_graph_safe=True)
