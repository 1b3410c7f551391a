"""Descriptors: every shipped one is valid, the published schema is theirs, and what is wrong is refused by its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from lz_compile.errors import CapabilitiesError
from lz_compile.ground.hardware import GENERATIONS, INSTRUCTION_SETS
from lz_compile.lowering import ops
from lz_compile.runtime.kernels import capabilities, registry
from lz_compile.runtime.kernels.capabilities import SCHEMA, SCHEMA_VERSION, digest, parse, read, schema
from lz_compile.runtime.kernels.convention import FEATURES

DESCRIPTORS = registry.descriptors()
TESTS = Path(__file__).resolve().parent
every_descriptor = pytest.mark.parametrize("path", DESCRIPTORS, ids=lambda path: path.stem)


PRIOR = {"platform": "cuda", "dtypes": ["*"], "relative_latency": 0.5}


def kernel(**changes: Any) -> dict[str, Any]:
    """A kernel with nothing but what it must say."""
    least = {"kernel_id": "new.kernel", "platforms": ["cuda"], "dtypes": ["float32"], "requires_layouts": ["BHSD"]}
    return {**least, **changes}


def descriptor(*kernels: dict[str, Any], **changes: Any) -> bytes:
    ops = {"attention": list(kernels) or [kernel()]}
    head = {"schema_version": SCHEMA_VERSION, "backend": "new", "source": "a test of this file", "ops": ops}
    return json.dumps({**head, **changes}).encode()


# ---- shipped ---------------------------------------------------------------------------------------------------------


@every_descriptor
def test_a_shipped_descriptor_is_valid(path):
    found = read(path)
    assert list(found.kernels())
    jsonschema.Draft202012Validator(schema()).validate(json.loads(path.read_bytes()))


@every_descriptor
def test_a_shipped_descriptor_claims_only_features_and_generations_that_there_are(path):
    for operation, each in read(path).kernels():
        if operation.startswith("attention"):
            assert each.supports <= {*FEATURES, "*"}
        assert each.supported_generations <= {name for _, name, _ in GENERATIONS}


@every_descriptor
def test_a_shipped_descriptor_accepts_versions_in_the_form_of_pep_440(path):
    found = read(path)
    assert found.backend_version is None or SpecifierSet(found.backend_version)


def test_a_source_that_is_a_path_exists():
    sources = [source for source in (read(path).source for path in DESCRIPTORS) if source.endswith(".py")]
    assert sources
    assert all((TESTS.parent / source).is_file() for source in sources)


@every_descriptor
def test_what_is_expected_of_a_kernel_is_said_only_of_what_it_runs(path):
    for _, each in read(path).kernels():
        for row in each.prior:
            assert row.platform == "*" or {row.platform, "*"} & each.platforms
            assert "*" in row.dtypes or row.dtypes <= each.dtypes


def test_kernel_ids_are_unique_over_all_descriptors():
    found = [(name.partition(".")[0], each.kernel_id) for path in DESCRIPTORS for name, each in read(path).kernels()]
    assert len(found) == len(set(found))


# ---- the published schema --------------------------------------------------------------------------------------------


def test_the_published_schema_is_that_of_the_code():
    text = "renew it: python -c 'from lz_compile.runtime.kernels.capabilities import write_schema; write_schema()'"
    assert json.loads(SCHEMA.read_bytes()) == schema(), text


def test_the_published_schema_is_a_schema_and_closed():
    published = json.loads(SCHEMA.read_bytes())
    jsonschema.Draft202012Validator.check_schema(published)
    for name in ("Descriptor", "Kernel", "Prior", "Grid"):
        assert published["$defs"][name]["additionalProperties"] is False


def test_names_in_the_schema_are_those_that_torch_and_the_hardware_map_have():
    for name in capabilities.Dtype.__args__:
        assert name == "*" or isinstance(getattr(torch, name), torch.dtype)
    field = schema()["$defs"]["Kernel"]["properties"]["instruction_set"]
    assert {name for each in field["anyOf"] for name in each.get("enum", [])} == set(INSTRUCTION_SETS)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "Input data was truncated"),
        (b"\x00", "invalid character"),
        (b"[]", "Expected `object`, got `array`"),
        (b"\xff\xfe", "invalid"),
        (descriptor(schema_version="9.0"), "expected schema_version 1.0, received 9.0"),
        (descriptor(schema_version=1.0), "expected schema_version 1.0, received 1.0"),
        (b"{}", "expected schema_version 1.0, received None"),
        (descriptor(licence="free"), "unknown field `licence`"),
        (descriptor(kernel(supports_gqa=True)), "unknown field `supports_gqa`"),
        (
            descriptor(kernel(transform_cost_hint=0)),
            "Leave it out: what another layout costs is part of what is measured",
        ),
        (descriptor(kernel(produces_layout="BSHD")), "Leave it out: an adapter gives its result in the op's layout"),
        (descriptor(kernel(kernel_id="new.kernel\n")), "regex"),
        (descriptor(kernel(kernel_id="k" * 5000)), "length <= 100"),
        (descriptor(kernel(supports=["gqa\n"])), "regex"),
        (descriptor(kernel(requires_layouts=["BHSD\n"])), "regex"),
        (b'{"schema_version": "1.0", "ops": ' + b"[" * 100_000, "recursion"),
        (descriptor(backend="new_backend\n"), "regex"),
        (descriptor(backend="New Backend"), "regex"),
        (descriptor(source="short"), "length >= 10"),
        (descriptor(ops={}), "length >= 1"),
        (descriptor(ops={"attention": []}), "length >= 1"),
        (descriptor(ops={"atention": [kernel()]}), r"no operation 'atention' \(did you mean 'attention'\?\)"),
        (descriptor(ops={"attention.casual": [kernel()]}), r"\(did you mean 'attention.causal'\?\)"),
        (descriptor(backend_version=">=2"), "backend_version needs the package"),
        (descriptor(kernel(kernel_id="No Id")), "regex"),
        (descriptor(kernel(dtypes=["float61"])), "Invalid enum value 'float61'"),
        (descriptor(kernel(dtypes=[])), "length >= 1"),
        (descriptor(kernel(platforms=["tpu"])), "Invalid enum value 'tpu'"),
        (
            descriptor(kernel(requires_layouts=["SBHD"])),
            r"no layout 'SBHD' \(did you mean 'BSHD'\?\); valid are BHSD, BSHD, NHD",
        ),
        (descriptor(kernel(dtypes=["*", "float32"])), r"new.kernel: '\*' in dtypes stands for everything"),
        (descriptor(kernel(supports=["*", "gqa"])), r"'\*' in supports stands for everything"),
        (descriptor(kernel(priority=101)), "<= 100"),
        (descriptor(kernel(max_head_dim=0)), ">= 1"),
        (descriptor(kernel(max_head_dim=256.5)), "Expected `int"),
        (descriptor(kernel(min_head_dim=64, max_head_dim=32)), "min_head_dim 64 is above max_head_dim 32"),
        (descriptor(kernel(min_sm=90, max_sm=80)), "min_sm 90 is above max_sm 80"),
        (descriptor(kernel(platforms=["cpu"], min_sm=80)), "min_sm needs the platform cuda or rocm"),
        (descriptor(kernel(platforms=["cpu"], grid={"x": "1"})), "grid needs the platform cuda or rocm"),
        (descriptor(kernel(requires_isa=["amx"])), "requires_isa needs the platform cpu"),
        (descriptor(kernel(workspace="batchsize * 4")), r"no size 'batchsize' \(did you mean 'batch_size'\?\)"),
        (descriptor(kernel(workspace="batch_size / 4")), "is none of: integer, name"),
        (descriptor(kernel(grid={"x": "num_heads", "y": "seq"})), "no size 'seq'"),
        (descriptor(kernel(grid={"y": "num_heads"})), "missing required field `x`"),
        (descriptor(kernel(prior=[PRIOR | {"relative_latency": 0}])), "> 0.0"),
        (
            descriptor(kernel(prior=[PRIOR | {"limits": {"seq_len": [1, 2]}}])),
            r"no size 'seq_len' \(did you mean 'seq_len",
        ),
        (descriptor(kernel(prior=[PRIOR | {"limits": {"seq_len_q": [1]}}])), "Expected `array` of length 2"),
        (descriptor(kernel(), kernel()), "kernel_id 'new.kernel' stands twice for attention"),
        (
            descriptor(ops={"attention": [kernel()], "attention.causal": [kernel()]}),
            "kernel_id 'new.kernel' stands twice for attention",
        ),
    ],
)
def test_a_wrong_descriptor_is_refused_with_what_is_wrong(text, message):
    with pytest.raises(CapabilitiesError, match=message) as failure:
        parse(text, "wrong.json")
    assert str(failure.value).startswith("reading capabilities wrong.json: ")
    assert str(failure.value).endswith("its kernels are disabled until then")


@pytest.mark.parametrize("field", ["kernel_id", "platforms", "dtypes", "requires_layouts"])
def test_what_a_kernel_must_say_has_no_default(field):
    each = kernel()
    del each[field]
    with pytest.raises(CapabilitiesError, match=f"missing required field `{field}`"):
        parse(descriptor(each), "wrong.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CapabilitiesError, match=r"reading capabilities none.json: FileNotFoundError"):
        read(tmp_path / "none.json")


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_refusal(data):
    with pytest.raises(CapabilitiesError):
        parse(data, "wrong.json")


def test_what_is_not_said_is_not_supported():
    ((operation, each),) = parse(descriptor(), "new.json").kernels()
    assert operation == "attention"
    assert (each.supports, each.prior, each.fuses_ops) == (frozenset(), (), ())
    assert not each.is_cuda_graph_safe
    assert not each.deterministic
    assert each.is_opaque


def test_a_star_stands_for_every_op():
    found = parse(descriptor(ops={"*": [kernel()]}), "new.json")
    assert [operation for operation, _ in found.kernels()] == list(ops.names())


# ---- hashes ----------------------------------------------------------------------------------------------------------


def test_a_hash_is_of_what_is_said_and_not_of_how():
    turned = kernel(dtypes=["float16", "float32"], supports=["gqa", "causal"])
    same = {name: turned[name] for name in reversed(turned)}
    same |= {"dtypes": ["float32", "float16"], "supports": ["causal", "gqa"], "priority": 50}
    text = json.dumps(json.loads(descriptor(same)), indent=3).encode()
    assert digest(parse(descriptor(turned), "a")) == digest(parse(text, "b"))


@pytest.mark.parametrize(
    "changes",
    [{"max_head_dim": 128}, {"supports": ["gqa"]}, {"deterministic": True}, {"workspace": "1"}, {"min_sm": 80}],
    ids=str,
)
def test_a_hash_changes_with_every_limit(changes):
    assert digest(parse(descriptor(kernel(**changes)), "a")) != digest(parse(descriptor(), "a"))
