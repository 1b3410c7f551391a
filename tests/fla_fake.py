"""flash-linear-attention as modules with its recorded signatures, computed on the CPU (see ``library_fakes.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.library_fakes import Library

VERSION = "0.6.0"
_COMMON = "scale=None, initial_state=None, output_final_state=False"
_LENGTHS = "cu_seqlens=None, cu_seqlens_cpu=None"
#: The functions of fla-core 0.6.0 that are called: module, parameters, and the file that has them.
SIGNATURES: dict[str, tuple[str, str, str]] = {
    "chunk_simple_gla": (
        "simple_gla",
        f"q, k, v, g=None, g_gamma=None, {_COMMON}, state_v_first=False, {_LENGTHS}, **kwargs",
        "fla/ops/simple_gla/chunk.py",
    ),
    "chunk_gla": ("gla", f"q, k, v, g, {_COMMON}, state_v_first=False, {_LENGTHS}", "fla/ops/gla/chunk.py"),
    "chunk_kda": (
        "kda",
        f"q, k, v, g, beta, {_COMMON}, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None, "
        "disable_recompute=False, return_intermediate_states=False, state_v_first=False, "
        f"{_LENGTHS}, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs",
        "fla/ops/kda/chunk.py",
    ),
    "chunk_gated_delta_rule": (
        "gated_delta_rule",
        f"q, k, v, g, beta, {_COMMON}, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
        f"allow_neg_eigval=False, state_v_first=False, {_LENGTHS}, chunk_indices=None, cp_context=None, **kwargs",
        "fla/ops/gated_delta_rule/chunk.py",
    ),
    "chunk_delta_rule": (
        "delta_rule",
        f"q, k, v, beta, {_COMMON}, use_qk_l2norm_in_kernel=False, {_LENGTHS}, **kwargs",
        "fla/ops/delta_rule/chunk.py",
    ),
    "chunk_dplr_delta_rule": (
        "generalized_delta_rule",
        f"q, k, v, a, b, gk, {_COMMON}, {_LENGTHS}, safe_gate=False, chunk_size=None, disable_recompute=False, "
        "cp_context=None, lower_bound=None, **kwargs",
        "fla/ops/generalized_delta_rule/dplr/chunk.py",
    ),
}


class Fla(Library):
    """``fla.ops``: ``[B, T, H, D]`` of one dtype, decays as logarithms, states in float32; computed step by step."""

    copies = True

    def modules(self) -> dict[str, ModuleType]:
        package, ops = ModuleType("fla"), ModuleType("fla.ops")
        package.ops = ops
        found = {"fla": package, "fla.ops": ops}
        for name, (module, parameters, _) in SIGNATURES.items():
            path = f"fla.ops.{module}"
            found[path] = ModuleType(path)
            setattr(ops, module, found[path])
            scope: dict[str, Any] = {"body": lambda given, name=name: self._run(name, given)}
            exec(f"def function({parameters}):\n    return body(dict(locals()))", scope)
            setattr(found[path], name, scope["function"])
        return found

    def _run(self, name: str, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v = given["q"], given["k"], given["v"]
        self.ran(name, q, k, v)
        assert q.dtype == k.dtype == v.dtype
        assert q.shape == k.shape
        assert q.shape[-1] <= 256
        assert given["scale"] == 1.0, "the library's own scale is not the op's"
        assert given["output_final_state"] is True
        assert name != "chunk_delta_rule" or q.dtype != torch.float32, "it does not support float32"
        state = given["initial_state"]
        assert state is None or state.dtype == torch.float32
        decay = _decay(name, given)
        if name == "chunk_dplr_delta_rule":
            eraser, writer = given["a"].float(), given["b"].float()
        else:
            beta = given.get("beta")
            eraser = None if beta is None else k.float() * decay
            writer = k if beta is None else k.float() * beta.float().unsqueeze(-1)
        return _steps(q, k if name == "chunk_dplr_delta_rule" else writer, v, decay, eraser, writer, state, name)


def _decay(name: str, given: Mapping[str, Any]) -> Tensor:
    """``[B, T, H, K | 1]``, from logarithms that are no more than zero."""
    q = given["q"]
    log = given.get("gk", given.get("g"))
    if log is None:
        assert name in ("chunk_delta_rule", "chunk_simple_gla")
        return torch.ones(*q.shape[:3], 1)
    by_row = name in ("chunk_gla", "chunk_kda", "chunk_dplr_delta_rule")
    assert log.shape == (q.shape if by_row else q.shape[:3])
    assert (log <= 0).all()
    assert log.isfinite().all()
    return log.float().exp() if by_row else log.float().exp().unsqueeze(-1)


def _steps(q, key, v, decay, eraser, writer, state, name) -> tuple[Tensor, Tensor]:
    sign = 1.0 if name == "chunk_dplr_delta_rule" else -1.0
    batch, length, heads, rows = q.shape
    state = torch.zeros(batch, heads, rows, v.shape[-1]) if state is None else state
    out = []
    for t in range(length):
        following = state * decay[:, t].unsqueeze(-1) + key[:, t].float().unsqueeze(-1) * v[:, t].float().unsqueeze(-2)
        if eraser is not None:
            erased = (eraser[:, t].unsqueeze(-1) * state).sum(-2, keepdim=True)
            following = following + sign * writer[:, t].float().unsqueeze(-1) * erased
        state = following
        out.append((q[:, t].float().unsqueeze(-1) * state).sum(-2))
    return torch.stack(out, 1).to(q.dtype), state
