"""What names a record, a kernel or a place is the same in every process, whatever the seed of Python's hashes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backends import USUAL_MACHINE
from problems import problem_context

from lz_compile.runtime.kernels import registry
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perf_record import canonical

TESTS = Path(__file__).parent

#: A file, since kernels are told by their sources.
NAMES = """
import torch, torch.nn.functional as F, lz_compile as lz
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
"""

CHILD = f"""{USUAL_MACHINE}
import json, runpy, sys, torch, lz_compile as lz
q = torch.randn(1, 2, 4, 8)
is_right, _ = lz.validate("lz.dispatch", operation="attention", query=q, key=q, value=q)
print(json.dumps([is_right, runpy.run_path(sys.argv[1])["found"]]))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("names") / "program.py"
    path.write_text(NAMES)
    return str(path)


@pytest.fixture(scope="module")
def elsewhere(program: str) -> tuple[bool, dict[str, Any]]:
    """What a process finds that has another seed than this one, which drew its own if none was given."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, program], env={**os.environ, **variables},
        capture_output=True, text=True, check=True, cwd=TESTS.parent,
    )  # fmt: skip
    is_right, found = json.loads(done.stdout.splitlines()[-1])
    return is_right, found


@pytest.fixture
def here(program: str) -> Iterator[dict[str, Any]]:
    yield runpy.run_path(program)["found"]
    registry.unregister_kernel("new.kernel")


def test_names_of_records_kernels_and_places_are_the_same_in_every_process(elsewhere, here) -> None:
    _, found = elsewhere
    assert found == here
    context = problem_context(64, is_causal=True, training=True)
    assert found["digest with it"] == registry.digest()
    assert found["digest"] != found["digest with it"]
    assert found["workload"] == canonical(workload(context, None, context.hints()))
    assert len(found["surroundings"]) == 16
    assert "registered_new_kernel_" in found["operator"]


def test_an_operator_that_chooses_at_each_call_runs_where_nothing_was_called_eagerly(elsewhere) -> None:
    """It asks what an eager call takes, which is a module that compiling alone does not import."""
    is_right, _ = elsewhere
    assert is_right is True
