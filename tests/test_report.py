"""What is told: reports for people and machines, dumps, the structured trace, the log, and the graphs themselves."""

from __future__ import annotations

import inspect
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import expecttest
import pytest
import rich
import torch
import torch.nn.functional as F
from backends import USUAL_MACHINE, Rewriting, known_instruction_sets
from rich.console import Console
from torch import Tensor, fx
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs, normalize_gm

import lz_compile
from lz_compile import GraphReport, Report, clear_reports, errors, explain, reports
from lz_compile.backend import layerzero
from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.lowering import inductor
from lz_compile.report import dump
from lz_compile.report.findings import MissReport
from lz_compile.report.layout import Rows, duration
from lz_compile.report.report import MatchReport, new_report

pytestmark = pytest.mark.usefixtures("sdpa_first", "no_code_generation")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _no_dump_directory(monkeypatch):
    monkeypatch.delenv("LAYERZERO_DUMP", raising=False)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value


def masked(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.25).masked_fill(~keep, -math.inf).softmax(-1) @ value


def returning_weights(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.transpose(-2, -1)).softmax(-1)
    return weights @ value, weights


def operands() -> list[Tensor]:
    return [torch.randn(2, 3, length, 16) for length in (7, 17, 17)]


ATTENTION_LINE = f"{__file__}:{attention.__code__.co_firstlineno + 1}"
WEIGHTS_LINE = f"{__file__}:{returning_weights.__code__.co_firstlineno + 2}"


def stable(value: Any) -> Any:
    """A report without what differs from run to run."""
    if isinstance(value, dict):
        varying = ("error", "source_error", "grad_error", "relative_latency", "score", "hardware")
        return {
            key: ("..." if found is not None and key in varying else stable(found))
            for key, found in value.items()
            if key not in ("seconds", "graph_id")
        }
    if isinstance(value, list):
        return [stable(item) for item in value]
    return value.replace(str(ROOT) + "/", "") if isinstance(value, str) else value


def printed(report: Report, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report)
    return console.file.getvalue()


# ---- explain -------------------------------------------------------------------------------------------------------


def test_explain_tells_what_was_recognised_and_what_runs_it():
    report = explain(attention, *operands(), print_report=False)
    assert isinstance(report, Report)
    (match,) = report.matches
    assert (match.op, match.kernel, match.rewritten, match.graph) == ("attention", "torch.sdpa", True, "")
    assert match.where == ATTENTION_LINE
    assert match.attributes["scale"] == 0.25
    assert report.near_misses == []
    assert report.events == []


def test_explain_takes_keyword_inputs_options_and_dynamic_shapes():
    query, key, value = operands()
    lock = {"layerzero.lock": {"attention": "inductor"}}
    report = explain(attention, query, value=value, key=key, options=lock, dynamic=True, print_report=False)
    assert [match.kernel for match in report.matches] == ["inductor"]


def test_explain_leaves_an_earlier_compile_of_the_model_as_it_is():
    args = operands()
    compiled = torch.compile(attention, backend=layerzero)
    expected = compiled(*args)
    explain(attention, *args, print_report=False)
    before = len(reports())
    torch.testing.assert_close(compiled(*args), expected)
    assert len(reports()) == before


def test_explain_again_tells_the_same_again():
    args = operands()
    first, second = (explain(attention, *args, print_report=False) for _ in range(2))
    assert len(first.matches) == len(second.matches) == 1


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="needs PyTorch 2.13 or newer"
)
def test_explaining_often_does_not_use_up_the_recompiles_of_the_model():
    compiles = CompileCounter()
    for length in range(2, 2 + torch._dynamo.config.recompile_limit + 2):
        explain(attention, *(torch.randn(1, 2, length, 8) for _ in range(3)), print_report=False)
    torch.compile(attention, backend=compiles, fullgraph=True)(*operands())
    assert compiles.frame_count == 1


def test_explain_prints_only_where_it_is_asked_to(capsys):
    explain(attention, *operands(), print_report=False)
    assert capsys.readouterr().out == ""
    explain(attention, *operands())
    assert "Matches" in capsys.readouterr().out


