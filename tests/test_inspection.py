"""Asking for one problem, for a model without running it, and whether a kernel works on given tensors."""

from __future__ import annotations

import io
import json

import expecttest
import pytest
import torch
from problems import from_tensors
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import lz_compile as lz
from lz_compile import SelectionReport, dry_run, explain, validate, which
from lz_compile.errors import OptionError, UnknownKernelError, UnknownOperationError
from lz_compile.ground import health
from lz_compile.ground.machine import environment
from lz_compile.lowering.ops.attention import Operands, reference
from lz_compile.runtime.kernels import constraints, registry
from lz_compile.runtime.measure import perf_record, perfdb
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.policy import policy

pytestmark = pytest.mark.usefixtures("no_preference")


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value


def operands(*lengths: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    lengths = lengths or (24, 32, 32)
    return [torch.randn(2, 4, length, 16).to(dtype).requires_grad_(grad) for length in lengths]


def printed(report: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report)
    return console.file.getvalue()


@pytest.fixture
def database(tmp_path):
    policy.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    return perfdb.database(str(tmp_path / "perfdb.sqlite"))


def measured(database, ctx, **latencies_us: float) -> None:
    """Put measurements of a problem into the database, of kernels by their ids (with _ for a dot)."""
    records = [
        perf_record.PerfRecord(
            kernel_id=name.replace("_", "."),
            operation=ctx.operation,
            device_id="test",
            dtype=ctx.dtype_name,
            environment=environment("cpu"),
            workload=perf_record.canonical(workload(ctx, None, ctx.hints())),
            median_us=latency,
            p95_us=latency,
            samples=20,
            variance_us=1e-6,
        )
        for name, latency in latencies_us.items()
    ]
    database.put(records)


@pytest.fixture
def planted():
    """Registers kernels that are gone after the test."""
    added = []

    def plant(kernel_id, function, **fields):
        limits = {
            "platforms": frozenset({"cpu"}),
            "dtypes": frozenset({"*"}),
            "requires_layouts": frozenset({"BHSD"}),
            "supports": frozenset({"*"}),
        }
        spec = registry.KernelSpec(
            kernel_id=kernel_id, operation="attention", source="test", implementation=function, **{**limits, **fields}
        )
        registry.register(spec)
        added.append(kernel_id)

    yield plant
    for kernel_id in added:
        registry.unregister_kernel(kernel_id)
        health.restore(kernel_id)


# ---- which -----------------------------------------------------------------------------------------------------------


def test_which_tells_kernel_score_and_why(database):
    ctx = from_tensors(*operands(), causal=True)
    measured(database, ctx, inductor=100.0, torch_sdpa=50.0)
    found = which("attention.causal", *operands())
    assert found == {
        "operation": "attention.causal",
        "kernel_id": "torch.sdpa",
        "score": 200.0,
        "why": "measured at 0.5 of Inductor's latency",
        "origin": "measured",
    }


def test_which_asks_for_the_variant_that_is_named(database):
    measured(database, from_tensors(*operands(), causal=True), inductor=100.0, torch_sdpa=50.0)
    measured(database, from_tensors(*operands()), inductor=100.0, lz_blocked=50.0)
    assert which("attention.causal", *operands())["kernel_id"] == "torch.sdpa"
    assert which("attention.full", *operands())["kernel_id"] == "lz.blocked"
    assert which("attention", *operands())["operation"] == "attention.full"


def test_which_needs_no_data():
    with FakeTensorMode():
        fake = [torch.empty(1, 64, 65536, 128, dtype=torch.bfloat16) for _ in range(3)]
    assert which("attention.causal", *fake)["kernel_id"] in registry.kernels("attention")


def test_which_follows_a_lock_and_says_whose():
    with lz.lock("attention", "lz.blocked"):
        found = which("attention.causal", *operands())
    assert (found["kernel_id"], found["why"]) == ("lz.blocked", "locked by lz.lock()")


def test_which_reads_mask_layout_and_gradients():
    tokens_first = [each.transpose(1, 2) for each in operands(24, 32, 32, grad=True)]
    mask = torch.ones(2, 1, 24, 32, dtype=torch.bool)
    report = explain("attention.full", *tokens_first, mask=mask, layout="BSHD", print_report=False)
    ctx = report.problem.context
    assert (ctx.dims["seq_len_q"], ctx.dims["num_heads"]) == (24, 4)
    assert {"bool_mask", "training"} <= set(ctx.features)


def test_an_unknown_operation_names_the_nearest():
    with pytest.raises(
        UnknownOperationError, match=r"no operation 'attention.casual' \(did you mean 'attention.causal'"
    ):
        which("attention.casual", *operands())


def test_tensors_of_another_rank_are_refused():
    with pytest.raises(ValueError, match=r"expected query \[B, Hq, Sq, D\]"):
        which("attention", *(each[0] for each in operands()))


# ---- explain an operation --------------------------------------------------------------------------------------------


def test_explaining_an_operation_gives_every_candidate_with_its_reasons(database):
    measured(database, from_tensors(*operands()), inductor=100.0, torch_sdpa=50.0)
    report = explain("attention.full", *operands(), print_report=False)
    assert isinstance(report, SelectionReport)
    record = report.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["schema_version"] == "1.0"
    by_id = {candidate["kernel"]: candidate for candidate in record["candidates"]}
    assert set(by_id) == set(registry.kernels("attention"))
    assert by_id["torch.sdpa"]["median_us"] == 50.0
    assert {reason["code"] for reason in by_id["flash_attn.v2"]["against"]} >= {"PLATFORM_MISMATCH"}
    assert record["context"]["dims"]["seq_len_k"] == 32


def test_explaining_an_operation_tells_what_the_policy_says():
    with lz.prefer("lz.blocked"), lz.avoid("torch.sdpa"):
        report = explain("attention.full", *operands(), print_report=False)
    assert report.to_dict()["policy"]["prefer"] == [{"kernel": "lz.blocked", "origin": "lz.prefer()"}]
    text = printed(report)
    assert "prefers lz.blocked (lz.prefer())" in text
    assert "avoids torch.sdpa (lz.avoid())" in text


@pytest.mark.parametrize(
    ("version", "dtype", "grad", "is_refused"),
    [
        ((2, 11), torch.float64, True, True),
        ((2, 11), torch.float64, False, False),
        ((2, 11), torch.float32, True, False),
        ((2, 13), torch.float64, True, False),
    ],
)
def test_sdpa_is_kept_out_of_graphs_whose_gradients_pytorch_compiles_wrong(
    monkeypatch, version, dtype, grad, is_refused
):
    monkeypatch.setattr(constraints, "TORCH", version)
    report = explain("attention.full", *operands(dtype=dtype, grad=grad), print_report=False)
    (candidate,) = [each for each in report.decision.candidates if each.kernel.kernel_id == "torch.sdpa"]
    assert ("TORCH_TOO_OLD" in [reason.code for reason in candidate.against]) is is_refused
    lz.attention(*operands(dtype=dtype, grad=grad))  # which is not compiled


def test_a_lock_that_cannot_be_followed_is_told():
    with lz.lock("attention", "flash_attn.v2"):
        report = explain("attention.full", *operands(), print_report=False)
    assert [reason["code"] for reason in report.to_dict()["refused"]] == ["LOCK_NOT_POSSIBLE"]
    assert "flash_attn.v2 runs on cuda, not cpu" in " ".join(printed(report, 200).split())


def test_explaining_an_operation_prints_only_where_it_is_asked_to(capsys):
    explain("attention.full", *operands(), print_report=False)
    assert capsys.readouterr().out == ""
    explain("attention.full", *operands())
    assert "attention.full:" in capsys.readouterr().out


class Snapshots(expecttest.TestCase):
    """Texts that a reviewer reads; `EXPECTTEST_ACCEPT=1` rewrites them."""

    def test_candidates_of_other_platforms_take_one_line(self):
        from lz_compile.report.render import candidates

        def candidate(kernel, *codes, **more):
            against = [{"code": code, "message": f"because of {code}"} for code in codes]
            return {
                "kernel": kernel,
                "score": 100.0,
                "relative_latency": 1.0,
                "origin": "assumed",
                "against": against,
                **more,
            }

        measured = {"origin": "measured", "median_us": 512.25, "noise": 0.0125, "measured_at": {"seq_len_q": 64}}
        found = [
            candidate("torch.sdpa", score=212.0, relative_latency=0.47, **measured),
            candidate("inductor", notes=[{"code": "POLICY_AVOIDED", "message": "avoided by lz.avoid()"}]),
            candidate("narrow", "HEAD_DIM_INVALID", "DTYPE_UNSUPPORTED"),
            candidate("elsewhere", "PLATFORM_MISMATCH", "NOT_INSTALLED"),
            candidate("another", "PLATFORM_MISMATCH"),
            candidate("absent", "NOT_INSTALLED"),
        ]
        context = {"hardware": {"platform": "cpu"}, "dims": {"seq_len_q": 100}}
        console = Console(file=io.StringIO(), width=100)
        for part in candidates(found, "torch.sdpa", context):
            console.print(part)
        text = console.file.getvalue().translate(str.maketrans("┏━┳┓┃┡╇┩│└─┴┘µ±", "+-++|+++|+-++u~"))
        self.assertExpectedInline(
            "\n".join(line.rstrip() for line in text.splitlines()),
            """\
  +------------+-------+--------------------------------------------+------------------------------+
  | kernel     | score | latency                                    | against, notes               |
  +------------+-------+--------------------------------------------+------------------------------+
  | torch.sdpa | 212   | 512 us, 0.47 of Inductor's (measured at    |                              |
  |            |       | seq_len_q=64, ~1.2%)                       |                              |
  | inductor   | 100   | 1 of Inductor's (assumed)                  | avoided by lz.avoid()        |
  | narrow     | -     | -                                          | because of HEAD_DIM_INVALID  |
  |            |       |                                            | because of DTYPE_UNSUPPORTED |
  +------------+-------+--------------------------------------------+------------------------------+
  not for cpu    elsewhere, another
  not installed  absent""",
        )


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_the_console(width):
    for report in (
        explain("attention.full", *operands(), print_report=False),
        dry_run(attention, *operands(), print_report=False).in_full(),
    ):
        text = printed(report, width)
        assert max(map(len, text.splitlines())) <= width
        assert "lz.blocked" in text
        assert "not for cpu" in text


# ---- dry run ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two attentions with a graph break between, state on the module, and a note of every value that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.last: Tensor | None = None
        self.seen: list[type] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.add_(1)
        out = attention(query, key, value)
        self.last = out
        self.note(out)
        return attention(out, key, value)

    @torch.compiler.disable
    def note(self, out: Tensor) -> None:
        self.seen.append(type(out))


def test_a_dry_run_finds_what_explain_finds_without_running_a_graph():
    model = Model()
    report = dry_run(model, *operands(), print_report=False)
    assert [match.op for match in report.matches] == ["attention", "attention"]
    assert model.seen == [FakeTensor]
    assert report.events == []
    explained = explain(attention, *operands(), print_report=False)
    assert report.matches[0].kernel == explained.matches[0].kernel
    assert report.matches[0].candidates == explained.matches[0].candidates


def test_a_dry_run_leaves_the_module_as_it_was():
    model = Model()
    dry_run(model, *operands(), print_report=False)
    assert model.calls.item() == 0
    assert type(model.calls) is Tensor
    assert model.last is None
    explain(model, *operands(), print_report=False)
    assert model.calls.item() == 1


def test_a_dry_run_proves_and_rewrites_nothing():
    with lz.lock("attention", "torch.sdpa"):
        report = dry_run(attention, *operands(), print_report=False)
    (match,) = report.matches
    assert (match.kernel, match.rewritten, match.validation) == ("torch.sdpa", False, None)
    assert [reason.code for reason in match.reasons] == ["NOT_PROVEN"]


def test_a_dry_run_calls_no_kernel(planted):
    def kernel(x, attrs):
        raise AssertionError("a dry run ran a kernel")

    planted("test.forbidden", kernel)
    with lz.lock("attention", "test.forbidden"):
        report = dry_run(attention, *operands(), print_report=False)
    assert [match.kernel for match in report.matches] == ["test.forbidden"]
    assert report.events == []


def test_a_dry_run_that_needs_values_runs_the_graphs_and_says_so():
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(query, key, value)
        if out.abs().sum() > 0:
            return attention(out, key, value)
        return out

    report = dry_run(model, *operands(), print_report=False)
    assert len(report.matches) == 2
    assert [event.code for event in report.events] == ["DRY_RUN_NEEDS_VALUES"]
    assert "DataDependentOutputException" in report.events[0].message


def test_a_model_that_fails_by_itself_raises_its_own_error():
    def model(query: Tensor) -> Tensor:
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted"):
        dry_run(model, torch.randn(2), print_report=False)


def test_a_dry_run_keeps_no_report_of_its_own():
    dry_run(attention, *operands(), print_report=False)
    assert lz.reports() == []


def test_a_dry_run_takes_options_and_dynamic_shapes():
    report = dry_run(
        attention, *operands(), options={"layerzero.lock": {"attention": "inductor"}}, dynamic=True, print_report=False
    )
    (match,) = report.matches
    assert match.kernel == "inductor"
    assert isinstance(match.context["dims"]["seq_len_q"], dict)
    with pytest.raises(OptionError, match=r"no option 'layerzero\.lok'"):
        dry_run(attention, *operands(), options={"layerzero.lok": {}}, print_report=False)


# ---- validate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_id", ["torch.sdpa", "lz.blocked"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_work_are_valid(kernel_id, causal, dtype):
    assert validate(kernel_id, *operands(32, 32, 32, dtype=dtype), causal=causal) == (True, [])


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_layouts_fewer_key_heads_and_gradients_are_tried(kind, layout):
    query, key, value = (torch.randn(2, heads, length, 16) for heads, length in ((4, 24), (2, 32), (2, 32)))
    keep = torch.rand(2, 1, 24, 32) > 0.5
    keep[0, 0, :3] = False
    mask = keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    tensors = [each.transpose(1, 2) if layout == "BSHD" else each for each in (query, key, value)]
    assert validate("torch.sdpa", *tensors, mask=mask, layout=layout, scale=0.3) == (True, [])
    plain = [each.detach().requires_grad_() for each in tensors]
    assert validate("torch.sdpa", *plain, layout=layout) == (True, [])
    assert all(each.grad is None for each in plain)


@pytest.mark.slow
def test_the_definition_as_inductor_compiles_it_is_valid():
    assert validate("inductor", *operands(), causal=False) == (True, [])


def test_capabilities_speak_before_anything_runs():
    ok, reasons = validate("flash_attn.v2", *operands())
    assert not ok
    assert {"PLATFORM_MISMATCH", "DTYPE_UNSUPPORTED", "NOT_INSTALLED"} <= {reason.code for reason in reasons}


def test_a_wrong_kernel_is_told_with_figures(planted):
    planted("test.wrong", lambda x, attrs: reference(x, attrs) + 0.5)
    ok, (reason,) = validate("test.wrong", *operands())
    assert not ok
    assert reason.code == "VALIDATION_FAILED"
    assert "test.wrong: output is off by 0.5 where PyTorch is off by" in reason.message
    assert "tolerance 1e-05); 3072 of 3072 elements are wrong, 0 of them not finite" in reason.message


def test_one_wrong_element_is_found(planted):
    def kernel(x, attrs):
        out = reference(x, attrs)
        out[1, 2, 3, 4] = torch.nan
        return out

    planted("test.hole", kernel)
    _, (reason,) = validate("test.hole", *operands())
    assert "1 of 3072 elements are wrong, 1 of them not finite" in reason.message


def test_a_wrong_gradient_is_found(planted):
    def kernel(x, attrs):
        return reference(Operands(x.query, x.key.detach(), x.value), attrs) + 0 * x.key.sum()

    planted("test.gradient", kernel)
    assert validate("test.gradient", *operands()) == (True, [])
    _, (reason,) = validate("test.gradient", *operands(grad=True))
    assert "gradient of key is off by" in reason.message


def test_another_shape_or_dtype_is_a_reason(planted):
    planted("test.shape", lambda x, attrs: reference(x, attrs)[:1])
    planted("test.dtype", lambda x, attrs: reference(x, attrs).double())
    assert (
        "output is (1, 4, 24, 16) float32, expected (2, 4, 24, 16) float32"
        in validate("test.shape", *operands())[1][0].message
    )
    assert "output is (2, 4, 24, 16) float64" in validate("test.dtype", *operands())[1][0].message


def test_a_kernel_that_raises_is_not_valid(planted):
    def kernel(x, attrs):
        raise RuntimeError("no luck\nand a second line")

    planted("test.raises", kernel)
    ok, (reason,) = validate("test.raises", *operands())
    assert (ok, reason.code, reason.message) == (False, "KERNEL_FAILED", "test.raises raised RuntimeError: no luck")


def test_a_kernel_whose_fallback_answered_is_not_valid(planted):
    def broken(*tensors):
        raise RuntimeError("no luck")

    def kernel(x, attrs):
        return health.guarded("test.fallback", broken, reference, x, attrs)

    planted("test.fallback", kernel)
    ok, reasons = validate("test.fallback", *operands())
    assert not ok
    assert reasons[0].code == "KERNEL_FAILED"
    # It is retired now, and a call would be answered by the fallback again.
    assert [reason.code for reason in validate("test.fallback", *operands())[1]] == ["KERNEL_RETIRED"]


def test_the_callers_tensors_are_never_changed(planted):
    def kernel(x, attrs):
        x.query.zero_()
        return reference(x, attrs)

    planted("test.inplace", kernel)
    tensors = operands()
    before = [each.clone() for each in tensors]
    validate("test.inplace", *tensors)
    assert all(torch.equal(each, known) for each, known in zip(tensors, before, strict=True))


def test_an_unknown_kernel_names_the_nearest():
    with pytest.raises(UnknownKernelError, match=r"no kernel 'torch.spda' \(did you mean 'torch.sdpa'\?\)"):
        validate("torch.spda", *operands())


def test_a_mask_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"expected mask \[B, Hq, Sq, Sk\] of shape \(2, 4, 24, 32\), received \(1, 1, 7, 32\)"
    ):
        validate("torch.sdpa", *operands(), mask=torch.ones(7, 32, dtype=torch.bool))
