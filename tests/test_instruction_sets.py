"""C++ kernels compile for processors other than the one that tests run on: once, none did for AVX-512."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from lz_compile.lowering.cpp.floats import STORED_TYPES, floats
from lz_compile.lowering.kernels.attention import cpp_keys, flash_decoding
from lz_compile.lowering.kernels.attention import cpp_scores as scores
from lz_compile.lowering.kernels.blend import cpp_blend as blend
from lz_compile.lowering.kernels.linear import cpp_source as linear
from lz_compile.lowering.kernels.paged_attention.cpp_program import PAGED
from lz_compile.lowering.kernels.sampling import cpp_sampling as sampling
from lz_compile.lowering.kernels.sampling import cpp_speculation as speculation

COMPILER = os.environ.get("CXX", "g++")
FLAGS = {
    16: ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"],
    8: ["-mavx2", "-mfma", "-mf16c"],
    4: [],
}
pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instructions of x86"),
]


def sources(lanes: int) -> dict[str, str]:
    single, half = torch.float32, torch.bfloat16
    found = {"speculation": f"{floats(lanes)}{speculation.VECTORS}{speculation._CODE}", "scores": scores.source(lanes)}
    for stored in STORED_TYPES:
        is_byte = stored == torch.uint8
        for has_zero, has_codebook in [(False, False), (True, False), *([(False, True)] if is_byte else [])]:
            name = f"linear {stored} {has_zero} {has_codebook}"
            has = {"kIsPacked": is_byte, "kHasZero": has_zero, "kHasOffset": False, "kHasCodebook": has_codebook}
            found[name] = linear.source(stored, lanes, **has)
        for name, entry in (("paged", PAGED), ("few queries", flash_decoding._ENTRY)):
            has = {"has_softcap": True, "has_over": name != "paged", "entry": entry}
            found[f"{name} {stored}"] = cpp_keys.source(stored, 64, 48, lanes, **has)
    for one, other in [(single, single), (half, single)]:
        found[f"blend {one} {other}"] = blend.source(one, other, lanes)
        for result in ("ids", "scores"):
            found[f"sampling {result} {one}"] = sampling.source(result, one, other, one, True, lanes)
    return found


@pytest.mark.parametrize("lanes", FLAGS)
def test_every_program_compiles_for_registers_of_every_width(lanes, tmp_path):
    path = tmp_path / "programs.cpp"
    path.write_text(together(sources(lanes)))
    command = [COMPILER, "-fsyntax-only", "-std=c++20", "-fopenmp", *FLAGS[lanes], str(path)]
    command += [f"-I{each}" for each in include_paths()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, "\n".join(line for line in done.stderr.splitlines() if "error" in line)


def together(programs: dict[str, str]) -> str:
    """One program, whose errors name that which they are of: headers, which take most of the time, are read once."""
    headers, bodies = set(), []
    for place, (name, source) in enumerate(programs.items()):
        lines = source.splitlines()
        headers |= {line for line in lines if line.startswith("#include")}
        body = "\n".join("" if line.startswith("#include") else line.replace('extern "C"', "") for line in lines)
        undone = "\n".join(f"#undef {macro}" for macro in re.findall(r"^\s*#\s*define (\w+)", body, re.MULTILINE))
        bodies.append(f'namespace program_{place} {{\n#line 1 "{name}"\n{body}\n}}\n{undone}')
    return "\n".join([*sorted(headers), *bodies])
