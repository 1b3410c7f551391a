"""The registry: what descriptors may say, what a broken one does, and that every op and kernel is complete."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from lz_compile.errors import UnknownKernelError
from lz_compile.lowering import ops
from lz_compile.lowering.ops.attention import AttentionAttrs, AttentionFacts
from lz_compile.options import split
from lz_compile.passes.patterns import recognisers
from lz_compile.runtime import events, registry
from lz_compile.runtime.registry import KERNELS, SCHEMA_VERSION, KernelSpec, Prior, kernels
from lz_compile.runtime.select import select

DESCRIPTORS = sorted(KERNELS.glob("*.json"))
TESTS = Path(__file__).resolve().parent
DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"]
PLATFORMS = ["cpu", "cuda", "xpu", "mps", "rocm", "tpu"]


def _names(values: list[str]) -> dict[str, Any]:
    """A list of some of `values`, or `"*"` alone."""
    some = {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": 1}
    return {"anyOf": [some, {"const": ["*"]}]}


#: What a capabilities descriptor may hold. Anything else is a misspelling.
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["schema_version", "backend", "source", "ops"],
    "additionalProperties": False,
    "properties": {
        "schema_version": {"const": SCHEMA_VERSION},
        "backend": {"type": "string", "pattern": "^[a-z][a-z0-9_.]*$"},
        "source": {"type": "string", "minLength": 10},
        "ops": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"enum": ops.names()},
            "additionalProperties": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["kernel_id", "platforms", "dtypes", "supports", "prior"],
                    "additionalProperties": False,
                    "properties": {
                        "kernel_id": {"type": "string", "pattern": "^[a-z][a-z0-9_]*(\\.[a-z0-9_]+)*$"},
                        "platforms": _names(PLATFORMS),
                        "dtypes": _names(DTYPES),
                        "supports": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                        "prior_source": {"type": "string"},
                        "validation_arguments": {"type": "object"},
                        "prior": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["platform", "dtypes", "relative_latency"],
                                "additionalProperties": False,
                                "properties": {
                                    "platform": {"enum": ["*", *PLATFORMS]},
                                    "dtypes": _names(DTYPES),
                                    "min_query_len": {"type": "integer", "minimum": 0},
                                    "relative_latency": {"type": "number", "exclusiveMinimum": 0},
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def stem(path: Path) -> str:
    return path.stem


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """A registry of its own, with a copy of the descriptors that there are."""
    for path in DESCRIPTORS:
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(registry, "KERNELS", tmp_path)
    kernels.cache_clear()
    yield tmp_path
    kernels.cache_clear()


# ---- descriptors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DESCRIPTORS, ids=stem)
def test_a_descriptor_follows_the_schema(path):
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)


@pytest.mark.parametrize("path", DESCRIPTORS, ids=stem)
def test_a_descriptor_names_its_source_and_an_adapter_of_the_same_name(path):
    descriptor = json.loads(path.read_text())
    adapter = importlib.import_module(f"lz_compile.lowering.kernels.{path.stem}")
    assert descriptor["source"].strip()
    assert adapter.__doc__
    for op in descriptor["ops"]:
        call = getattr(adapter, op, None)
        assert (call is None) == (path.stem == "inductor"), f"{path.stem}.{op}"


def test_every_adapter_has_a_descriptor():
    modules = {path.stem for path in KERNELS.glob("*.py")} - {"__init__"}
    assert modules == {path.stem for path in DESCRIPTORS}


@pytest.mark.parametrize("path", DESCRIPTORS, ids=stem)
def test_a_source_that_is_a_path_exists(path):
    source = json.loads(path.read_text())["source"]
    if " " in source or not source.endswith(".py"):
        pytest.skip("the source is a library")
    assert (TESTS.parent / source).is_file()


def test_kernel_ids_are_unique():
    found = [
        (op, entry["kernel_id"])
        for path in DESCRIPTORS
        for op, entries in json.loads(path.read_text())["ops"].items()
        for entry in entries
    ]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("path", DESCRIPTORS, ids=stem)
def test_what_is_expected_of_a_kernel_is_said_only_of_what_it_runs(path):
    for entries in json.loads(path.read_text())["ops"].values():
        for entry in entries:
            for row in entry["prior"]:
                assert {row["platform"], "*"} & set(entry["platforms"])
                assert "*" in row["dtypes"] or set(row["dtypes"]) <= set(entry["dtypes"])


def test_inductor_comes_first_takes_everything_and_has_no_call():
    for op in ops.names():
        first = next(iter(kernels(op).values()))
        assert first == KernelSpec(
            "inductor", op, first.source, frozenset("*"), frozenset("*"), frozenset("*"), call=None, prior=()
        )


# ---- broken descriptors --------------------------------------------------------------------------------------------


def _entry(**changes: Any) -> str:
    kernel = {"kernel_id": "new.kernel", "platforms": ["cpu"], "dtypes": ["float32"], "supports": [], "prior": []}
    descriptor = {"schema_version": SCHEMA_VERSION, "backend": "new", "source": "a test of this file"}
    return json.dumps({**descriptor, "ops": {"attention": [kernel]}, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        (_entry(schema_version="9.0"), "expected schema_version 1.0, found 9.0"),
        (_entry(), "No module named 'lz_compile.lowering.kernels.broken'"),
        ("[]", "AttributeError"),
        ("\x00", "JSONDecodeError"),
    ],
    ids=["no_json", "version", "no_module", "list", "binary"],
)
def test_a_broken_descriptor_disables_itself_and_nothing_else(directory, text, message):
    (directory / "broken.json").write_text(text)
    with events.collect() as happened:
        found = kernels("attention")
    assert set(found) == {"inductor", "lz.blocked", "torch.sdpa"}
    assert [event.code for event in happened] == ["BACKEND_IMPORT_FAILED"]
    assert happened[0].message.startswith("kernel descriptor broken.json is disabled: ")
    assert message in happened[0].message


def test_a_descriptor_without_a_kernel_id_disables_itself(directory):
    (directory / "blocked.json").write_text(_entry(ops={"attention": [{"platforms": ["cpu"]}]}))
    with events.collect() as happened:
        assert set(kernels("attention")) == {"inductor", "torch.sdpa"}
    assert [event.message for event in happened] == [
        "kernel descriptor blocked.json is disabled: KeyError: 'kernel_id'"
    ]


def test_a_kernel_whose_import_fails_disables_itself(directory, monkeypatch):
    original = importlib.import_module

    def import_module(name: str) -> Any:
        if name.endswith("torch_sdpa"):
            raise OSError("libcuda.so.1: cannot open shared object file")
        return original(name)

    monkeypatch.setattr(registry.importlib, "import_module", import_module)
    with events.collect() as happened:
        assert set(kernels("attention")) == {"inductor", "lz.blocked"}
    assert "libcuda.so.1" in happened[0].message


def test_a_descriptor_without_the_op_adds_nothing_to_it(directory):
    (directory / "blocked.json").write_text(_entry(ops={"another_op": []}))
    assert set(kernels("attention")) == {"inductor", "torch.sdpa"}


def test_what_a_descriptor_does_not_list_is_not_supported(directory):
    (directory / "blocked.json").write_text(_entry(ops={"attention": [{"kernel_id": "bare"}]}))
    spec = kernels("attention")["bare"]
    assert (spec.platforms, spec.dtypes, spec.supports, spec.prior) == (frozenset(), frozenset(), frozenset(), ())
    decision = select(_match(), {"attention": "bare"})
    assert decision.kernel.kernel_id != "bare"
    codes = {c.kernel.kernel_id: [reason.code for reason in c.against] for c in decision.candidates}
    assert codes["bare"] == ["PLATFORM_MISMATCH", "DTYPE_UNSUPPORTED"]


# ---- selection -----------------------------------------------------------------------------------------------------


def _match(attrs: AttentionAttrs | None = None, **facts: Any) -> Any:
    from types import SimpleNamespace

    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "query_len": 64, "key_len": 64, "head_dim": 16, "value_dim": 16}
    described = AttentionFacts(**{**sizes, "dtype": torch.float32, "device": "cpu", **facts})
    return SimpleNamespace(op="attention", attributes=attrs or AttentionAttrs(), facts=described)


def test_candidates_come_from_the_best_to_the_worst_and_those_that_cannot_run_come_last():
    decision = select(_match(AttentionAttrs(softcap=30.0)), {})
    order = [(bool(c.against), c.relative_latency) for c in decision.candidates]
    assert order == sorted(order)
    assert decision.kernel is next(c.kernel for c in decision.candidates if not c.against)
    assert decision.why == f"expected at {decision.candidates[0].relative_latency:g} of Inductor's latency"
    last = decision.candidates[-1]
    assert [str(reason) for reason in last.against] == [
        "[SOFTCAP_UNSUPPORTED] torch.sdpa does not take scores capped at 30.0"
    ]


def test_of_several_expectations_the_one_for_the_longest_reached_length_holds(directory):
    rows = [
        Prior("cpu", frozenset(["float32"]), latency, length) for latency, length in ((0.9, 0), (0.2, 128), (1.7, 32))
    ]
    entry = {"kernel_id": "bare", "platforms": ["cpu"], "dtypes": ["float32"], "supports": []}
    prior = [
        {"platform": row.platform, "dtypes": ["float32"], "relative_latency": row.relative_latency, "min_query_len": row.min_query_len}
        for row in rows
    ]  # fmt: skip
    (directory / "blocked.json").write_text(_entry(ops={"attention": [{**entry, "prior": prior}]}))
    latencies = []
    for length in (1, 31, 32, 127, 128, 4096):
        found = {c.kernel.kernel_id: c.relative_latency for c in select(_match(query_len=length), {}).candidates}
        latencies.append(found["bare"])
    assert latencies == [0.9, 0.9, 1.7, 1.7, 0.2, 0.2]


def test_a_lock_takes_a_kernel_whatever_is_expected_of_it():
    for kernel in kernels("attention"):
        decision = select(_match(), {"attention": kernel})
        assert (decision.kernel.kernel_id, decision.why) == (kernel, "locked")


def test_a_lock_on_another_op_says_nothing():
    assert select(_match(), {"rms_norm": "nothing"}).why.startswith("expected at")


def test_a_lock_on_an_unknown_kernel_names_the_nearest():
    with pytest.raises(UnknownKernelError, match=r"no kernel 'lz\.blokced' \(did you mean 'lz\.blocked'\?\)"):
        split({"layerzero.lock": {"attention": "lz.blokced"}})


def test_a_decision_prints_as_json():
    for candidate in select(_match(AttentionAttrs(has_sinks=True)), {}).candidates:
        assert set(json.loads(json.dumps(candidate.to_dict()))) == {"kernel", "relative_latency", "against"}


# ---- completeness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.names())
def test_an_op_has_a_reference_features_attributes_and_facts(op):
    module = ops.module(op)
    assert module.__doc__
    assert module.reference.__doc__
    assert "attrs" in inspect.signature(module.reference).parameters
    assert list(inspect.signature(module.features).parameters) == ["attrs", "facts"]
    owned = [value for value in vars(module).values() if is_dataclass(value) and value.__module__ == module.__name__]
    (attrs,) = [kind for kind in owned if kind.__name__.endswith("Attrs")]
    (facts,) = [kind for kind in owned if kind.__name__.endswith("Facts")]
    assert attrs.__dataclass_params__.frozen
    assert facts.__dataclass_params__.frozen
    assert {"dtype", "device", "query_len"} <= {field.name for field in fields(facts)}  # what selection reads
    json.dumps(attrs().to_dict())


@pytest.mark.parametrize("op", ops.names())
def test_an_op_has_a_recogniser_a_kernel_and_a_test_file(op):
    assert op in recognisers()
    assert [spec for spec in kernels(op).values() if spec.call is not None]
    assert (TESTS / f"test_{op}.py").is_file()


@pytest.mark.parametrize("op", recognisers())
def test_a_recogniser_recognises_an_op_that_there_is(op):
    assert op in ops.names()


@pytest.mark.parametrize("op", ops.names())
def test_a_kernel_takes_the_operands_of_its_op_as_the_reference_does(op):
    given = inspect.signature(ops.module(op).reference).parameters
    for spec in kernels(op).values():
        if spec.call is None:
            continue
        taken = {
            name: parameter
            for name, parameter in inspect.signature(spec.call).parameters.items()
            if name not in spec.validation_arguments
        }
        assert {name: p.kind for name, p in taken.items()} == {name: given[name].kind for name in taken}
        needed = {"sinks": "sinks", "fill": "masked_row_fill", "mask": "bool_mask", "bias": "float_mask"}
        missing = {needed.get(name, name) for name in set(given) - set(taken)}
        assert not missing & spec.supports, (
            f"{spec.kernel_id} claims {missing & spec.supports} and takes no such operand"
        )


@pytest.mark.parametrize("path", DESCRIPTORS, ids=stem)
def test_a_kernel_is_named_in_a_test(path):
    texts = [file.read_text() for file in TESTS.glob("test_*.py")]
    for entries in json.loads(path.read_text())["ops"].values():
        for entry in entries:
            assert any(f'"{entry["kernel_id"]}"' in text for text in texts)
