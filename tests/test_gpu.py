"""Every kernel of every op on a GPU, at sizes of models: what it says it can do is right, against float64.

Whether each is chosen is no subject here. Tests of kernels in Triton's interpreter, of recognisers and of whole models run on
a GPU too, if ``LZ_TEST_DEVICE=cuda`` says where their tensors are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lz_compile as lz
from lz_compile.api.given import read
from lz_compile.ground import health
from lz_compile.lowering import ops
from lz_compile.lowering.bands import Band
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.usefixtures("no_preference")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def share(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") * 0.5 + 0.4


def heads(queries: int = 300, keys: int = 300, *, groups: int = 1, dim: int = 64) -> dict[str, Tensor]:
    few = 8 // groups
    return {
        "query": normal(2, 8, queries, dim), "key": normal(2, few, keys, dim), "value": normal(2, few, keys, dim),
    }  # fmt: skip


def cache(requests: int, queries: int | None = None) -> dict[str, Tensor]:
    table = torch.randperm(requests * 20, device="cuda").reshape(requests, 20).int()
    return {
        "query": normal(queries or requests, 8, 64), "key_cache": normal(requests * 20, 16, 2, 64),
        "value_cache": normal(requests * 20, 16, 2, 64), "block_table": table,
        "lengths": torch.randint(60, 321, (requests,), device="cuda").int(),
    }  # fmt: skip


def documents(length: int) -> Tensor:
    return (torch.arange(length, device="cuda") * 3 // length).expand(2, -1).contiguous()


def steps(length: int, **parts: Tensor) -> dict[str, Tensor]:
    return {"state": normal(2, 4, 64, 64), "query": normal(2, 4, length, 1, 64), **parts}


def update(length: int, *, has_erase: bool = False) -> dict[str, Tensor]:
    key = F.normalize(normal(2, 4, length, 1, 64), dim=-1)
    found = {"left": key * share(2, 4, length, 1, 1), "right": normal(2, 4, length, 1, 64)}
    return {**found, "erase": key} if has_erase else found


#: Operands and attributes by operation and form.
PROBLEMS: Mapping[tuple[str, str], Any] = {
    ("attention", "full"): heads,
    ("attention", "wide heads"): lambda: heads(dim=128),
    ("attention", "odd heads"): lambda: heads(100, 100, dim=80),
    ("attention", "one query"): lambda: heads(1, 700),
    ("attention", "one query of a group"): lambda: {**heads(1, 700, groups=4), "enable_gqa": True},
    ("attention", "boolean mask"): lambda: {**heads(), "mask": torch.rand(2, 1, 300, 300, device="cuda") > 0.1},
    ("attention", "bias"): lambda: {**heads(), "bias": normal(1, 8, 300, 300)},
    ("attention", "bias for all"): lambda: {**heads(), "bias": normal(1, 1, 300, 300)},
    ("attention", "bias that masks rows"): lambda: {
        **heads(), "bias": normal(2, 1, 300, 300).where(torch.arange(300, device="cuda")[:, None] % 7 > 0, -3e38)
    },
    ("attention", "slopes"): lambda: {**heads(), "slopes": share(1, 8, 1, 1), "is_causal": True},
    ("attention", "sinks"): lambda: {**heads(), "sinks": normal(1, 8, 1, 1), "is_causal": True},
    ("attention", "softcap"): lambda: {**heads(), "softcap": 20.0, "is_causal": True},
    ("attention", "window"): lambda: {**heads(), "band": Band(-99, 0)},
    ("attention", "documents"): lambda: {
        **heads(), "query_documents": documents(300), "key_documents": documents(300), "is_causal": True
    },
    ("attention.causal", "square"): heads,
    ("attention.causal", "of a group"): lambda: {**heads(groups=4), "enable_gqa": True},
    ("blend.convex", "rows"): lambda: {
        "host": normal(64, 512, 49), "seed": normal(64, 512, 49), "alpha": share(64, 1, 1)
    },
    ("blend.convex", "a number"): lambda: {"host": normal(64, 512, 49), "seed": normal(64, 512, 49), "alpha": 0.3},
    ("blend.residual", "rows"): lambda: {
        "host": normal(64, 512, 49), "seed": normal(64, 512, 49), "alpha": share(64, 1, 1)
    },
    ("blend.confidence", "rows"): lambda: {
        "host": normal(64, 512, 49), "seed": normal(64, 512, 49), "alpha": share(64, 1, 1), "logits": normal(64, 1000)
    },
    ("linear.quantised", "int8"): lambda: {
        "input": normal(3, 512), "weight": torch.randint(-128, 128, (300, 512), device="cuda").to(torch.int8),
        "scale": share(300, 1) / 100,
    },
    ("linear.quantised", "int4 in groups"): lambda: {
        "input": normal(33, 512), "weight": torch.randint(0, 256, (300, 256), device="cuda").to(torch.uint8),
        "scale": share(300, 4) / 100, "zero": normal(300, 4), "packing": "low_first",
    },
    ("paged_attention.decode", "of a group"): lambda: cache(5),
    ("paged_attention.decode", "window and sinks"): lambda: {**cache(5), "window": 100, "sinks": normal(8)},
    ("paged_attention.ragged", "of a group"): lambda: {
        **cache(5, 90), "query_starts": torch.tensor([0, 1, 40, 40, 41, 90], device="cuda").int()
    },
    ("mlp.gated", "rows"): lambda: {"gate": normal(500, 1408), "up": normal(500, 1408)},
    ("mlp.plain", "rows"): lambda: {"gate": normal(500, 1408), "activation": "gelu"},
    ("norm.rms", "rows"): lambda: {"input": normal(500, 4096), "weight": normal(4096)},
    ("norm.rms", "odd rows"): lambda: {"input": normal(77, 1001), "weight": normal(1001)},
    ("norm.layer", "rows"): lambda: {"input": normal(500, 4096), "weight": normal(4096), "bias": normal(4096)},
    ("rope", "halves"): lambda: {
        "input": normal(2, 8, 300, 128), "cos": normal(1, 1, 300, 128), "sin": normal(1, 1, 300, 128)
    },
    ("rope", "interleaved"): lambda: {
        "input": normal(2, 8, 300, 128), "cos": normal(1, 1, 300, 128), "sin": normal(1, 1, 300, 128),
        "is_interleaved": True,
    },
    ("sampling.ids", "limits"): lambda: {
        "logits": normal(33, 32000), "temperature": share(33), "top_p": share(33),
        "top_k": torch.full((33,), 50, dtype=torch.int32, device="cuda"), "seeds": torch.arange(33, device="cuda"),
    },
    ("sampling.ids", "mask"): lambda: {
        "logits": normal(33, 32000), "seeds": torch.arange(33, device="cuda"),
        "bitmask": torch.randint(-(2**31), 2**31, (33, 1000), device="cuda").int(),
    },
    ("sampling.probs", "limits"): lambda: {"logits": normal(33, 32000), "min_p": share(33) * 0.1},
    ("scan.delta", "kda"): lambda: steps(200, decay=share(2, 4, 200, 64, 1), **update(200, has_erase=True)),
    ("scan.delta", "one decay"): lambda: steps(200, decay=share(2, 4, 200, 1, 1), **update(200, has_erase=True)),
    ("scan.delta", "no decay"): lambda: steps(200, **update(200, has_erase=True)),
    ("scan.diagonal", "gated linear attention"): lambda: steps(200, decay=share(2, 4, 200, 64, 1), **update(200)),
    ("scan.diagonal", "one decay"): lambda: steps(200, decay=share(2, 4, 200, 1, 1), **update(200)),
    ("scan.diagonal", "element decays"): lambda: steps(200, decay=share(2, 4, 200, 64, 64), **update(200)),
    ("scan.diagonal", "average"): lambda: {
        "state": normal(2, 1, 1, 512), "decay": share(2, 1, 700, 1, 512), "drive": normal(2, 1, 700, 1, 512)
    },
}  # fmt: skip


def given(operation: str, form: str, dtype: torch.dtype, *, wants: bool) -> dict[str, Any]:
    module = ops.module(operation.partition(".")[0])
    found = PROBLEMS[operation, form]()
    for name, each in found.items():
        if isinstance(each, Tensor) and each.is_floating_point():
            keeps = name in ("temperature", "top_p", "min_p")
            found[name] = (each if keeps else each.to(dtype)).requires_grad_(wants and name in module.DIFFERENTIABLE)
    return found


@pytest.mark.parametrize("wants", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operation", "form"), PROBLEMS)
def test_what_a_kernel_says_that_it_can_do_is_right(operation: str, form: str, dtype: torch.dtype, wants: bool) -> None:
    operands = given(operation, form, dtype, wants=wants)
    context = read("validate", operation, (), operands).context
    able = [
        name
        for name, spec in kernels(operation.partition(".")[0]).items()
        if name != INDUCTOR and not spec.check(context) and spec.load() is None
    ]
    verdicts = {name: lz.validate(name, operation=operation, **operands) for name in able}
    assert not {name: [str(each) for each in reasons] for name, (ok, reasons) in verdicts.items() if not ok}
    assert not health.retirements()
    assert able, "nothing but Inductor's own code"
