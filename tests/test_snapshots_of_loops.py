"""What the stages before the recognisers make of a graph: before and after. `EXPECTTEST_ACCEPT=1` writes them anew."""

from __future__ import annotations

import expecttest
import torch
import torch.nn.functional as F
from backends import shows_multi_head_attention
from canonical import compiled, edited, missed, report_of
from torch import Tensor
from torch._higher_order_ops import scan

from lz_compile.passes.inlining.inline import inline
from lz_compile.passes.inlining.values import with_values
from lz_compile.passes.loops.recurrence.distribute import distribute
from lz_compile.passes.loops.roll.forward_stores import forward_stores
from lz_compile.passes.loops.roll.reroll import reroll
from lz_compile.passes.loops.roll.unbatch import unbatch


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Snapshots(expecttest.TestCase):
    def test_a_loop_of_four_steps_is_a_scan(self) -> None:
        def function(x: Tensor, decay: Tensor) -> Tensor:
            state, states = torch.zeros_like(x[:, 0]), []
            for step in range(4):
                state = decay * state + x[:, step]
                states.append(state)
            return torch.stack(states, 1)

        self.assertExpectedInline(
            edited(lambda module: reroll(module, "roll"), function, random(2, 4, 3), random(3)),
            """\
before:
  x: f32[2, 4, 3]
  decay: f32[3]
  getitem: f32[2, 3] = getitem(x, [:, 0])
  zeros_like: f32[2, 3] = zeros_like(getitem)
  mul: f32[2, 3] = mul(decay, zeros_like)
  getitem_2: f32[2, 3] = getitem(x, [:, 0])
  add: f32[2, 3] = add(mul, getitem_2)
  mul_2: f32[2, 3] = mul(decay, add)
  getitem_3: f32[2, 3] = getitem(x, [:, 1])
  add_2: f32[2, 3] = add(mul_2, getitem_3)
  mul_3: f32[2, 3] = mul(decay, add_2)
  getitem_4: f32[2, 3] = getitem(x, [:, 2])
  add_3: f32[2, 3] = add(mul_3, getitem_4)
  mul_4: f32[2, 3] = mul(decay, add_3)
  getitem_5: f32[2, 3] = getitem(x, [:, 3])
  add_4: f32[2, 3] = add(mul_4, getitem_5)
  stack: f32[2, 4, 3] = stack([add, add_2, add_3, add_4], 1)
  return [stack]
after:
  x: f32[2, 4, 3]
  decay: f32[3]
  getitem: f32[2, 3] = getitem(x, [:, 0])
  zeros_like: f32[2, 3] = zeros_like(getitem)
  movedim: f32[4, 2, 3] = movedim(x, 1, 0)
  scan = scan(loop_body_0, [zeros_like], [movedim], [decay])
  getitem_2: f32[4, 2, 3] = getitem(scan, 1)
  movedim_2: f32[2, 4, 3] = movedim(getitem_2, 0, 1)
  clone: f32[2, 4, 3] = clone(movedim_2, memory_format=torch.contiguous_format)
  return [clone]
  loop_body_0:
    carry_0: f32[2, 3]
    x_0: f32[2, 3]
    around_0: f32[3]
    mul: f32[2, 3] = mul(around_0, carry_0)
    add: f32[2, 3] = add(mul, x_0)
    clone: f32[2, 3] = clone(add, memory_format=torch.contiguous_format)
    return [add, clone]""",
        )

    def test_of_a_loop_the_report_says_what_its_steps_read_and_what_runs_it(self) -> None:
        def function(x: Tensor, decay: Tensor) -> Tensor:
            state = torch.zeros_like(x[:, 0])
            for step in range(4):
                state = decay * state + x[:, step]
            return state

        lock = {"scan": "torch.scan_sequential"}
        backend = compiled(function, random(2, 4, 3), random(3), loops="roll", lock=lock)
        self.assertExpectedInline(
            report_of(backend),
            """\
loop: 4 steps of 2 calls, rolled, at `state = decay * state + x[:, step]`
  carried: float32[2, 3]
  streams: slices
scan: torch.scan_sequential, rewritten, at `state = decay * state + x[:, step]`
  attributes: reads=after, compute_dtype=torch.float32, out_dtype=torch.float32, state_dtype=torch.float32
  formula: S[b,v] = decay[v] S[b,v] + x[b,v]
  why: locked by options['layerzero.lock']""",
        )

    def test_a_loop_of_two_states_is_a_scan_and_what_is_done_for_all_steps_at_once(self) -> None:
        def function(x: Tensor) -> Tensor:
            def step(states: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
                fast, slow = states
                fast, slow = 0.5 * fast + x.tanh(), 0.9 * slow + x
                return (fast, slow), fast - slow

            return scan(step, (torch.zeros_like(x[0]), torch.zeros_like(x[0])), x)[1]

        self.assertExpectedInline(
            edited(lambda module: list(distribute(module)), function, random(6, 2, 3)),
            """\
before:
  x: f32[6, 2, 3]
  getitem: f32[2, 3] = getitem(x, 0)
  zeros_like: f32[2, 3] = zeros_like(getitem)
  getitem_2: f32[2, 3] = getitem(x, 0)
  zeros_like_2: f32[2, 3] = zeros_like(getitem_2)
  scan = scan(scan_combine_fn_0, [zeros_like, zeros_like_2], [x], [])
  getitem_3: f32[6, 2, 3] = getitem(scan, 2)
  return [getitem_3]
  scan_combine_fn_0:
    arg: f32[2, 3]
    arg_2: f32[2, 3]
    arg_3: f32[2, 3]
    mul: f32[2, 3] = mul(0.5, arg)
    tanh: f32[2, 3] = tanh(arg_3)
    add: f32[2, 3] = add(mul, tanh)
    mul_2: f32[2, 3] = mul(0.9, arg_2)
    add_2: f32[2, 3] = add(mul_2, arg_3)
    sub: f32[2, 3] = sub(add, add_2)
    return [add, add_2, sub]
after:
  x: f32[6, 2, 3]
  getitem: f32[2, 3] = getitem(x, 0)
  zeros_like: f32[2, 3] = zeros_like(getitem)
  getitem_2: f32[2, 3] = getitem(x, 0)
  zeros_like_2: f32[2, 3] = zeros_like(getitem_2)
  tanh: f32[6, 2, 3] = tanh(x)
  scan = scan(scan_part_0, [zeros_like], [tanh], [])
  getitem_3: f32[2, 3] = getitem(scan, 0)
  getitem_4: f32[6, 2, 3] = getitem(scan, 1)
  scan_2 = scan(scan_part_1, [zeros_like_2], [x], [])
  getitem_5: f32[2, 3] = getitem(scan_2, 0)
  getitem_6: f32[6, 2, 3] = getitem(scan_2, 1)
  sub: f32[6, 2, 3] = sub(getitem_4, getitem_6)
  return [sub]
  scan_part_0:
    arg: f32[2, 3]
    tanh: f32[2, 3]
    mul: f32[2, 3] = mul(arg, 0.5)
    add: f32[2, 3] = add(mul, tanh)
    clone: f32[2, 3] = clone(add, memory_format=torch.contiguous_format)
    return [add, clone]
  scan_part_1:
    arg: f32[2, 3]
    arg_2: f32[2, 3]
    mul: f32[2, 3] = mul(arg, 0.9)
    add: f32[2, 3] = add(mul, arg_2)
    clone: f32[2, 3] = clone(add, memory_format=torch.contiguous_format)
    return [add, clone]""",
        )

    def test_what_a_loop_stores_and_reads_back_is_a_value(self) -> None:
        def function(x: Tensor, decay: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for step in range(4):
                before = out[:, step - 1] if step else torch.zeros_like(x[:, 0])
                out[:, step] = decay * before + x[:, step]
            return out

        self.assertExpectedInline(
            edited(lambda module: forward_stores(module.graph), function, random(2, 4, 3), random(3)),
            """\
before:
  x: f32[2, 4, 3]
  decay: f32[3]
  zeros_like: f32[2, 4, 3] = zeros_like(x)
  getitem: f32[2, 3] = getitem(x, [:, 0])
  zeros_like_2: f32[2, 3] = zeros_like(getitem)
  mul: f32[2, 3] = mul(decay, zeros_like_2)
  getitem_2: f32[2, 3] = getitem(x, [:, 0])
  add: f32[2, 3] = add(mul, getitem_2)
  setitem = setitem(zeros_like, [:, 0], add)
  getitem_3: f32[2, 3] = getitem(zeros_like, [:, 0])
  mul_2: f32[2, 3] = mul(decay, getitem_3)
  getitem_4: f32[2, 3] = getitem(x, [:, 1])
  add_2: f32[2, 3] = add(mul_2, getitem_4)
  setitem_2 = setitem(zeros_like, [:, 1], add_2)
  getitem_5: f32[2, 3] = getitem(zeros_like, [:, 1])
  mul_3: f32[2, 3] = mul(decay, getitem_5)
  getitem_6: f32[2, 3] = getitem(x, [:, 2])
  add_3: f32[2, 3] = add(mul_3, getitem_6)
  setitem_3 = setitem(zeros_like, [:, 2], add_3)
  getitem_7: f32[2, 3] = getitem(zeros_like, [:, 2])
  mul_4: f32[2, 3] = mul(decay, getitem_7)
  getitem_8: f32[2, 3] = getitem(x, [:, 3])
  add_4: f32[2, 3] = add(mul_4, getitem_8)
  setitem_4 = setitem(zeros_like, [:, 3], add_4)
  return [zeros_like]
after:
  x: f32[2, 4, 3]
  decay: f32[3]
  zeros_like: f32[2, 4, 3] = zeros_like(x)
  getitem: f32[2, 3] = getitem(x, [:, 0])
  zeros_like_2: f32[2, 3] = zeros_like(getitem)
  mul: f32[2, 3] = mul(decay, zeros_like_2)
  getitem_2: f32[2, 3] = getitem(x, [:, 0])
  add: f32[2, 3] = add(mul, getitem_2)
  setitem = setitem(zeros_like, [:, 0], add)
  mul_2: f32[2, 3] = mul(decay, add)
  getitem_3: f32[2, 3] = getitem(x, [:, 1])
  add_2: f32[2, 3] = add(mul_2, getitem_3)
  setitem_2 = setitem(zeros_like, [:, 1], add_2)
  mul_3: f32[2, 3] = mul(decay, add_2)
  getitem_4: f32[2, 3] = getitem(x, [:, 2])
  add_3: f32[2, 3] = add(mul_3, getitem_4)
  setitem_3 = setitem(zeros_like, [:, 2], add_3)
  mul_4: f32[2, 3] = mul(decay, add_3)
  getitem_5: f32[2, 3] = getitem(x, [:, 3])
  add_4: f32[2, 3] = add(mul_4, getitem_5)
  setitem_4 = setitem(zeros_like, [:, 3], add_4)
  return [zeros_like]""",
        )

    def test_a_sum_by_doubling_in_place_is_values(self) -> None:
        def function(x: Tensor) -> Tensor:
            x, reach = x.clone(), 1
            while reach < x.shape[1]:
                x[:, reach:] += x[:, :-reach].clone()
                reach *= 2
            return x

        self.assertExpectedInline(
            edited(lambda module: with_values(module.graph), function, random(2, 16, 3)),
            """\
before:
  x: f32[2, 16, 3]
  clone: f32[2, 16, 3] = clone(x)
  getitem: f32[2, 15, 3] = getitem(clone, [:, 1:])
  getitem_2: f32[2, 15, 3] = getitem(clone, [:, :-1])
  clone_2: f32[2, 15, 3] = clone(getitem_2)
  iadd: f32[2, 15, 3] = iadd(getitem, clone_2)
  setitem = setitem(clone, [:, 1:], iadd)
  getitem_3: f32[2, 14, 3] = getitem(clone, [:, 2:])
  getitem_4: f32[2, 14, 3] = getitem(clone, [:, :-2])
  clone_3: f32[2, 14, 3] = clone(getitem_4)
  iadd_2: f32[2, 14, 3] = iadd(getitem_3, clone_3)
  setitem_2 = setitem(clone, [:, 2:], iadd_2)
  getitem_5: f32[2, 12, 3] = getitem(clone, [:, 4:])
  getitem_6: f32[2, 12, 3] = getitem(clone, [:, :-4])
  clone_4: f32[2, 12, 3] = clone(getitem_6)
  iadd_3: f32[2, 12, 3] = iadd(getitem_5, clone_4)
  setitem_3 = setitem(clone, [:, 4:], iadd_3)
  getitem_7: f32[2, 8, 3] = getitem(clone, [:, 8:])
  getitem_8: f32[2, 8, 3] = getitem(clone, [:, :-8])
  clone_5: f32[2, 8, 3] = clone(getitem_8)
  iadd_4: f32[2, 8, 3] = iadd(getitem_7, clone_5)
  setitem_4 = setitem(clone, [:, 8:], iadd_4)
  return [clone]
after:
  x: f32[2, 16, 3]
  clone: f32[2, 16, 3] = clone(x)
  getitem: f32[2, 15, 3] = getitem(clone, [:, 1:])
  getitem_2: f32[2, 15, 3] = getitem(clone, [:, :-1])
  clone_2: f32[2, 15, 3] = clone(getitem_2)
  add: f32[2, 15, 3] = add(getitem, clone_2)
  getitem_3: f32[2, 1, 3] = getitem(clone, [:, 0:1])
  cat: f32[2, 16, 3] = cat([getitem_3, add], 1)
  getitem_4: f32[2, 15, 3] = getitem(cat, [:, 1:])
  getitem_5: f32[2, 1, 3] = getitem(cat, [:, 0:1])
  cat_2: f32[2, 16, 3] = cat([getitem_5, getitem_4], 1)
  getitem_6: f32[2, 14, 3] = getitem(cat_2, [:, 2:])
  getitem_7: f32[2, 14, 3] = getitem(cat_2, [:, :-2])
  clone_3: f32[2, 14, 3] = clone(getitem_7)
  add_2: f32[2, 14, 3] = add(getitem_6, clone_3)
  getitem_8: f32[2, 2, 3] = getitem(cat_2, [:, 0:2])
  cat_3: f32[2, 16, 3] = cat([getitem_8, add_2], 1)
  getitem_9: f32[2, 14, 3] = getitem(cat_3, [:, 2:])
  getitem_10: f32[2, 2, 3] = getitem(cat_3, [:, 0:2])
  cat_4: f32[2, 16, 3] = cat([getitem_10, getitem_9], 1)
  getitem_11: f32[2, 12, 3] = getitem(cat_4, [:, 4:])
  getitem_12: f32[2, 12, 3] = getitem(cat_4, [:, :-4])
  clone_4: f32[2, 12, 3] = clone(getitem_12)
  add_3: f32[2, 12, 3] = add(getitem_11, clone_4)
  getitem_13: f32[2, 4, 3] = getitem(cat_4, [:, 0:4])
  cat_5: f32[2, 16, 3] = cat([getitem_13, add_3], 1)
  getitem_14: f32[2, 12, 3] = getitem(cat_5, [:, 4:])
  getitem_15: f32[2, 4, 3] = getitem(cat_5, [:, 0:4])
  cat_6: f32[2, 16, 3] = cat([getitem_15, getitem_14], 1)
  getitem_16: f32[2, 8, 3] = getitem(cat_6, [:, 8:])
  getitem_17: f32[2, 8, 3] = getitem(cat_6, [:, :-8])
  clone_5: f32[2, 8, 3] = clone(getitem_17)
  add_4: f32[2, 8, 3] = add(getitem_16, clone_5)
  getitem_18: f32[2, 8, 3] = getitem(cat_6, [:, 0:8])
  cat_7: f32[2, 16, 3] = cat([getitem_18, add_4], 1)
  getitem_19: f32[2, 8, 3] = getitem(cat_7, [:, 8:])
  getitem_20: f32[2, 8, 3] = getitem(cat_7, [:, 0:8])
  cat_8: f32[2, 16, 3] = cat([getitem_20, getitem_19], 1)
  return [cat_8]""",
        )

    def test_arithmetic_that_is_mapped_over_a_dimension_is_arithmetic(self) -> None:
        def function(x: Tensor, y: Tensor) -> Tensor:
            return torch.vmap(lambda x, y: x * y + 1, in_dims=(0, None))(x, y)

        self.assertExpectedInline(
            edited(lambda module: unbatch(module.graph), function, random(4, 3), random(3)),
            """\
before:
  x: f32[4, 3]
  y: f32[3]
  lazy_load_decompositions = lazy_load_decompositions()
  vmap_increment_nesting = vmap_increment_nesting(4, error)
  add_batch_dim: f32[3] = add_batch_dim(x, 0, 1)
  mul: f32[3] = mul(add_batch_dim, y)
  add: f32[3] = add(mul, 1)
  remove_batch_dim: f32[4, 3] = remove_batch_dim(add, 1, 4, 0)
  vmap_decrement_nesting = vmap_decrement_nesting()
  return [remove_batch_dim]
after:
  x: f32[4, 3]
  y: f32[3]
  lazy_load_decompositions = lazy_load_decompositions()
  mul: f32[4, 3] = mul(x, y)
  add: f32[4, 3] = add(mul, 1)
  return [add]""",
        )

    def test_scores_that_are_overwritten_are_new_values(self) -> None:
        def function(logits: Tensor) -> Tensor:
            scores = logits / 0.7
            scores[scores < scores.topk(3).values[..., -1:]] = -torch.inf
            return scores.softmax(-1)

        self.assertExpectedInline(
            edited(lambda module: with_values(module.graph), function, random(2, 20)),
            """\
before:
  logits: f32[2, 20]
  truediv: f32[2, 20] = truediv(logits, 0.7)
  topk = topk(truediv, 3)
  getitem: f32[2, 3] = getitem(topk, 0)
  getitem_2: f32[2, 1] = getitem(getitem, [..., -1:])
  lt: b8[2, 20] = lt(truediv, getitem_2)
  setitem = setitem(truediv, lt, -inf)
  softmax: f32[2, 20] = softmax(truediv, -1)
  return [softmax]
after:
  logits: f32[2, 20]
  truediv: f32[2, 20] = truediv(logits, 0.7)
  topk = topk(truediv, 3)
  getitem: f32[2, 3] = getitem(topk, 0)
  getitem_2: f32[2, 1] = getitem(getitem, [..., -1:])
  lt: b8[2, 20] = lt(truediv, getitem_2)
  masked_fill: f32[2, 20] = masked_fill(truediv, lt, -inf)
  softmax: f32[2, 20] = softmax(masked_fill, -1)
  return [softmax]""",
        )

    @shows_multi_head_attention
    def test_a_call_of_multi_head_attention_is_spelled_out(self) -> None:
        def function(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
            given = {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0, "need_weights": False}
            return F.multi_head_attention_forward(
                x, x, x, 6, 2, weight, None, out_proj_weight=out, out_proj_bias=None, **given
            )[0]

        self.assertExpectedInline(
            edited(lambda module: inline(module.graph), function, random(5, 2, 6), random(18, 6), random(6, 6)),
            """\
before:
  x: f32[5, 2, 6]
  weight: f32[18, 6]
  out: f32[6, 6]
  multi_head_attention_forward = multi_head_attention_forward(x, x, x, 6, 2, weight, None, out_proj_weight=out, out_proj_bias=None, bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0, need_weights=False)
  getitem: f32[5, 2, 6] = getitem(multi_head_attention_forward, 0)
  return [getitem]
after:
  x: f32[5, 2, 6]
  weight: f32[18, 6]
  out: f32[6, 6]
  linear: f32[5, 2, 18] = linear(x, weight, None)
  unflatten: f32[5, 2, 3, 6] = unflatten(linear, -1, [3, 6])
  unsqueeze: f32[1, 5, 2, 3, 6] = unsqueeze(unflatten, 0)
  transpose: f32[3, 5, 2, 1, 6] = transpose(unsqueeze, 0, -2)
  squeeze: f32[3, 5, 2, 6] = squeeze(transpose, -2)
  contiguous: f32[3, 5, 2, 6] = contiguous(squeeze)
  getitem: f32[5, 2, 6] = getitem(contiguous, 0)
  getitem_2: f32[5, 2, 6] = getitem(contiguous, 1)
  getitem_3: f32[5, 2, 6] = getitem(contiguous, 2)
  view: f32[5, 4, 3] = view(getitem, 5, 4, 3)
  transpose_2: f32[4, 5, 3] = transpose(view, 0, 1)
  view_2: f32[5, 4, 3] = view(getitem_2, 5, 4, 3)
  transpose_3: f32[4, 5, 3] = transpose(view_2, 0, 1)
  view_3: f32[5, 4, 3] = view(getitem_3, 5, 4, 3)
  transpose_4: f32[4, 5, 3] = transpose(view_3, 0, 1)
  view_4: f32[2, 2, 5, 3] = view(transpose_2, 2, 2, 5, 3)
  view_5: f32[2, 2, 5, 3] = view(transpose_3, 2, 2, 5, 3)
  view_6: f32[2, 2, 5, 3] = view(transpose_4, 2, 2, 5, 3)
  scaled_dot_product_attention: f32[2, 2, 5, 3] = scaled_dot_product_attention(view_4, view_5, view_6, None, 0.0, False)
  permute: f32[5, 2, 2, 3] = permute(scaled_dot_product_attention, 2, 0, 1, 3)
  reshape: f32[10, 6] = reshape(permute, 10, 6)
  linear_2: f32[10, 6] = linear(reshape, out, None)
  view_7: f32[5, 2, 6] = view(linear_2, 5, 2, 6)
  return [view_7]""",
        )

    def test_a_loop_that_draws_random_numbers_stays(self) -> None:
        def function(x: Tensor, decay: Tensor) -> Tensor:
            state = torch.zeros_like(x[:, 0])
            for step in range(x.shape[1]):
                state = decay * state + F.dropout(x[:, step], 0.5)
            return state

        self.assertExpectedInline(
            missed(function, torch.zeros(2, 16, 3), random(3)),
            """\
near miss of scan at `state = decay * state + F.dropout(x[:, step], 0.5)`
  [RANDOM] dropout draws random numbers: a loop that is rolled up would draw them in another order
  -> draw those of all steps before the loop""",
        )

    def test_a_call_of_multi_head_attention_whose_weights_are_read_stays(self) -> None:
        def function(x: Tensor, weight: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
            given = {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0}
            return F.multi_head_attention_forward(
                x, x, x, 6, 2, weight, None, out_proj_weight=out, out_proj_bias=None, **given
            )

        self.assertExpectedInline(
            missed(function, random(5, 2, 6), random(18, 6), random(6, 6)),
            """\
near miss of attention at `return F.multi_head_attention_forward(`
  [MHA_CALL_NOT_INLINED] its attention weights are used
  -> call it with need_weights=False""",
        )
