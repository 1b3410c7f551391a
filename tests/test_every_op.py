"""Every public call that takes an operation serves every op: one reading of what is given, one list of what an op takes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lz_compile as lz
from lz_compile.api import warming
from lz_compile.api.given import operand_shapes, read, taken
from lz_compile.compile import measuring
from lz_compile.errors import ArgumentError, UnknownKernelError, UnknownOperationError
from lz_compile.ground import events, health
from lz_compile.lowering import ops
from lz_compile.passes.proof.eager_proof import UndefinedError
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem import context as contexts
from lz_compile.tools.command_line import main

pytestmark = pytest.mark.usefixtures("no_preference")
OPS = ops.names()
for_every_op = pytest.mark.parametrize("op", OPS)
for_every_operation = pytest.mark.parametrize("operation", contexts.operations())
#: A kernel of each op that runs on a CPU.
OWN = {
    "attention": "lz.blocked", "blend": "torch.blend", "linear": "torch.linear", "mlp": "torch.mlp", "norm": "torch.norm", "rope": "torch.rope",
    "paged_attention": "torch.paged_attention",
    "routing": "torch.routing", "sampling": "torch.sampling", "scan": "torch.scan_sequential",
}  # fmt: skip
#: Small sizes by the letters of dimensions.
LETTERS = {
    "B": 2,
    "Hq": 4,
    "Hk": 2,
    "Sq": 6,
    "Sk": 6,
    "D": 8,
    "E": 8,
    "N": 3,
    "F": 8,
    "H": 2,
    "S": 6,
    "W": 8,
    "C": 4,
    "K": 5,
    "G": 3,
    "R": 4,
    "Q": 2,
    "V": 40,
    "T": 4,
    "P": 4,
    "M": 2,
}
OWN_LETTERS = {
    "scan": {"K": 4, "V": 4}, "paged_attention": {"Q": 5}, "linear": {"O": 4, "K": 32, "W": 32, "G": 2}
}  # fmt: skip
#: Operands beside those that are not optional, by operation; of a blend and a scan all are optional.
OTHERS = {
    "blend": ("host", "seed", "alpha"), "blend.confidence": ("host", "seed", "alpha", "logits"),
    "blend.soft_gate": ("host", "seed", "alpha", "host_weight"), "blend.margin": ("logits",),
    "norm": ("weight",), "mlp": ("up",), "mlp.plain": (), "routing.grad": ("v",), "routing.act": ("v",),
    "sampling": ("temperature", "top_k", "top_p", "min_p", "seeds"), "scan": ("decay", "left", "right", "erase", "query"),
    "linear": ("scale",), "scan.diagonal": ("decay", "drive", "query"), "paged_attention.ragged": ("query_starts",),
}  # fmt: skip


def operands(operation: str, *, wants: bool = False) -> dict[str, Any]:
    """Random ones by name, of the shapes that the op's table says."""
    op = operation.partition(".")[0]
    module = ops.module(op)
    others = OTHERS.get(operation, OTHERS.get(op, ()))
    names = [name for name in module.Operands.names if name in others or name not in module.Operands.optional]
    return {name: operand(op, name, wants=wants) for name in names}


def operand(op: str, name: str, *, wants: bool = False) -> torch.Tensor:
    module = ops.module(op)
    letters = [each.removesuffix("|1") for each in module.SHAPES[name].split()]
    shape = [int(each) if each.isdigit() else {**LETTERS, **OWN_LETTERS.get(op, {})}[each] for each in letters]
    kind = getattr(module, "KINDS", {}).get(name, "")
    if kind == "bytes":
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    if "int" in kind:
        return torch.ones(shape, dtype=getattr(torch, kind))
    is_share = name in ("decay", "temperature", "top_p", "min_p", "alpha", "host_weight")
    found = torch.rand(shape) * 0.5 + 0.2 if is_share else torch.randn(shape)
    return found.requires_grad_(wants and name in module.DIFFERENTIABLE)


