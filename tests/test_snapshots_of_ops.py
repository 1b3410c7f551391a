"""What becomes of every op: its graph before and after, the report, and a near miss. `EXPECTTEST_ACCEPT=1` writes them anew."""

from __future__ import annotations

import math

import expecttest
import torch
import torch.nn.functional as F
from canonical import missed, rewritten
from torch import Tensor
from torch._higher_order_ops import scan

import lz_compile as lz
from lz_compile.passes.recognisers import recognisers


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


def paged(requests: int) -> tuple[Tensor, ...]:
    """Query, cache, tables and lengths."""
    table, lengths = torch.ones(requests, 2, dtype=torch.int32), torch.ones(requests, dtype=torch.int32)
    return random(requests, 4, 8), random(5, 2, 2, 8), random(5, 2, 2, 8), table, lengths


class Snapshots(expecttest.TestCase):
    def test_every_recogniser_is_here(self) -> None:
        names = [name.removeprefix("test_") for name in dir(self) if name.startswith("test_")]
        written = [name for name in names if name.endswith("_is_rewritten")]
        nearly = [name for name in names if "_nearly_" in name]
        for op in recognisers():
            assert any(name.startswith(f"{op}_") for name in written), op
            assert any(name.startswith(f"{op}_nearly_") for name in nearly), op

    # ---- attention -----------------------------------------------------------------------------------------------------

    def test_attention_with_a_causal_mask_is_rewritten(self) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            places = torch.arange(scores.shape[-1])
            return scores.masked_fill(places > places[:, None], -math.inf).softmax(-1) @ value

        inputs = [random(2, 3, 5, 16) for _ in range(3)]
        self.assertExpectedInline(
            rewritten(function, *inputs, lock={"attention": "torch.sdpa"}, assume_finite=True),
            """\
before:
  key: f32[2, 3, 5, 16]
  query: f32[2, 3, 5, 16]
  value: f32[2, 3, 5, 16]
  transpose: f32[2, 3, 16, 5] = transpose(key, -2, -1)
  matmul: f32[2, 3, 5, 5] = matmul(query, transpose)
  truediv: f32[2, 3, 5, 5] = truediv(matmul, 4.0)
  arange: i64[5] = arange(5)
  getitem: i64[5, 1] = getitem(arange, [:, None])
  gt: b8[5, 5] = gt(arange, getitem)
  masked_fill: f32[2, 3, 5, 5] = masked_fill(truediv, gt, -inf)
  softmax: f32[2, 3, 5, 5] = softmax(masked_fill, -1)
  matmul_2: f32[2, 3, 5, 16] = matmul(softmax, value)
  return [matmul_2]
after:
  key: f32[2, 3, 5, 16]
  query: f32[2, 3, 5, 16]
  value: f32[2, 3, 5, 16]
  scaled_dot_product_attention: f32[2, 3, 5, 16] = scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=True, scale=0.25, enable_gqa=False)
  return [scaled_dot_product_attention]
report:
  attention: torch.sdpa, rewritten, at `return scores.masked_fill(places > places[:, None], -math.inf).softmax(-1) @ value`
    attributes: scale=0.25, is_causal, bias_is_finite, masks_keys, nan_is_open
    mask: causal
    why: locked by options['layerzero.lock']""",
        )

    def test_attention_nearly_when_scores_pass_through_softplus(self) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.softplus(query @ key.transpose(-2, -1)).softmax(-1) @ value

        self.assertExpectedInline(
            missed(function, *[random(2, 3, 5, 16) for _ in range(3)]),
            """\
near miss of attention at `return F.softplus(query @ key.transpose(-2, -1)).softmax(-1) @ value`
  [SCORES_NOT_AFFINE] the scores pass through softplus
  -> scale, mask, bias or tanh-cap the scores; other functions have no kernel""",
        )

    # ---- norm ----------------------------------------------------------------------------------------------------------

    def test_norm_of_rows_is_rewritten(self) -> None:
        def function(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

        self.assertExpectedInline(
            rewritten(function, random(4, 8), random(8), lock={"norm": "torch.norm"}),
            """\
before:
  x: f32[4, 8]
  weight: f32[8]
  square: f32[4, 8] = square(x)
  mean: f32[4, 1] = mean(square, -1, keepdim=True)
  add: f32[4, 1] = add(mean, 1e-06)
  rsqrt: f32[4, 1] = rsqrt(add)
  mul: f32[4, 8] = mul(x, rsqrt)
  mul_2: f32[4, 8] = mul(mul, weight)
  return [mul_2]
after:
  x: f32[4, 8]
  weight: f32[8]
  rms_norm: f32[4, 8] = rms_norm(x, [8], weight=weight, eps=1e-06)
  return [rms_norm]
report:
  norm: torch.norm, rewritten, at `return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight`
    attributes: eps=1e-06, eps_at=inside, has_weight, weight_offset=0.0, compute_dtype=torch.float32, rounded_to=torch.float32, out_dtype=torch.float32
    why: locked by options['layerzero.lock']""",
        )

    def test_norm_nearly_when_a_statistic_is_of_other_rows(self) -> None:
        def function(x: Tensor) -> Tensor:
            return (x - x.mean(0, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-2)

        self.assertExpectedInline(
            missed(function, random(8, 8)),
            """\
near miss of norm at `return (x - x.mean(0, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-2)`
  [STATISTICS_DIFFER] mean and variance are over different dimensions
  -> use the same""",
        )

    # ---- rope ----------------------------------------------------------------------------------------------------------

    def test_rope_of_halves_is_rewritten(self) -> None:
        def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        self.assertExpectedInline(
            rewritten(function, random(2, 3, 5, 8), random(5, 8), random(5, 8), lock={"rope": "torch.rope"}),
            """\
before:
  x: f32[2, 3, 5, 8]
  cos: f32[5, 8]
  sin: f32[5, 8]
  chunk = chunk(x, 2, -1)
  getitem: f32[2, 3, 5, 4] = getitem(chunk, 0)
  getitem_2: f32[2, 3, 5, 4] = getitem(chunk, 1)
  mul: f32[2, 3, 5, 8] = mul(x, cos)
  neg: f32[2, 3, 5, 4] = neg(getitem_2)
  cat: f32[2, 3, 5, 8] = cat([neg, getitem], -1)
  mul_2: f32[2, 3, 5, 8] = mul(cat, sin)
  add: f32[2, 3, 5, 8] = add(mul, mul_2)
  return [add]
after:
  x: f32[2, 3, 5, 8]
  cos: f32[5, 8]
  sin: f32[5, 8]
  reshape: f32[5, 2, 4] = reshape(cos, [5, 2, 4])
  reshape_2: f32[1, 1, 5, 2, 4] = reshape(reshape, [1, 1, 5, 2, 4])
  reshape_3: f32[1, 1, 5, 8] = reshape(reshape_2, [1, 1, 5, 8])
  reshape_4: f32[5, 2, 4] = reshape(sin, [5, 2, 4])
  reshape_5: f32[1, 1, 5, 2, 4] = reshape(reshape_4, [1, 1, 5, 2, 4])
  reshape_6: f32[1, 1, 5, 8] = reshape(reshape_5, [1, 1, 5, 8])
  chunk = chunk(x, 2, -1)
  getitem: f32[2, 3, 5, 4] = getitem(chunk, 0)
  getitem_2: f32[2, 3, 5, 4] = getitem(chunk, 1)
  chunk_2 = chunk(reshape_3, 2, -1)
  getitem_3: f32[1, 1, 5, 4] = getitem(chunk_2, 0)
  getitem_4: f32[1, 1, 5, 4] = getitem(chunk_2, 1)
  chunk_3 = chunk(reshape_6, 2, -1)
  getitem_5: f32[1, 1, 5, 4] = getitem(chunk_3, 0)
  getitem_6: f32[1, 1, 5, 4] = getitem(chunk_3, 1)
  mul: f32[2, 3, 5, 4] = mul(getitem, getitem_3)
  mul_2: f32[2, 3, 5, 4] = mul(getitem_2, getitem_5)
  sub: f32[2, 3, 5, 4] = sub(mul, mul_2)
  mul_3: f32[2, 3, 5, 4] = mul(getitem_2, getitem_4)
  mul_4: f32[2, 3, 5, 4] = mul(getitem, getitem_6)
  add: f32[2, 3, 5, 4] = add(mul_3, mul_4)
  cat: f32[2, 3, 5, 8] = cat([sub, add], -1)
  reshape_7: f32[2, 3, 5, 2, 4] = reshape(cat, [2, 3, 5, 2, 4])
  reshape_8: f32[2, 3, 5, 8] = reshape(reshape_7, [2, 3, 5, 8])
  return [reshape_8]
report:
  rope: torch.rope, rewritten, at `return x * cos + torch.cat((-second, first), -1) * sin`
    attributes: rotary_dim=8, rotary_start=0, compute_dtype=torch.float32, out_dtype=torch.float32
    why: locked by options['layerzero.lock']""",
        )

    def test_rope_nearly_when_the_rotated_half_is_returned(self) -> None:
        def function(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            first, second = x.chunk(2, -1)
            rotated = torch.cat((-second, first), -1)
            return x * cos + rotated * sin, rotated

        self.assertExpectedInline(
            missed(function, random(2, 3, 5, 8), random(5, 8), random(5, 8)),
            """\
near miss of rope at `return x * cos + rotated * sin, rotated`
  [INTERIOR_USED] rotated is also returned
  -> use the result of the rotation only""",
        )

    # ---- mlp -----------------------------------------------------------------------------------------------------------

    def test_mlp_with_a_gate_is_rewritten(self) -> None:
        def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
            hidden = F.linear(x, gate)
            return hidden * torch.sigmoid(hidden) * F.linear(x, up)

        self.assertExpectedInline(
            rewritten(function, random(4, 8), random(12, 8), random(12, 8), lock={"mlp": "torch.mlp"}),
            """\
before:
  x: f32[4, 8]
  gate: f32[12, 8]
  up: f32[12, 8]
  linear: f32[4, 12] = linear(x, gate)
  sigmoid: f32[4, 12] = sigmoid(linear)
  mul: f32[4, 12] = mul(linear, sigmoid)
  linear_2: f32[4, 12] = linear(x, up)
  mul_2: f32[4, 12] = mul(mul, linear_2)
  return [mul_2]
after:
  x: f32[4, 8]
  gate: f32[12, 8]
  up: f32[12, 8]
  linear: f32[4, 12] = linear(x, gate)
  linear_2: f32[4, 12] = linear(x, up)
  silu: f32[4, 12] = silu(linear, inplace=False)
  mul: f32[4, 12] = mul(silu, linear_2)
  return [mul]
report:
  mlp: torch.mlp, rewritten, at `return hidden * torch.sigmoid(hidden) * F.linear(x, up)`
    attributes: activation=silu, is_gated, up_offset=0.0, compute_dtype=torch.float32, out_dtype=torch.float32
    why: locked by options['layerzero.lock']""",
        )

    def test_mlp_nearly_when_the_activated_gate_is_returned(self) -> None:
        def function(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
            activated = F.silu(F.linear(x, gate))
            return activated * F.linear(x, up), activated

        self.assertExpectedInline(
            missed(function, random(4, 8), random(12, 8), random(12, 8)),
            """\
near miss of mlp at `return activated * F.linear(x, up), activated`
  [INTERIOR_USED] activated is also returned
  -> use the activation for its product only""",
        )

    # ---- linear --------------------------------------------------------------------------------------------------------

    def test_linear_with_two_numbers_in_a_byte_is_rewritten(self) -> None:
        def function(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
            numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
            return x @ ((numbers.to(torch.int8) - 8) * scale).t()

        inputs = random(3, 8), torch.arange(16, dtype=torch.uint8).view(4, 4), random(4, 1)
        self.assertExpectedInline(
            rewritten(function, *inputs, lock={"linear": "lz.cpp_linear"}),
            """\
before:
  packed: u8[4, 4]
  scale: f32[4, 1]
  x: f32[3, 8]
  and: u8[4, 4] = and(packed, 15)
  rshift: u8[4, 4] = rshift(packed, 4)
  stack: u8[4, 4, 2] = stack([and, rshift], -1)
  flatten: u8[4, 8] = flatten(stack, 1)
  to: i8[4, 8] = to(flatten, torch.int8)
  sub: i8[4, 8] = sub(to, 8)
  mul: f32[4, 8] = mul(sub, scale)
  t: f32[8, 4] = t(mul)
  matmul: f32[3, 4] = matmul(x, t)
  return [matmul]
after:
  packed: u8[4, 4]
  scale: f32[4, 1]
  x: f32[3, 8]
  new_full: f32[1, 1] = new_full(x, [1, 1], 8.0, dtype=torch.float32)
  cpp_linear: f32[3, 4] = cpp_linear(x, packed, scale, new_full, None, None, None, None, {"packing": "low_first", "is_transposed": false, "has_scale": true, "has_zero": true, "has_offset": false, "has_bias": false, "has_codebook": false, "has_order": false, "is_native": false, "compute_dtype": "torch.float32", "out_dtype": "torch.float32"})
  return [cpp_linear]
report:
  linear: lz.cpp_linear, rewritten, at `return x @ ((numbers.to(torch.int8) - 8) * scale).t()`
    attributes: packing=low_first, has_scale, has_zero, compute_dtype=torch.float32, out_dtype=torch.float32
    why: locked by options['layerzero.lock']""",
        )

    def test_linear_nearly_when_its_weight_is_returned(self) -> None:
        def function(x: Tensor, stored: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            weight = stored * scale
            return F.linear(x, weight), weight

        inputs = random(3, 8), torch.ones(4, 8, dtype=torch.int8), random(4, 1)
        self.assertExpectedInline(
            missed(function, *inputs),
            """\
near miss of linear at `return F.linear(x, weight), weight`
  [INTERIOR_USED] weight is also returned
  -> use the dequantised weight for one product only""",
        )

    # ---- paged attention -----------------------------------------------------------------------------------------------

    def test_paged_attention_that_is_called_is_rewritten(self) -> None:
        self.assertExpectedInline(
            rewritten(lz.paged_attention, *paged(3), lock={"paged_attention": "torch.paged_attention"}),
            """\
before:
  query: f32[3, 4, 8]
  key_cache: f32[5, 2, 2, 8]
  value_cache: f32[5, 2, 2, 8]
  block_table: i32[3, 2]
  lengths: i32[3]
  paged_attention: f32[3, 4, 8] = paged_attention(query, key_cache, value_cache, block_table, lengths, None, None, None, None, None, None, None, None, torch.float32, ...)
  reshape: f32[3, 4, 8] = reshape(paged_attention, 3, 4, 8)
  return [reshape]
after:
  query: f32[3, 4, 8]
  key_cache: f32[5, 2, 2, 8]
  value_cache: f32[5, 2, 2, 8]
  block_table: i32[3, 2]
  lengths: i32[3]
  long: i64[3, 2] = long(block_table)
  clamp: i64[3, 2] = clamp(long, 0, 4)
  getitem: f32[3, 2, 2, 2, 8] = getitem(key_cache, clamp)
  to: f32[3, 2, 2, 2, 8] = to(getitem, torch.float32)
  lt: b8[3, 2] = lt(block_table, 0)
  ge: b8[3, 2] = ge(block_table, 5)
  or: b8[3, 2] = or(lt, ge)
  getitem_2: b8[3, 2, 1, 1, 1] = getitem(or, [..., None, None, None])
  masked_fill: f32[3, 2, 2, 2, 8] = masked_fill(to, getitem_2, nan)
  flatten: f32[3, 4, 2, 8] = flatten(masked_fill, 1, 2)
  getitem_3: f32[3, 2, 2, 2, 8] = getitem(value_cache, clamp)
  to_2: f32[3, 2, 2, 2, 8] = to(getitem_3, torch.float32)
  masked_fill_2: f32[3, 2, 2, 2, 8] = masked_fill(to_2, getitem_2, nan)
  flatten_2: f32[3, 4, 2, 8] = flatten(masked_fill_2, 1, 2)
  long_2: i64[3] = long(lengths)
  arange: i64[4] = arange(4, device=cpu)
  getitem_4: i64[3, 1] = getitem(long_2, [:, None])
  lt_2: b8[3, 4] = lt(arange, getitem_4)
  getitem_5: b8[3, 4, 1, 1] = getitem(lt_2, [:, :, None, None])
  where: f32[3, 4, 2, 8] = where(getitem_5, flatten, 0.0)
  transpose: f32[3, 2, 4, 8] = transpose(where, 1, 2)
  where_2: f32[3, 4, 2, 8] = where(getitem_5, flatten_2, 0.0)
  transpose_2: f32[3, 2, 4, 8] = transpose(where_2, 1, 2)
  getitem_6: f32[3, 4, 1, 8] = getitem(query, [:, :, None])
  getitem_7: b8[3, 1, 1, 4] = getitem(lt_2, [:, None, None])
  scaled_dot_product_attention: f32[3, 4, 1, 8] = scaled_dot_product_attention(getitem_6, transpose, transpose_2, attn_mask=getitem_7, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True)
  getitem_8: f32[3, 4, 8] = getitem(scaled_dot_product_attention, [:, :, 0])
  to_3: f32[3, 4, 8] = to(getitem_8, torch.float32)
  reshape: f32[3, 4, 8] = reshape(to_3, 3, 4, 8)
  return [reshape]
report:
  paged_attention: torch.paged_attention, rewritten, at `kernel_operator.py`
    attributes: out_dtype=torch.float32
    formula: softmax(query key_cache[block_table]^T) value_cache[block_table], decode
    why: locked by options['layerzero.lock']""",
        )

    def test_paged_attention_nearly_when_there_are_no_queries(self) -> None:
        self.assertExpectedInline(
            missed(lz.paged_attention, *paged(0)),
            """\
near miss of paged_attention at `kernel_operator.py`
  [EMPTY] there are no queries, or no blocks
  -> leave the call out""",
        )

    # ---- blend ---------------------------------------------------------------------------------------------------------

    def test_blend_of_a_detached_host_is_rewritten(self) -> None:
        def function(host: Tensor, seed: Tensor, alpha: Tensor) -> Tensor:
            return alpha * seed + (1 - alpha) * host.detach()

        inputs = random(4, 6), random(4, 6, grad=True), torch.tensor(0.3)
        self.assertExpectedInline(
            rewritten(function, *inputs, lock={"blend": "torch.blend"}),
            """\
before:
  alpha: f32[]
  seed: f32[4, 6]
  host: f32[4, 6]
  mul: f32[4, 6] = mul(alpha, seed)
  sub: f32[] = sub(1, alpha)
  detach: f32[4, 6] = detach(host)
  mul_2: f32[4, 6] = mul(sub, detach)
  add: f32[4, 6] = add(mul, mul_2)
  return [add]
after:
  alpha: f32[]
  seed: f32[4, 6]
  host: f32[4, 6]
  sub: f32[] = sub(1, alpha)
  detach: f32[4, 6] = detach(host)
  reshape: f32[4, 6, 1, 1] = reshape(detach, [4, 6, 1, 1])
  reshape_2: f32[24, 1, 1] = reshape(reshape, [24, 1, 1])
  reshape_3: f32[4, 6, 1, 1] = reshape(seed, [4, 6, 1, 1])
  reshape_4: f32[24, 1, 1] = reshape(reshape_3, [24, 1, 1])
  mul: f32[24, 1, 1] = mul(alpha, reshape_4)
  sub_2: f32[] = sub(1, alpha)
  mul_2: f32[24, 1, 1] = mul(sub_2, reshape_2)
  add: f32[24, 1, 1] = add(mul, mul_2)
  reshape_5: f32[4, 6] = reshape(add, [4, 6])
  return [reshape_5]
report:
  blend: torch.blend, rewritten, at `return alpha * seed + (1 - alpha) * host.detach()`
    attributes: mode=convex, normalised=none, compute_dtype=torch.float32, out_dtype=torch.float32
    why: locked by options['layerzero.lock']""",
        )

    def test_blend_nearly_when_gradients_flow_to_the_host(self) -> None:
        def function(host: Tensor, seed: Tensor, alpha: Tensor) -> Tensor:
            return alpha * seed + (1 - alpha) * host

        self.assertExpectedInline(
            missed(function, random(4, 6, grad=True), random(4, 6, grad=True), torch.tensor(0.3)),
            """\
near miss of blend at `return alpha * seed + (1 - alpha) * host`
  [HOST_NOT_DETACHED] gradients flow to the host l_host_ as well as to the seed l_seed_
  -> blend with l_host_.detach()""",
        )

    # ---- routing -------------------------------------------------------------------------------------------------------

    def test_routing_of_gradients_by_a_cosine_is_rewritten(self) -> None:
        def function(
            x: Tensor, weight: Tensor, down: Tensor, up: Tensor, delta: Tensor, v: Tensor, a: Tensor, b: Tensor
        ) -> Tensor:
            found = F.linear(x, down)
            kept = F.linear(found * delta, up)
            routed = (F.cosine_similarity(found, v, dim=-1) > 0)[..., None]
            return F.linear(x, weight) + torch.where(routed, kept.detach(), kept) + F.linear(F.linear(x, a), b)

        shapes = ((2, 5, 12), (10, 12), (6, 12), (10, 6), (6,), (6,), (4, 12), (10, 4))
        inputs = [random(*shape, grad=index in (0, 4, 6, 7)) for index, shape in enumerate(shapes)]
        self.assertExpectedInline(
            rewritten(function, *inputs, lock={"routing": "torch.routing"}),
            """\
before:
  x: f32[2, 5, 12]
  down: f32[6, 12]
  delta: f32[6]
  up: f32[10, 6]
  v: f32[6]
  weight: f32[10, 12]
  a: f32[4, 12]
  b: f32[10, 4]
  linear: f32[2, 5, 6] = linear(x, down)
  mul: f32[2, 5, 6] = mul(linear, delta)
  linear_2: f32[2, 5, 10] = linear(mul, up)
  cosine_similarity: f32[2, 5] = cosine_similarity(linear, v, dim=-1)
  gt: b8[2, 5] = gt(cosine_similarity, 0)
  getitem: b8[2, 5, 1] = getitem(gt, [..., None])
  linear_3: f32[2, 5, 10] = linear(x, weight)
  detach: f32[2, 5, 10] = detach(linear_2)
  where: f32[2, 5, 10] = where(getitem, detach, linear_2)
  add: f32[2, 5, 10] = add(linear_3, where)
  linear_4: f32[2, 5, 4] = linear(x, a)
  linear_5: f32[2, 5, 10] = linear(linear_4, b)
  add_2: f32[2, 5, 10] = add(add, linear_5)
  return [add_2]
after:
  x: f32[2, 5, 12]
  down: f32[6, 12]
  delta: f32[6]
  up: f32[10, 6]
  v: f32[6]
  weight: f32[10, 12]
  a: f32[4, 12]
  b: f32[10, 4]
  torch_routing: f32[2, 5, 10] = torch_routing(x, down, up, delta, a, b, v, weight, None, None, None, None, None, None, {"arm": "act", "gate": "none", "has_rollout_ids": false, "has_weight": true, "threshold": 0.0, "compute_dtype": "torch.float32", "out_dtype": "torch.float32"})
  return [torch_routing]
report:
  routing: torch.routing, rewritten, at `return F.linear(x, weight) + torch.where(routed, kept.detach(), kept) + F.linear(F.linear(x, a), b)`
    attributes: arm=act, gate=none, has_weight, threshold=0.0, compute_dtype=torch.float32, out_dtype=torch.float32
    formula: W x + U ((Vh x) * delta), detached where cos(a, v) > 0 + B (A x)
    why: locked by options['layerzero.lock']""",
        )

    def test_routing_nearly_when_the_kept_adapter_is_always_detached(self) -> None:
        def function(x: Tensor, down: Tensor, up: Tensor, delta: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return F.linear(F.linear(x, down) * delta, up).detach() + F.linear(F.linear(x, a), b)

        shapes = ((2, 5, 12), (6, 12), (10, 6), (6,), (4, 12), (10, 4))
        self.assertExpectedInline(
            missed(function, *[random(*shape, grad=True) for shape in shapes]),
            """\
near miss of routing at `return F.linear(F.linear(x, down) * delta, up).detach() + F.linear(F.linear(x, a), b)`
  [INPUT_DETACHED] one of the adapters reads a detached input, the other does not
  -> give both the same input""",
        )

    # ---- sampling ------------------------------------------------------------------------------------------------------

    def test_sampling_from_the_probable_is_rewritten(self) -> None:
        def function(logits: Tensor) -> Tensor:
            probs = logits.softmax(-1)
            return logits.masked_fill(probs < 0.1 * probs.amax(-1, keepdim=True), -math.inf).softmax(-1)

        self.assertExpectedInline(
            rewritten(function, random(2, 20), lock={"sampling": "torch.sampling"}),
            """\
before:
  logits: f32[2, 20]
  softmax: f32[2, 20] = softmax(logits, -1)
  amax: f32[2, 1] = amax(softmax, -1, keepdim=True)
  mul: f32[2, 1] = mul(0.1, amax)
  lt: b8[2, 20] = lt(softmax, mul)
  masked_fill: f32[2, 20] = masked_fill(logits, lt, -inf)
  softmax_2: f32[2, 20] = softmax(masked_fill, -1)
  return [softmax_2]
after:
  logits: f32[2, 20]
  new_full: f32[1] = new_full(logits, [1], 0.1, dtype=torch.float32)
  to: f32[2, 20] = to(logits, torch.float32)
  gt: b8[2, 20] = gt(to, -inf)
  amax: f32[2, 1] = amax(to, -1, keepdim=True)
  to_2: f32[1] = to(new_full, torch.float32)
  log: f32[1] = log(to_2)
  getitem: f32[1, 1] = getitem(log, [:, None])
  add: f32[2, 1] = add(amax, getitem)
  ge: b8[2, 20] = ge(to, add)
  and: b8[2, 20] = and(gt, ge)
  lt: b8[2, 20] = lt(to, inf)
  all: b8[2] = all(lt, -1)
  any: b8[2] = any(gt, -1)
  and_2: b8[2] = and(all, any)
  getitem_2: b8[2, 1] = getitem(and_2, [:, None])
  invert: b8[2, 1] = invert(getitem_2)
  or: b8[2, 20] = or(and, invert)
  where: f32[2, 20] = where(or, to, -inf)
  softmax: f32[2, 20] = softmax(where, -1)
  to_3: f32[2, 20] = to(softmax, torch.float32)
  return [to_3]
report:
  sampling: torch.sampling, rewritten, at `return logits.masked_fill(probs < 0.1 * probs.amax(-1, keepdim=True), -math.inf).softmax(-1)`
    attributes: result=probs, has_min_p, top_k_ties=all, top_p_ties=all, out_dtype=torch.float32
    formula: softmax(min_p(logits, 0.1))
    why: locked by options['layerzero.lock']""",
        )

    def test_sampling_nearly_when_what_is_dropped_keeps_a_finite_score(self) -> None:
        def function(logits: Tensor) -> Tensor:
            return logits.masked_fill(logits < logits.topk(3).values[..., -1:], -1e9)

        self.assertExpectedInline(
            missed(function, random(2, 20)),
            """\
near miss of sampling at `return logits.masked_fill(logits < logits.topk(3).values[..., -1:], -1e9)`
  [FILL_FINITE] what is not kept becomes -1e+09, and is read as a score
  -> fill with -inf, or take the softmax of it at once""",
        )

    # ---- scan ----------------------------------------------------------------------------------------------------------

    def test_scan_of_a_moving_average_is_rewritten(self) -> None:
        def function(x: Tensor, decay: Tensor) -> Tensor:
            def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                state = decay * state + x
                return state, state.clone()

            return scan(step, torch.zeros_like(x[0]), x)[1]

        inputs = random(3, 2, 3, grad=True), random(3).sigmoid()
        self.assertExpectedInline(
            rewritten(function, *inputs, lock={"scan": "torch.scan_sequential"}),
            """\
before:
  x: f32[3, 2, 3]
  decay: f32[3]
  getitem: f32[2, 3] = getitem(x, 0)
  zeros_like: f32[2, 3] = zeros_like(getitem)
  scan = scan(scan_combine_fn_0, [zeros_like], [x], [decay])
  getitem_2: f32[3, 2, 3] = getitem(scan, 1)
  return [getitem_2]
  scan_combine_fn_0:
    arg: f32[2, 3]
    arg_2: f32[2, 3]
    decay: f32[3]
    mul: f32[2, 3] = mul(decay, arg)
    add: f32[2, 3] = add(mul, arg_2)
    clone: f32[2, 3] = clone(add)
    return [add, clone]
after:
  x: f32[3, 2, 3]
  decay: f32[3]
  getitem: f32[2, 3] = getitem(x, 0)
  zeros_like: f32[2, 3] = zeros_like(getitem)
  unsqueeze: f32[1, 3] = unsqueeze(decay, 0)
  unsqueeze_2: f32[1, 1, 3] = unsqueeze(unsqueeze, 1)
  reshape: f32[1, 1, 1, 1, 3] = reshape(unsqueeze_2, [1, 1, 1, 1, 3])
  permute: f32[2, 3, 3] = permute(x, [1, 0, 2])
  reshape_2: f32[2, 1, 3, 1, 3] = reshape(permute, [2, 1, 3, 1, 3])
  to: f32[1, 1, 1, 1, 3] = to(reshape, torch.float32)
  to_2: f32[2, 1, 3, 1, 3] = to(reshape_2, torch.float32)
  expand: f32[1, 1, 3, 1, 3] = expand(to, 1, 1, 3, 1, 3)
  unbind = unbind(expand, 2)
  expand_2: f32[2, 1, 3, 1, 3] = expand(to_2, 2, 1, 3, 1, 3)
  unbind_2 = unbind(expand_2, 2)
  new_zeros: f32[2, 1, 1, 3] = new_zeros(to, [2, 1, 1, 3])
  getitem_2: f32[1, 1, 1, 3] = getitem(unbind, 0)
  getitem_3: f32[2, 1, 1, 3] = getitem(unbind_2, 0)
  mul: f32[2, 1, 1, 3] = mul(new_zeros, getitem_2)
  add: f32[2, 1, 1, 3] = add(mul, getitem_3)
  getitem_4: f32[1, 1, 1, 3] = getitem(unbind, 1)
  getitem_5: f32[2, 1, 1, 3] = getitem(unbind_2, 1)
  mul_2: f32[2, 1, 1, 3] = mul(add, getitem_4)
  add_2: f32[2, 1, 1, 3] = add(mul_2, getitem_5)
  getitem_6: f32[1, 1, 1, 3] = getitem(unbind, 2)
  getitem_7: f32[2, 1, 1, 3] = getitem(unbind_2, 2)
  mul_3: f32[2, 1, 1, 3] = mul(add_2, getitem_6)
  add_3: f32[2, 1, 1, 3] = add(mul_3, getitem_7)
  stack: f32[2, 1, 3, 1, 3] = stack([add, add_2, add_3], 2)
  to_3: f32[2, 1, 3, 1, 3] = to(stack, torch.float32)
  reshape_3: f32[2, 3, 3] = reshape(to_3, [2, 3, 3])
  permute_2: f32[3, 2, 3] = permute(reshape_3, [1, 0, 2])
  reshape_4: f32[3, 2, 3] = reshape(permute_2, [3, 2, 3])
  to_4: f32[3, 2, 3] = to(reshape_4, torch.float32)
  permute_3: f32[3, 2, 3] = permute(to_4, [0, 1, 2])
  contiguous: f32[3, 2, 3] = contiguous(permute_3)
  permute_4: f32[3, 2, 3] = permute(contiguous, [0, 1, 2])
  return [permute_4]
report:
  loop: 3 steps of 3 calls, rolled, at `return scan(step, torch.zeros_like(x[0]), x)[1]`
    carried: float32[2, 3]
    streams: slices
    outputs: [2, 3]
  scan: torch.scan_sequential, rewritten, at `return scan(step, torch.zeros_like(x[0]), x)[1]`
    attributes: reads=after, compute_dtype=torch.float32, out_dtype=torch.float32, state_dtype=torch.float32
    formula: S[b,v] = decay[v] S[b,v] + x[b,v]; y[b,v] = S[b,v]
    why: locked by options['layerzero.lock']""",
        )

    def test_scan_nearly_when_the_state_passes_through_tanh(self) -> None:
        def function(x: Tensor, decay: Tensor) -> Tensor:
            def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                state = torch.tanh(decay * state + x)
                return state, state.clone()

            return scan(step, torch.zeros_like(x[0]), x)[1]

        self.assertExpectedInline(
            missed(function, random(8, 2, 3), random(3).sigmoid()),
            """\
near miss of scan at `return scan(step, torch.zeros_like(x[0]), x)[1]`
  [NOT_AFFINE] the step is not affine in its state: tanh of the state state
  -> only products, sums and masks of the state can be run in parallel""",
        )
