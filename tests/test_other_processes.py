"""What names a record, a kernel or a place is the same in every process, whatever the seed of Python's hashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from problems import problem_context

from lz_compile.runtime.kernels import registry
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perf_record import canonical

TESTS = Path(__file__).parent

CHILD = """
import json, torch, torch.nn.functional as F, lz_compile as lz
from problems import problem_context
from test_surroundings import attention, of, tensors
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.convention import operator_name
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perf_record import canonical

def block(q, k, v):
    return F.gelu(torch.tanh(attention(torch.cos(q), F.silu(k), v)) * 2)

context = problem_context(64, is_causal=True, training=True)
found = {
    "surroundings": of(block, *tensors(2, 3, 8, 16)).surroundings,
    "digest": registry.digest(),
    "workload": canonical(workload(context, None, context.hints())),
}

@lz.register_kernel(operation="attention", kernel_id="new.kernel", platform="cpu", supported_dtypes=["float32"],
                    supports=["gqa", "value_dim", "bool_mask"])
def function(q, k, v, attn_mask=None):
    return sum((x for x in (q, k) if x.dtype in {torch.float32, torch.float16}), v)

found["identity"] = registry.kernels("attention")["new.kernel"].identity
found["digest with it"] = registry.digest()
found["operator"] = operator_name("new.kernel", function, 0)
print(json.dumps(found))
"""


def test_names_of_records_kernels_and_places_are_the_same_in_every_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # kernels are told by their sources
    program.write_text(CHILD)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    one, other = (
        json.loads(
            subprocess.run(
                [sys.executable, str(program)], capture_output=True, text=True, check=True, cwd=TESTS.parent,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            ).stdout.splitlines()[-1]
        )
        for seed in ("1", "2")
    )  # fmt: skip
    assert one == other
    context = problem_context(64, is_causal=True, training=True)
    assert one["digest"] == registry.digest()
    assert one["digest"] != one["digest with it"]
    assert one["workload"] == canonical(workload(context, None, context.hints()))
    assert len(one["surroundings"]) == 16
    assert "registered_new_kernel_" in one["operator"]


def test_an_operator_that_chooses_at_each_call_runs_where_nothing_was_called_eagerly() -> None:
    """It asks what an eager call takes, which is a module that compiling alone does not import."""
    program = (
        "import torch, lz_compile as lz; q = torch.randn(1, 2, 4, 8);"
        'print(lz.validate("lz.dispatch", operation="attention", query=q, key=q, value=q))'
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS.parent).stdout
    assert found.splitlines()[-1].startswith("(True,")