# ---- which, explain --------------------------------------------------------------------------------------------------


@for_every_operation
def test_which_and_explain_answer_for_the_operation_that_is_named(operation):
    given = operands(operation)
    found = lz.which(operation, **given)
    assert found["operation"].startswith(operation)
    assert found["kernel_id"] in kernels(operation.partition(".")[0])
    report = lz.explain(operation, print_report=False, **given)
    assert report.summary() == found
    json.dumps(report.to_dict())


@for_every_op
def test_positional_operands_come_in_the_ops_order(op):
    names = ops.module(op).Operands.names
    required = [name for name in names if name in operands(op)]
    first = [name for name, other in zip(names, required, strict=False) if name == other]
    given = operands(op)
    rest = {name: each for name, each in given.items() if name not in first}
    assert lz.which(op, *(given[name] for name in first), **rest) == lz.which(op, **given)


@for_every_op
def test_asking_takes_fake_tensors(op):
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(each) for name, each in operands(op).items()}
    assert lz.which(op, **given) == lz.which(op, **operands(op))


@for_every_op
def test_gradients_are_features_where_an_operand_wants_one(op):
    given = operands(op)
    first = next(name for name, each in given.items() if each.is_floating_point())
    given[first].requires_grad_()
    assert "training" in read("which", op, (), given).context.features
    with torch.no_grad():
        assert "training" not in read("which", op, (), given).context.features


def test_attributes_are_given_by_name():
    given = operands("norm")
    assert "eps_floor" in read("which", "norm.rms", (), {**given, "eps_at": "floor", "eps": 1e-5}).context.features
    assert lz.which("norm", **given, centred=True)["operation"] == "norm.layer"
    half = {**operands("rope"), "cos": torch.randn(1, 1, 6, 4), "sin": torch.randn(1, 1, 6, 4)}
    assert {"half_tables", "interleaved"} <= set(
        read("which", "rope", (), {**half, "interleaved": True}).context.features
    )
    assert "partial" in read("which", "rope", (), {**half, "rotary_dim": 4}).context.features
    assert lz.which("attention", *torch.randn(3, 1, 2, 4, 8), causal=True)["operation"] == "attention.causal"


@for_every_op
def test_what_is_read_is_what_the_ops_own_sample_says(op):
    sizes = {**dict.fromkeys(contexts.dim_names(op), 8), "seq_len_k": 32}
    sample = ops.module(op).sample(sizes, torch.float32, torch.device("cpu"))
    seen: list[Any] = []

    def note(x: Any, attrs: Any) -> Any:
        seen.append(x)
        return ops.module(op).reference(x, attrs)

    sample.with_kernel(note)(*sample.inputs)
    variant = getattr(sample.attrs, "variant", "") if contexts.variants(op) else ""
    given = read("which", f"{op}.{variant}".rstrip("."), (), seen[0].given())
    expected = contexts.of_facts(op, sample.attrs, sample.facts, device="cpu")
    assert given.context.dims == expected.dims
    assert dataclasses.replace(given.context, is_last_dim_contiguous=True) == expected


# ---- refusals --------------------------------------------------------------------------------------------------------