def test_explain_leaves_the_module_alone():
    module = torch.nn.Linear(4, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    explain(module, torch.randn(2, 4), print_report=False)
    assert {name: torch.equal(value, before[name]) for name, value in module.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert all(parameter.grad is None for parameter in module.parameters())


# ---- JSON ----------------------------------------------------------------------------------------------------------


class Snapshots(expecttest.TestCase):
    """Texts that a reviewer reads; `EXPECTTEST_ACCEPT=1` rewrites them."""

    def test_a_report_as_json(self):
        torch._dynamo.reset()
        clear_reports()

        def both(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value
            return out + F.softplus(query @ key.transpose(-2, -1)).softmax(-1) @ value

        report = explain(both, *operands(), print_report=False).to_dict()
        for match in report["graphs"][0]["matches"]:  # which other kernels there are is not this test's business
            match["candidates"] = [each for each in match["candidates"] if each["kernel"] in ("torch.sdpa", "xformers")]
        text = re.sub(r":\d+\"", ':LINE"', json.dumps(stable(json.loads(json.dumps(report))), indent=1))
        text = re.sub(r'"origin": "\w+"', '"origin": "..."', text)
        self.assertExpectedInline(
            text,
            """\
{
 "schema_version": "1.0",
 "graphs": [
  {
   "matches": [
    {
     "op": "attention",
     "kernel": "torch.sdpa",
     "rewritten": true,
     "where": "tests/test_report.py:LINE",
     "graph": "",
     "attributes": {
      "scale": 0.25,
      "bias_is_finite": true
     },
     "formula": "",
     "mask": "",
     "mask_reasons": [],
     "why": "expected at 0.8 of Inductor's latency",
     "reasons": [],
     "context": {
      "operation": "attention.full",
      "hardware": "...",
      "dtype": "float32",
      "dims": {
       "batch_size": 2,
       "head_dim": 16,
       "num_heads": 3,
       "num_kv_heads": 3,
       "seq_len_k": 17,
       "seq_len_q": 7,
       "value_dim": 16
      },
      "features": {},
      "layout": "BHSD",
      "is_last_dim_contiguous": true,
      "attn_mask_type": "none",
      "has_custom_scale": false,
      "is_training": false,
      "requires_deterministic": false,
      "is_cuda_graph_capturing": false,
      "memory_headroom_bytes": null,
      "source_kernel": null,
      "surroundings": ""
     },
     "guards": [],
     "candidates": [
      {
       "kernel": "torch.sdpa",
       "score": "...",
       "relative_latency": "...",
       "origin": "...",
       "against": [],
       "notes": []
      },
      {
       "kernel": "xformers",
       "score": "...",
       "relative_latency": "...",
       "origin": "...",
       "against": [
        {
         "code": "PLATFORM_MISMATCH",
         "message": "xformers runs on cuda, not cpu"
        },
        {
         "code": "NOT_INSTALLED",
         "message": "xformers is not installed"
        }
       ],
       "notes": []
      }
     ],
     "validation": {
      "kernel": "torch.sdpa",
      "ok": true,
      "error": "...",
      "source_error": "...",
      "grad_error": null,
      "cases": 3,
      "reason": "",
      "origin": "..."
     },
     "module": "",
     "picture": [],
     "buckets": [],
     "before": [
      "matmul: f32[2, 3, 7, 17] = l_query_ @ transpose",
      "mul: f32[2, 3, 7, 17] = matmul * 0.25",
      "softmax: f32[2, 3, 7, 17] = mul.softmax(-1)",
      "out: f32[2, 3, 7, 16] = softmax @ l_value_"
     ],
     "after": [
      "scaled_dot_product_attention: f32[2, 3, 7, 16] = F.scaled_dot_product_attention(l_query_, l_key_, l_value_, attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.25, enable_gqa=False)"
     ]
    }
   ],
   "loops": [],
   "layers": [],
   "near_misses": [
    {
     "op": "attention",
     "where": "tests/test_report.py:LINE",
     "reason": {
      "code": "SCORES_NOT_AFFINE",
      "message": "the scores pass through softplus"
     },
     "edit": "scale, mask, bias or tanh-cap the scores; other functions have no kernel",
     "module": ""
    }
   ],
   "unproven": [],
   "events": [],
   "modules": [],
   "loaded": false
  }
 ]
}""",
        )

    def test_a_graph_before_and_after(self):
        recorded = EagerAndRecordGraphs()
        torch._dynamo.reset()
        torch.compile(masked, backend=recorded)(*operands(), torch.rand(2, 1, 7, 17) < 2)
        self.assertExpectedInline(
            shown(recorded.graphs[0]),
            """\
class GraphModule(torch.nn.Module):
    def forward(self, L_key_: "f32[2, 3, 17, 16]", L_query_: "f32[2, 3, 7, 16]", L_keep_: "b8[2, 1, 7, 17]", L_value_: "f32[2, 3, 17, 16]"):
        l_key_ = L_key_
        l_query_ = L_query_
        l_keep_ = L_keep_
        l_value_ = L_value_

        transpose: "f32[2, 3, 16, 17]" = l_key_.transpose(-2, -1);  l_key_ = None
        matmul: "f32[2, 3, 7, 17]" = l_query_ @ transpose;  l_query_ = transpose = None
        mul: "f32[2, 3, 7, 17]" = matmul * 0.25;  matmul = None
        invert: "b8[2, 1, 7, 17]" = ~l_keep_;  l_keep_ = None
        masked_fill: "f32[2, 3, 7, 17]" = mul.masked_fill(invert, -inf);  mul = invert = None
        softmax: "f32[2, 3, 7, 17]" = masked_fill.softmax(-1);  masked_fill = None
        matmul_1: "f32[2, 3, 7, 16]" = softmax @ l_value_;  softmax = l_value_ = None
        return (matmul_1,)
""",
        )
        rewriting = Rewriting(lock={"attention": "torch.sdpa"}, assume_finite=True)
        torch._dynamo.reset()
        torch.compile(masked, backend=rewriting)(*operands(), torch.rand(2, 1, 7, 17) < 2)
        self.assertExpectedInline(
            shown(rewriting.graphs[0]),
            """\
class GraphModule(torch.nn.Module):
    def forward(self, L_key_: "f32[2, 3, 17, 16]", L_query_: "f32[2, 3, 7, 16]", L_keep_: "b8[2, 1, 7, 17]", L_value_: "f32[2, 3, 17, 16]"):
        l_key_ = L_key_
        l_query_ = L_query_
        l_keep_ = L_keep_
        l_value_ = L_value_

        invert: "b8[2, 1, 7, 17]" = ~l_keep_;  l_keep_ = None
        logical_not: "b8[2, 1, 7, 17]" = torch.logical_not(invert);  invert = None
        scaled_dot_product_attention: "f32[2, 3, 7, 16]" = torch._C._nn.scaled_dot_product_attention(l_query_, l_key_, l_value_, attn_mask = logical_not, dropout_p = 0.0, is_causal = False, scale = 0.25, enable_gqa = False);  l_query_ = l_key_ = l_value_ = None
        any_1: "b8[2, 1, 7, 1]" = logical_not.any(-1, keepdim = True);  logical_not = None
        where: "f32[2, 3, 7, 16]" = torch.where(any_1, scaled_dot_product_attention, nan);  any_1 = scaled_dot_product_attention = None
        return (where,)
""",
        )

    def test_a_printed_report(self):
        attributes = {"scale": 0.25, "is_causal": True}
        match = MatchReport(
            "attention", "model.py:7", "", attributes, kernel="torch.sdpa", rewritten=True, why="locked"
        )
        match.validation = {"ok": True, "error": 1.25e-7, "source_error": 2e-7}
        taken = {"kernel": "torch.sdpa", "score": 125.0, "relative_latency": 0.8, "origin": "prior", "against": []}
        refused = {**taken, "kernel": "lz.blocked", "against": [{"code": "SINKS_UNSUPPORTED", "message": "no sinks"}]}
        elsewhere = {**taken, "kernel": "flashinfer", "against": [{"code": "PLATFORM_MISMATCH", "message": "on cuda"}]}
        match.candidates = [
            taken,
            {**taken, "kernel": "inductor", "score": 100.0, "relative_latency": 1.0},
            refused,
            elsewhere,
        ]
        miss = MissReport("attention", "model.py:9", Reason("INTERIOR_USED", "weights is also returned"), "do not")
        event = events.Event("STORE_UNREADABLE", "validation: no such device")
        again = replace(match, where="model.py:8")
        report = Report([GraphReport(0, [match, again], [miss], [event], {"recognise": 0.0015, "compile": 0.25})])
        text = (printed(report, 100) + printed(report.in_full(), 100)).translate(
            str.maketrans("┏━┳┓┃┡╇┩│└─┴┘", "+-++|+++|+-++")
        )
        self.assertExpectedInline(
            "\n".join(line.rstrip() for line in text.splitlines()),
            """\
Matches: 2 in 1 graph, 2 rewritten
  2 x attention  torch.sdpa  rewritten  model.py:7 and 1 other place
Near misses: 1, by cause
  1 x attention: [INTERIOR_USED] weights is also returned
      at model.py:9
      -> do not
Events: 1
  1 x [STORE_UNREADABLE] validation: no such device
Time: 0.25 s (recognise 2 ms, compile 250 ms)
Details: verbose=True, --verbose, or rich.print(report.in_full()).
Matches: 2 in 1 graph, 2 rewritten
  2 x attention  torch.sdpa  rewritten  model.py:7 and 1 other place
Near misses: 1, by cause
  1 x attention: [INTERIOR_USED] weights is also returned
      at model.py:9
      -> do not

2 x attention: torch.sdpa, rewritten
  where       model.py:7, model.py:8
  attributes  scale=0.25, is_causal
  why         locked
  proof       error 1.2e-07 against float64, the source's is 2.0e-07
  +------------+-------+---------------------------+----------------+
  | kernel     | score | latency                   | against, notes |
  +------------+-------+---------------------------+----------------+
  | torch.sdpa | 125   | 0.8 of Inductor's (prior) |                |
  | inductor   | 100   | 1 of Inductor's (prior)   |                |
  | lz.blocked | -     | -                         | no sinks       |
  +------------+-------+---------------------------+----------------+
  not for this platform  flashinfer

Events
+------------------+----------------------------+
| code             | message                    |
+------------------+----------------------------+
| STORE_UNREADABLE | validation: no such device |
+------------------+----------------------------+
Time over 1 graph
+-----------+-------+
| stage     | ms    |
+-----------+-------+
| recognise | 1.5   |
| compile   | 250.0 |
+-----------+-------+""",
        )


def shown(module: fx.GraphModule) -> str:
    return normalize_gm(module.print_readable(print_output=False))


MATCH_KEYS = {
    "module",
    "picture",
    "buckets",
    "before",
    "after",
    "op", "kernel", "rewritten", "where", "graph", "attributes", "why", "reasons", "candidates", "validation",
    "context", "guards", "mask", "mask_reasons", "formula",
}  # fmt: skip
VALIDATION_KEYS = {"kernel", "ok", "error", "source_error", "grad_error", "cases", "reason", "origin", "seconds"}


def test_json_has_the_same_keys_whatever_happened():
    def everything(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value) + returning_weights(query, key, value)[1] @ value

    locks = ("torch.sdpa", "inductor")
    found = [
        explain(everything, *operands(), options={"layerzero.lock": {"attention": lock}}, print_report=False).to_dict()
        for lock in locks
    ]
    for report in found:
        assert json.loads(json.dumps(report)) == report
        assert set(report) == {"schema_version", "graphs"}
        for graph in report["graphs"]:
            assert set(graph) == {
                "graph_id",
                "loops",
                "layers",
                "modules",
                "loaded",
                "matches",
                "near_misses",
                "unproven",
                "events",
                "seconds",
            }
            assert graph["matches"]
            for match in graph["matches"]:
                assert set(match) == MATCH_KEYS
                assert match["validation"] is None or set(match["validation"]) == VALIDATION_KEYS
                for candidate in match["candidates"]:
                    assert set(candidate) == {"kernel", "score", "relative_latency", "origin", "against", "notes"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_json_of_every_dtype_is_json(dtype):
    args = [arg.to(dtype) for arg in operands()]
    report = explain(masked, *args, torch.rand(2, 1, 7, 17) < 0.5, print_report=False, dynamic=True)
    assert len(report.matches) == 1
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()


def test_json_of_a_wrong_kernel_is_json_too(monkeypatch, tmp_path):
    from lz_compile.lowering.kernels.attention import torch_sdpa
    from lz_compile.passes.proof import validate
    from lz_compile.runtime.kernels import registry

    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch_sdpa, "attention", lambda x, attrs: x.query @ x.key.mT @ x.value / 0.0)
    validate.forget()
    registry.reload()
    report = explain(attention, *operands(), print_report=False)
    monkeypatch.undo()
    validate.forget()
    registry.reload()
    assert [reason.code for reason in report.matches[0].reasons] == ["VALIDATION_FAILED"]
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()
    assert "VALIDATION_FAILED" in printed(report)


# ---- tables --------------------------------------------------------------------------------------------------------


def test_a_printed_report_shows_kernel_place_and_reasons():
    text = printed(explain(attention, *operands(), print_report=False).in_full(), width=400)
    assert "torch.sdpa" in text
    assert ATTENTION_LINE.removeprefix(f"{Path.cwd()}/") in text
    assert "expected at 0.8 of Inductor's latency" in text
    assert "scale=0.25" in text
    for stage in ("recognise", "select", "validate", "rewrite", "compile"):
        assert stage in text


def test_a_printed_report_shows_why_a_kernel_cannot_run():
    def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (torch.tanh(query @ key.transpose(-2, -1) / 5) * 5).softmax(-1) @ value

    text = printed(explain(capped, *operands(), print_report=False).in_full(), width=400)
    (row,) = [line for line in text.splitlines() if line.strip().startswith("│ torch.sdpa")]
    assert "torch.sdpa does not take scores capped at 5" in row


def test_near_misses_are_listed_with_the_edit_that_would_make_them_match():
    report = explain(returning_weights, *operands(), print_report=False)
    (miss,) = report.near_misses
    assert report.matches == []
    assert miss.reason.code == "INTERIOR_USED"
    assert (
        miss.edit
        == "return no scores or probabilities and compute nothing else from them (transformers: output_attentions=False)"
    )
    assert miss.where == WEIGHTS_LINE
    for shown_as in (report, report.in_full()):
        text = printed(shown_as, width=500)
        assert "Near misses" in text
        assert miss.edit in text
        assert "[INTERIOR_USED] weights (softmax at tests/test_report.py" in text
        assert WEIGHTS_LINE.removeprefix(f"{Path.cwd()}/") in text


def large_report() -> Report:
    """As of a model with 40 layers in 8 forms, near misses in each, and events."""
    package = "/opt/python/lib/python3.11/site-packages/some_models/modeling_with_a_long_name/attention_of_layers.py"
    matches = [
        MatchReport(
            "attention",
            f"{package}:{layer % 8}",
            "",
            {},
            kernel="torch.sdpa",
            rewritten=layer % 2 == 0,
            why="expected to be faster",
        )
        for layer in range(40)
    ]
    misses = [
        MissReport("norm", f"{package}:{100 + n % 2}", Reason("NORM_UNREAD", f"value_{n} is read elsewhere"), "do not")
        for n in range(160)
    ]
    misses += [MissReport("scan", f"model.py:{n}", Reason("STATE_UNREAD", "x" * n), "use lz.kda") for n in range(10)]
    happened = [
        events.Event("VALIDATION_FAILED", f"layer {n} is quarantined: " + "for a reason " * 90) for n in range(40)
    ]
    return Report([GraphReport(0, matches, misses, happened, {"recognise": 0.5})])


@pytest.mark.parametrize("width", [80, 100])
def test_a_large_report_fits_a_screen(width):
    lines = printed(large_report(), width).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("Matches: 40 in 1 graph, 20 rewritten")
    assert lines[1].split()[:5] == ["20", "x", "attention", "torch.sdpa", "rewritten"]
    assert lines[1].endswith("other places")
    text = " ".join(" ".join(lines).split())
    assert "160 x norm: [NORM_UNREAD] value_0 is read elsewhere at some_models/" in text
    assert "attention_of_layers.py:100 (80 x), some_models" in text
    assert "and 6 more causes" in text
    scattered = [
        MissReport("norm", f"model.py:{line}", Reason("UNREAD", "it is unread"), "do not") for line in range(12)
    ]
    assert "model.py:4, and 7 other places" in " ".join(printed(Report([GraphReport(0, [], scattered)]), width).split())
    assert text.index("Matches") < text.index("Near misses") < text.index("Events") < text.index("Time")


@pytest.mark.parametrize("width", [80, 100])
def test_tables_break_no_words_where_there_is_room(width):
    path = "some/long/path/of/a_file.py"
    prose = "a text of many short words " * 4
    table = Rows("", ("one", "two", "three", "four"), [(f"{path} and {path}", prose, prose, prose)])
    assert path in re.findall(r"[\w/.]+", printed(table, width))
    assert max(map(len, printed(table, 30).splitlines())) <= 30


def test_nothing_to_tell_is_told():
    report = explain(torch.sin, torch.randn(3), print_report=False)
    assert "Nothing recognised in 1 graph." in printed(report)
    assert Report([]).to_dict() == {"schema_version": "1.0", "graphs": []}
    assert "Nothing recognised in 0 graphs." in printed(Report([]))


def test_brackets_in_texts_are_not_taken_for_styles():
    graph = GraphReport(0, events=[events.Event("CODE", "a [bold]bracket[/bold] and [/]")])
    assert "a [bold]bracket[/bold] and [/]" in printed(Report([graph]))


def test_reports_print_with_rich(capsys):
    explain(attention, *operands(), print_report=False)
    rich.print(Report(reports()))
    assert "Matches" in capsys.readouterr().out


def test_a_reason_prints_code_and_message():
    assert str(Reason("HEAD_DIM_INVALID", "head_dim 320")) == "[HEAD_DIM_INVALID] head_dim 320"


# ---- the list of reports -------------------------------------------------------------------------------------------


def test_reports_are_kept_in_order_until_they_are_cleared():
    for function in (attention, returning_weights, torch.sin):
        args = operands() if function is not torch.sin else [torch.randn(3)]
        torch.compile(function, backend=layerzero)(*args)
    assert [(len(report.matches), len(report.near_misses)) for report in reports()] == [(1, 0), (0, 1), (0, 0)]
    first = reports()[0].graph_id
    assert [report.graph_id for report in reports()] == [first, first + 1, first + 2]
    clear_reports()
    assert reports() == []


def test_the_last_thousand_reports_are_kept_or_as_many_as_are_asked_for():
    made = [new_report() for _ in range(1010)]
    assert reports() == made[-1000:]
    lz_compile.configure(max_reports=3)
    made.append(new_report())
    assert reports() == made[-3:]


def test_the_list_of_reports_is_a_copy():
    reports().append(GraphReport(7))
    assert reports() == []


def test_the_public_names_are_there_and_others_are_not():
    for name in lz_compile.__all__:
        assert getattr(lz_compile, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'explane'"):
        _ = lz_compile.explane


# ---- events --------------------------------------------------------------------------------------------------------


def test_every_error_is_public():
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes <= set(lz_compile.__all__)
    assert all(issubclass(getattr(lz_compile, name), lz_compile.LayerZeroError) for name in classes)
    documented = (ROOT / "docs" / "explaining.md").read_text()
    assert {name for name in classes if f"`{name}`" not in documented} == set()


def test_events_are_collected_by_everyone_who_listens_in_this_thread():
    with events.collect() as outer:
        events.record("FIRST", "one")
        with events.collect() as inner:
            events.record("SECOND", "two", ValueError("three"))
        events.record("THIRD", "four")
    assert [event.code for event in outer] == ["FIRST", "SECOND", "THIRD"]
    assert [event.to_dict() for event in inner] == [{"code": "SECOND", "message": "two: ValueError: three"}]


def test_equal_lists_of_events_are_told_apart():
    """`list.remove` compares by value: an inner listener that heard the same must not silence the outer one."""
    with events.collect() as outer:
        with events.collect():
            pass
        events.record("HEARD", "after the inner one left")
    assert [event.code for event in outer] == ["HEARD"]


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["option", "environment"])
def test_graphs_and_report_are_written_into_a_directory(tmp_path, monkeypatch, by):
    directory = tmp_path / "new" / "dump"
    options = {"layerzero.dump": str(directory)} if by == "option" else None
    if by == "environment":
        monkeypatch.setenv("LAYERZERO_DUMP", str(directory))
    torch.compile(attention, backend=layerzero, options=options)(*operands())
    stem = f"{os.getpid()}.graph{reports()[0].graph_id}"
    assert sorted(path.name for path in directory.iterdir()) == [
        f"{stem}.after.py",
        f"{stem}.before.py",
        f"{stem}.diff",
        f"{stem}.report.html",
        f"{stem}.report.json",
    ]
    before, after = ((directory / f"{stem}.{stage}.py").read_text() for stage in ("before", "after"))
    assert (before.count("mul.softmax(-1)\n"), before.count("scaled_dot_product_attention(")) == (1, 0)
    assert (after.count("mul.softmax(-1)\n"), after.count("scaled_dot_product_attention(")) == (0, 1)
    ours = after[after.index("# >>> lz_compile") : after.index("# <<< lz_compile")]
    assert "scaled_dot_product_attention(" in ours
    changed = [line for line in (directory / f"{stem}.diff").read_text().splitlines() if line[:1] in "+-"]
    assert any(line.startswith("-softmax") for line in changed)
    assert any("scaled_dot_product_attention" in line and line.startswith("+") for line in changed)
    assert "replaced by torch.sdpa" in (directory / f"{stem}.report.html").read_text()
    assert json.loads((directory / f"{stem}.report.json").read_text()) == reports()[0].to_dict()


def test_a_dump_that_is_a_zip_holds_every_graph_and_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "new" / "dump.zip"
    for function in (attention, returning_weights):
        torch.compile(function, backend=layerzero, options={"layerzero.dump": path})(*operands())
    with zipfile.ZipFile(path) as found:
        assert found.testzip() is None
        texts = {name: found.read(name).decode() for name in found.namelist()}
    assert len([name for name in texts if name.endswith(".report.html")]) == 2
    assert "environment.json" in texts
    for root in (str(ROOT), sys.prefix, str(Path.home())):
        assert not [name for name, text in texts.items() if f"{root}{os.sep}" in text], root
    assert "tests/test_report.py:" in texts[f"{os.getpid()}.graph{reports()[0].graph_id}.before.py"]


def test_processes_that_dump_into_one_zip_at_once_lose_nothing(tmp_path):
    path = tmp_path / "dump.zip"
    adding = partial(dump._add, path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: adding({f"{n}.py": "x"}), range(24)))
    with zipfile.ZipFile(path) as found:
        assert {f"{n}.py" for n in range(24)} <= set(found.namelist())


def test_a_zip_that_is_none_is_an_event_and_stays(tmp_path):
    path = tmp_path / "dump.zip"
    path.write_text("something else")
    torch.compile(attention, backend=layerzero, options={"layerzero.dump": path})(*operands())
    assert "DUMP_UNWRITABLE" in [event.code for event in reports()[0].events]
    assert path.read_text() == "something else"


def test_parameters_have_their_paths_in_a_dump_and_values_of_constants_are_not_told(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 4)])
            self.secret = torch.tensor([12345.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) + self.secret + torch.tensor([54321.0])

    torch.compile(Model(), backend=layerzero, options={"layerzero.dump": tmp_path})(torch.randn(2, 3))
    (path,) = tmp_path.glob("*.before.py")
    text = path.read_text()
    assert "#   self.layers[0].weight: f32[4, 3]" in text
    assert "# layers.0 (Linear)" in text
    assert "return self.layers[0](x) + self.secret" in text, "the source line"
    assert "12345" not in text


def test_every_graph_has_files_of_its_own(tmp_path):
    def broken(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = attention(query, key, value)
        torch._dynamo.graph_break()
        return first.sin()

    torch.compile(broken, backend=layerzero, options={"layerzero.dump": tmp_path})(*operands())
    assert len(list(tmp_path.glob("*.report.json"))) == 2


def test_clearing_the_reports_overwrites_no_files(tmp_path):
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(attention, backend=layerzero, options={"layerzero.dump": tmp_path})(*operands())
        clear_reports()
    assert len(list(tmp_path.glob("*.report.json"))) == 2


def test_a_report_is_written_even_where_the_compile_fails(tmp_path, monkeypatch):
    def fails(*_: object, **_named: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(inductor, "compile_graph", fails)
    with pytest.raises(Exception, match="planted"):
        torch.compile(attention, backend=layerzero, options={"layerzero.dump": tmp_path})(*operands())
    (path,) = tmp_path.glob("*.report.json")
    assert [event["code"] for event in json.loads(path.read_text())["events"]] == ["COMPILE_FAILED"]


# ---- logs ----------------------------------------------------------------------------------------------------------

CHILD = """
import torch
import lz_compile as lz
from lz_compile.backend import layerzero
from lz_compile.lowering import inductor
inductor.compile_graph = lambda graph, *_, **__: graph.forward  # the subject is what is said, not Inductor's code
lz.prefer("torch.sdpa")
def attention(query, key, value):
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value
def capped(query, key, value):
    weights = (query @ key.transpose(-2, -1)).softmax(-1)
    return weights @ value, weights
args = [torch.randn(2, 3, length, 16) for length in (7, 17, 17)]
for function in (attention, capped):
    torch.compile(function, backend=layerzero)(*args)
"""


def test_torch_logs_tell_decisions_and_the_structured_trace_holds_graphs_and_report(tmp_path):
    """Without them nothing is said: see ``test_telemetry.py``."""
    given = {**os.environ, **known_instruction_sets(), "PYTHONPATH": str(ROOT)}
    given["LAYERZERO_CACHE_DIR"] = str(tmp_path / "cache")
    given |= {"TORCH_LOGS": "+lz_compile", "TORCH_TRACE": str(tmp_path / "trace")}
    done = subprocess.run(
        [sys.executable, "-c", USUAL_MACHINE + CHILD], env=given, capture_output=True, text=True, check=True
    )
    text = done.stderr
    assert "rewritten (expected at" in text
    assert "attention" in text
    assert "INTERIOR_USED" in text
    (log,) = (tmp_path / "trace").glob("*.log")
    lines = [line for line in log.read_text().splitlines() if '"artifact"' in line]
    artifacts = [json.loads(line[line.index("{") :])["artifact"] for line in lines]
    ours = [row for row in artifacts if row["name"].startswith("layerzero_")]
    assert (
        ours
        == [
            {"name": "layerzero_before", "encoding": "string"},
            {"name": "layerzero_after", "encoding": "string"},
            {"name": "layerzero_report", "encoding": "json"},
        ]
        * 2
    )
    assert '"kernel": "torch.sdpa"' in log.read_text()


def test_a_fault_goes_into_the_log_with_its_traceback(monkeypatch):
    heard = []
    monkeypatch.setattr(events.logger, "log", lambda *args, **kwargs: heard.append((args, kwargs)))
    error = ValueError("planted")
    events.record("CODE", "doing something", error)
    ((level, text, *values), kwargs) = heard[0]
    assert level == logging.WARNING
    assert text % tuple(values) == "[CODE] doing something: ValueError: planted"
    assert kwargs["exc_info"] is error


def test_an_error_is_told_once() -> None:
    with events.collect() as found:
        events.record("CODE", "it raised ValueError: planted", ValueError("planted\nand more"))
        events.record("CODE", "it raised", ValueError())
    assert [event.message for event in found] == ["it raised ValueError: planted", "it raised: ValueError: "]


@pytest.mark.parametrize(
    ("us", "text"), [(0.25, "0.25 µs"), (999.4, "999 µs"), (999.6, "1 ms"), (101_900.0, "102 ms"), (1.5e6, "1.5 s")]
)
def test_times_are_told_in_the_unit_that_makes_them_short(us: float, text: str) -> None:
    assert duration(us) == text