@for_every_op
def test_a_wrong_operand_is_an_error_of_a_line_that_lists_what_the_op_takes_where_that_is_asked(op):
    given = operands(op)
    name = next(iter(given))
    misspelled = f"{name}s" if len(name) > 1 else "xx"
    for wrong, text in (
        ({**given, misspelled: given[name]}, f"received '{misspelled}'"),
        (
            {**given, name: given[name][None]},
            rf"expected {name} \[.*\], received \({', '.join(map(str, given[name][None].shape))}\)",
        ),
        ({**given, name: "a text"}, f"expected {name} as a tensor .*received str 'a text'"),
        ({**given, name: given[name].to(torch.complex64)}, f"expected {name} .*received torch.complex64"),
        ({**given, name: given[name].numpy()}, rf"received ndarray of shape .*\. Give torch\.as_tensor\({name}\)$"),
        ({}, "received None|received none"),
    ):
        with pytest.raises(ArgumentError, match=text) as failure:
            lz.which(op, **wrong)
        assert (taken(op) in str(failure.value)) is (not wrong)
        assert "\n" not in str(failure.value)
    for listed, shape in operand_shapes(op).items():
        assert f"{listed} {shape}" in taken(op)
    if len(name) > 1:
        with pytest.raises(ArgumentError, match=re.escape(f"(did you mean '{name}'?)")):
            lz.which(op, **{**given, misspelled: given[name]})


@for_every_op
def test_too_many_and_doubled_operands_are_refused(op):
    names = ops.module(op).Operands.names
    with pytest.raises(ArgumentError, match=f"{len(names)} at most, received {len(names) + 1} tensors"):
        lz.which(op, *[torch.ones(1)] * (len(names) + 1))
    with pytest.raises(ArgumentError, match=f"expected {names[0]} once"):
        lz.which(op, torch.ones(1), **{names[0]: torch.ones(1)})


@pytest.mark.parametrize(
    ("operation", "changes", "text"),
    [
        ("norm.rms", {"epsilon": 1e-5}, r"received 'epsilon' \(did you mean 'eps'\?\)"),
        ("norm.rms", {"eps": "small"}, "expected eps as a finite number, received str 'small'"),
        ("norm.rms", {"eps_at": "insid"}, r"expected eps_at as one of inside, outside, floor.*did you mean 'inside'"),
        ("norm.rms", {"is_centred": True}, "expected is_centred as False, which makes norm.rms, received True"),
        ("norm", {"out_dtype": "float32"}, "expected out_dtype as a dtype"),
        ("norm", {"has_weight": True}, "received 'has_weight'"),
        ("norm", {"layout": "BSHD"}, "expected layout as one of ND"),
        ("norm", {"weight": torch.ones(7)}, r"expected weight \[D\] of shape \(8,\), received \(7,\)"),
        ("mlp.plain", {"up": torch.ones(3, 8)}, "expected operands of mlp.plain, received those of mlp.gated"),
        ("mlp", {"activation": "swish"}, "expected activation as one of silu, gelu"),
        ("mlp", {"up_bias": torch.ones(8), "up": None}, "expected up_bias beside up only"),
        ("rope", {"rotary_dim": 6}, "expected cos of rotary_dim or half as many entries"),
        ("blend.soft_gate", {"host_weight": None}, "expected host_weight to be given in mode soft_gate"),
        ("blend", {"low": "none"}, "expected low as a finite number"),
        ("routing.grad", {"v": None}, "expected v to be given with the arm grad"),
        ("routing", {"rollout": torch.ones(6, dtype=torch.int64)}, "expected rollout and num_rollouts together"),
        ("routing", {"gate": torch.ones(2, 4)}, r"expected gate of shape \(3, 4\) or \(3, 6, 4\)"),
        ("sampling", {"bitmask": torch.ones(3, 3, dtype=torch.int32)}, "expected bitmask of 2 words"),
        ("sampling", {"top_k": torch.ones(3)}, r"expected top_k \[N\] of integers"),
        ("scan", {"right": None}, "expected left and right together"),
        ("scan.diagonal", {"left": torch.ones(2, 2, 4, 1, 8)}, "expected left"),
        ("attention", {"query": torch.ones(2, 3, 6, 8)}, "expected query heads in a multiple of the key heads, 2, received 3"),
        ("attention", {"causal": "yes"}, "expected is_causal as True or False"),
        ("attention.full", {"causal": True}, "expected is_causal as False, which makes attention.full"),
        ("attention", {"mask": torch.ones(2, 5) > 0}, r"expected mask \[B, Hq, Sq, Sk\] of shape \(2, 4, 6, 6\)"),
        ("attention", {"query_documents": torch.ones(2, 6).long()}, "expected query_documents and key_documents together"),
    ],
)  # fmt: skip
def test_what_an_operation_cannot_take_is_refused_by_its_name(operation, changes, text):
    with pytest.raises(ArgumentError, match=text):
        lz.which(operation, **{**operands(operation), **changes})


def test_an_unknown_operation_is_refused_everywhere():
    for call in (lz.which, lz.explain, lz.tune, lz.warmup):
        with pytest.raises(UnknownOperationError, match=r"no operation 'norm.rsm' \(did you mean 'norm.rms'"):
            call("norm.rsm")


# ---- validate --------------------------------------------------------------------------------------------------------


@for_every_op
@pytest.mark.parametrize("wants", [False, True])
def test_a_kernel_that_is_right_is_valid(op, wants):
    given = operands(op, wants=wants)
    assert lz.validate(OWN[op], **given) == (True, [])
    assert all(each.grad is None for each in given.values())


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Registers a kernel of an op that adds a number to what the definition gives."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))

    def register(op: str, summand: int = 1) -> str:
        def kernel(x: Any, attrs: Any) -> Any:
            found = ops.module(op).reference(x, attrs)
            return (found[0] + summand, found[1]) if isinstance(found, tuple) else found + summand

        supports = sorted({each for spec in kernels(op).values() for each in spec.supports} - {"*"})
        supports = [each for each in supports if "gradient" not in each and each != "training"]
        lz.register_kernel(
            operation=op, kernel_id="test.planted", platform="cpu", supported_dtypes=["float32"], supports=supports
        )(kernel)
        return "test.planted"

    yield register
    lz.unregister_kernel("test.planted")
    health.restore("test.planted")


@for_every_op
def test_a_kernel_that_is_wrong_is_told_with_figures(op, planted):
    ok, reasons = lz.validate(planted(op), **operands(op))
    assert not ok
    assert re.search(r"test.planted: output( 0)? is off by .* elements are wrong", reasons[0].message), reasons
    assert [reason.code for reason in lz.validate("test.planted", **operands(op), operation=op)[1]] == [
        "VALIDATION_FAILED"
    ]


def test_a_kernel_is_of_the_op_that_has_it():
    with pytest.raises(UnknownKernelError, match=r"no kernel 'torch.nrom' \(did you mean 'torch.norm'"):
        lz.validate("torch.nrom", **operands("norm"))
    with pytest.raises(UnknownKernelError, match=r"validating a kernel for rope: no kernel 'torch.norm'"):
        lz.validate("torch.norm", **operands("norm"), operation="rope")
    with pytest.raises(ArgumentError, match=r"lz.validate: expected input"):
        lz.validate("torch.norm")


#: Of every op that has one, a kernel for other devices.
ABSENT = {op: name for op in OPS for name, spec in kernels(op).items() if not {"cpu", "*"} & spec.platforms}


@pytest.mark.parametrize("op", ABSENT)
def test_what_speaks_against_a_kernel_is_said_before_it_runs(op):
    absent = ABSENT[op]
    ok, reasons = lz.validate(absent, **operands(kernels(op)[absent].operation))
    assert not ok
    assert "PLATFORM_MISMATCH" in {reason.code for reason in reasons}


def test_operands_that_the_definition_refuses_are_no_fault_of_a_kernel(monkeypatch):
    def broken(x: Any, attrs: Any) -> Any:
        raise RuntimeError("no such definition")

    monkeypatch.setattr(ops.module("norm"), "reference", broken)
    with pytest.raises(UndefinedError, match="no such definition"):
        lz.validate("torch.norm", **operands("norm"))


# ---- tune, warmup ----------------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """What would be measured; nothing is compiled or timed."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    found: list[tuple[Any, tuple[int, ...]]] = []

    def measure_forms(context, specs, form, inputs, sizes, **_named):
        with torch.no_grad():
            form(None)(*inputs)
        found.append((context, tuple(sizes.values())))
        return measuring.Measured(context, {"inductor": 1.0})

    monkeypatch.setattr("lz_compile.tools.tuning.measure_forms", measure_forms)
    return found


@for_every_op
def test_tune_goes_over_the_ops_own_sizes_by_name(op, timed):
    names = contexts.dim_names(op)
    sizes: dict[str, Any] = {**dict.fromkeys(names, 8), names[0]: (8, 16)}
    report = lz.tune(op, sizes=sizes, device="cpu", dtype=[torch.float32, torch.bfloat16])
    variants = contexts.variants(op) or ("",)
    assert len(report.measured) == 2 * 2 * len(variants)
    assert {context.operation for context, _ in timed} == {f"{op}.{each}".rstrip(".") for each in variants}
    assert {context.dims[names[0]] for context, _ in timed} == {8, 16}
    told: list[str] = []
    lz.tune(
        f"{op}.{variants[0]}".rstrip("."), sizes=sizes, device="cpu", on_progress=lambda *each: told.append(each[2])
    )
    assert f"{names[0]}=8" in told[0]
    assert len(told) == 2


@for_every_op
def test_sizes_that_there_are_not_are_refused(op):
    names = contexts.dim_names(op)
    for call in (lz.tune, lz.warmup):
        with pytest.raises(
            ArgumentError, match=rf"{', '.join(names)}, received '{names[0]}s' \(did you mean '{names[0]}'"
        ):
            call(op, sizes={f"{names[0]}s": 8})
        with pytest.raises(ArgumentError, match=f"expected {names[0]} as a whole number, 1 or more, received 0"):
            call(op, sizes={names[0]: 0})


def test_what_is_attentions_is_refused_for_others():
    with pytest.raises(ArgumentError, match=r"expected head_dim .* for attention only, received norm.rms"):
        lz.tune("norm.rms", head_dim=8)
    with pytest.raises(ArgumentError, match=r"expected mask .* for attention, received 'bool' for norm"):
        lz.tune("norm", mask="bool")
    with pytest.raises(ArgumentError, match="expected shapes and layout for attention only"):
        lz.warmup("norm", shapes=[(1, 2, 3, 4)])
    with pytest.raises(ArgumentError, match="expected head_dim once"):
        lz.tune("attention", head_dim=8, sizes={"head_dim": 8})


@pytest.mark.sampled
@for_every_op
@pytest.mark.parametrize("is_right", [True, False])
def test_warming_up_runs_the_kernel_that_is_chosen_if_it_is_right(op, is_right, planted, monkeypatch):
    kernel_id, called = planted(op, 0 if is_right else 1), []
    inner = kernels(op)[kernel_id].implementation
    noted = dataclasses.replace(
        kernels(op)[kernel_id], implementation=lambda x, attrs: called.append(x) or inner(x, attrs)
    )
    with lz.lock(op, kernel_id):
        monkeypatch.setitem(kernels(op), kernel_id, noted)
        monkeypatch.setattr("lz_compile.api.warming._kernel", lambda *_: noted)
        with events.collect() as happened:
            lz.warmup(op, sizes=dict.fromkeys(contexts.dim_names(op), 8), device="cpu")
    assert bool(called) is is_right
    assert ("VALIDATION_FAILED" in {event.code for event in happened}) is not is_right


@for_every_op
def test_warming_up_asks_the_policy(op, planted):
    kernel_id = planted(op, 0)
    sizes = dict.fromkeys(contexts.dim_names(op), 8)
    sample = ops.module(op).sample(sizes, torch.float32, torch.device("cpu"))
    with lz.lock(op, kernel_id):
        assert warming._kernel(op, sample, torch.device("cpu")).kernel_id == kernel_id


# ---- policy, registration --------------------------------------------------------------------------------------------


@for_every_op
def test_locks_and_preferences_hold_for_what_is_asked(op):
    given = operands(op)
    with lz.lock(op, OWN[op]):
        found = lz.which(op, **given)
    assert (found["kernel_id"], found["why"]) == (OWN[op], "locked by lz.lock()")
    with lz.prefer(OWN[op]):
        preferred = lz.explain(op, print_report=False, **given).to_dict()["policy"]
    assert [each["kernel"] for each in preferred["prefer"]] == [OWN[op]]
    with lz.avoid(OWN[op]):
        assert lz.which(op, **given)["kernel_id"] != OWN[op]


@for_every_op
def test_a_registered_kernel_is_a_candidate(op, planted):
    planted(op)
    candidates = lz.explain(op, print_report=False, **operands(op)).to_dict()["candidates"]
    (own,) = (each for each in candidates if each["kernel"] == "test.planted")
    assert own["against"] == []


# ---- command lines ---------------------------------------------------------------------------------------------------


def described(operation: str) -> list[str]:
    shapes = {name: ",".join(map(str, each.shape)) for name, each in operands(operation).items()}
    return [part for name, shape in shapes.items() for part in ("--shape", f"{name}={shape}")]


@for_every_op
def test_the_command_lines_take_every_operation(op, capsys, timed):
    assert main(["which", op, *described(op), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operation"].startswith(op)
    assert main(["explain", "--op", op, *described(op), "--device", "cpu"]) == 0
    assert op in capsys.readouterr().out
    assert main(["validate", OWN[op], *described(op), "--device", "cpu"]) == 0
    assert "valid" in capsys.readouterr().out
    sizes = [part for name in contexts.dim_names(op) for part in ("--sizes", f"{name}=8")]
    assert main(["tune", "--op", op, *sizes, "--device", "cpu"]) == 0
    assert "0 remain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("which norm --shape 3,8 --set eps=1e-5 --set wieght=3", "(did you mean 'weight'?)"),
        ("which norm --shape 3,8 --causal", "--causal is about attention, not norm"),
        ("which norm --shape inptu=3,8", "norm has no such operand. Operands of norm are input [N, D]"),
        ("which norm", "give --shape, by name as --shape input=64,128"),
        ("which norm --op rope --shape 3,8", "--op rope contradicts norm"),
        ("which norm --shape 3,8 --set eps", "expected a name and a value, as eps=1e-5"),
        ("which norm --shape 3,8 --set out_dtype=float31", "expected a dtype, as float32, received 'float31'"),
        ("tune norm.rms --sizes rows=8", "by the names that norm has, num_rows, hidden_size"),
        ("explain", "expected what to explain"),
    ],
)
def test_a_command_that_does_not_fit_the_operation_says_what_does(command, text, capsys):
    with pytest.raises(SystemExit) if "eps" in command.split()[-1:] else contextlib.nullcontext():
        assert (
            main(
                [*command.split(), *([] if command.startswith("tune") or command == "explain" else ["--device", "cpu"])]
            )
            == 2
        )
    assert text in capsys.readouterr().err


def test_attributes_are_set_on_the_command_line(capsys):
    command = "explain norm.rms --shape input=3,8 --set eps_at=floor --set eps=1e-5 --set out_dtype=float64 --device cpu --json"
    assert main(command.split()) == 0
    assert {"eps_floor", "wide_result"} <= set(json.loads(capsys.readouterr().out)["context"]["features"])


# ---- documentation ---------------------------------------------------------------------------------------------------


@for_every_op
def test_the_documentation_lists_the_operands_of_every_op(op):
    text = (Path(__file__).parents[1] / "docs/ops.md").read_text()
    listed = ", ".join(f"`{name}` {shape}" for name, shape in operand_shapes(op).items())
    assert f"| `{op}` | {listed} |" in text.replace("\\|", "|")
