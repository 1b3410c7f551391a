"""The registry: what kernels there are, what a broken one does, what speaks against one, and that all are complete."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import textwrap
import threading
import types
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lz_compile as lz
from lz_compile.errors import FormulaError, KernelUnavailableError, UnknownOperationError
from lz_compile.ground import events
from lz_compile.ground.hardware import Hardware, generation_of
from lz_compile.ground.records import Reason
from lz_compile.lowering import ops
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.passes.recognisers import recognisers
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.capabilities import Grid, Prior
from lz_compile.runtime.kernels.libraries import LazyFunction
from lz_compile.runtime.kernels.registry import KERNELS, KernelSpec, kernels
from lz_compile.runtime.problem.context import SelectionContext, SymbolicDim

DESCRIPTORS = registry.descriptors()
TESTS = Path(__file__).resolve().parent
OURS = ["inductor", "blocked", "torch_sdpa"]


def stem(path: Path) -> str:
    return path.stem


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """A registry of its own, with a copy of those descriptors that need nothing but torch."""
    for path in DESCRIPTORS:
        if path.stem in OURS:
            (tmp_path / path.relative_to(KERNELS)).parent.mkdir(exist_ok=True)
            (tmp_path / path.relative_to(KERNELS)).write_text(path.read_text())
    monkeypatch.setattr(registry, "KERNELS", tmp_path)
    registry.reload()
    yield tmp_path
    monkeypatch.undo()
    registry.reload()


def _entry(**changes: Any) -> dict[str, Any]:
    least = {"kernel_id": "new.kernel", "platforms": ["cpu"], "dtypes": ["float32"], "requires_layouts": ["BHSD"]}
    return {**least, **changes}


def _descriptor(*entries: dict[str, Any], **changes: Any) -> str:
    head = {"schema_version": "1.0", "backend": "new", "source": "a test of this file"}
    return json.dumps({**head, "ops": {"attention": list(entries) or [_entry()]}, **changes})


# ---- descriptors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DESCRIPTORS, ids=stem)
def test_a_descriptor_has_an_adapter_of_the_same_name(path):
    adapter = importlib.import_module(registry.adapter(path))
    assert adapter.__doc__
    for spec in kernels("attention").values():
        if spec.implementation is not None and spec.implementation.module == adapter.__name__:
            assert callable(_adapter(spec))


def test_every_adapter_has_a_descriptor():
    adapters = {path for path in KERNELS.glob("*/*.py") if f"\ndef {path.parent.name}(" in path.read_text()}
    assert adapters <= {path.with_suffix(".py") for path in DESCRIPTORS}


def test_inductor_comes_first_takes_everything_and_has_no_call():
    for op in ops.names():
        first = next(iter(kernels(op).values()))
        assert (first.kernel_id, first.operation, first.source) == ("inductor", op, "inductor")
        assert (first.platforms, first.dtypes, first.supports) == (frozenset("*"),) * 3
        assert first.call is None
        assert first.load() is None
        sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query_len": 6, "key_len": 4, "head_dim": 16, "value_dim": 8}
        facts = AttentionFacts(**sizes, dtype=torch.int8, device="cpu")
        everything = AttentionAttrs(is_causal=True, softcap=1.0, has_sinks=True, has_mask=True, dropout_p=0.5)
        problem = context(features=ops.module("attention").features(everything, facts), layout="NHD")
        problem = replace(problem, operation=op)
        odd = replace(problem, requires_deterministic=True, is_cuda_graph_capturing=True, memory_headroom_bytes=0)
        assert first.check(odd) == []


def test_a_kernel_has_the_fields_of_its_descriptor(directory):
    entry = _entry(
        platforms=["cuda"], min_sm=80, max_sm=100, supported_generations=["ampere"], max_head_dim=128, priority=90,
        supports=["gqa"], grid={"x": "num_heads"}, workspace="batch_size * 8", deterministic=True,
        prior=[{"platform": "cuda", "dtypes": ["float32"], "relative_latency": 0.5}],
    )  # fmt: skip
    (directory / "attention" / "blocked.json").write_text(_descriptor(entry, package="torch", backend_version=">=2"))
    spec = kernels("attention")["new.kernel"]
    assert (spec.operation, spec.source, spec.provenance) == ("attention", "new", "a test of this file")
    assert (spec.min_sm, spec.max_sm, spec.max_head_dim, spec.priority) == (80, 100, 128, 90)
    assert spec.grid == Grid("num_heads")
    assert spec.prior == (Prior("cuda", frozenset(["float32"]), 0.5),)
    assert spec.implementation == LazyFunction("lz_compile.lowering.kernels.attention.blocked", "attention")
    assert spec.version == torch.__version__
    assert len(spec.capabilities_hash) == 64


def test_a_function_of_another_name_may_be_named(directory):
    (directory / "attention" / "blocked.json").write_text(_descriptor(_entry(function="bounds")))
    assert kernels("attention")["new.kernel"].call(10, 20) == [(0, 10)]


# ---- broken descriptors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        (_descriptor(schema_version="9.0"), "expected schema_version 1.0, received 9.0"),
        ("[]", "Expected `object`, got `array`"),
        ("\x00", "invalid character"),
        (_descriptor({"platforms": ["cpu"]}), "missing required field `kernel_id`"),
        (_descriptor(_entry(), _entry(kernel_id="torch.sdpa")), "torch.sdpa has a kernel of that name for attention"),
        (_descriptor(_entry(), _entry()), "kernel_id 'new.kernel' stands twice"),
        (_descriptor(_entry(), _entry(kernel_id="inductor")), "inductor has a kernel of that name"),
    ],
    ids=["no_json", "version", "list", "binary", "no_id", "taken", "twice", "inductor"],
)
def test_a_broken_descriptor_disables_all_of_itself_and_nothing_else(directory, text, message):
    (directory / "zzz_broken.json").write_text(text)
    with events.collect() as happened:
        found = kernels("attention")
        assert set(kernels("attention.causal")) == set(found)
    assert list(found) == ["inductor", "lz.blocked", "torch.sdpa"]
    assert [event.code for event in happened] == ["CAPABILITIES_SCHEMA_MISMATCH"]
    assert happened[0].message.startswith("kernel descriptor zzz_broken.json is disabled: ")
    assert message in happened[0].message


def test_a_descriptor_without_the_op_adds_nothing_to_it(directory, monkeypatch):
    monkeypatch.setattr(registry, "operations", lambda: ("attention", "no_such_op"))
    (directory / "attention" / "blocked.json").unlink()
    assert set(kernels("attention")) == {"inductor", "torch.sdpa"}
    assert kernels("no_such_op") == {}


# ---- libraries -----------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Installs a distribution with a module of that name."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(name: str, version: str, code: str, entry_points: str = "") -> Path:
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        (site / f"{name}.py").write_text(textwrap.dedent(code))
        importlib.invalidate_caches()
        registry.reload()
        return site

    yield install
    for name in [name for name, module in sys.modules.items() if str(site) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
    monkeypatch.undo()
    registry.reload()


def _needing(**changes: Any) -> KernelSpec:
    function = LazyFunction("lz_compile.lowering.kernels.attention.torch_sdpa", "attention", "fastlib")
    return kernel(implementation=function, package="fastlib", **changes)


def test_a_library_that_is_absent_is_a_reason_and_raises_only_where_it_is_called():
    spec = _needing()
    reason = Reason("NOT_INSTALLED", "fastlib is not installed")
    assert (spec.availability(), spec.load(), spec.check(context()), spec.version) == (reason, reason, [reason], None)
    with pytest.raises(KernelUnavailableError, match=r"calling new.kernel: .* \[NOT_INSTALLED\] fastlib") as failure:
        _ = spec.call
    assert failure.value.reason == reason


@pytest.mark.parametrize(
    ("versions", "fits"),
    [
        (None, True),
        (">=2.0", True),
        (">=2.0,<3", True),
        ("~=2.1", True),
        ("==2.1.*", True),
        (">=3", False),
        ("<2.1", False),
    ],
)
def test_a_version_is_checked_without_importing(library, versions, fits):
    library("fastlib", "2.1.3+cu128", "raise SystemExit('imported')")
    spec = _needing(backend_version=versions)
    text = f"requires fastlib {versions}, 2.1.3+cu128 is installed"
    assert spec.check(context()) == ([] if fits else [Reason("BACKEND_VERSION_UNSUPPORTED", text)])
    assert spec.version == "2.1.3+cu128"
    assert "fastlib" not in sys.modules


def test_a_prerelease_fits_its_range(library):
    library("fastlib", "3.0.0b1", "")
    assert _needing(backend_version=">=3.0.0b1,<4").availability() is None


@pytest.mark.parametrize("versions", ["newest", ">>2"])
def test_versions_that_cannot_be_read_are_a_reason(library, versions):
    library("fastlib", "2.0", "")
    assert _needing(backend_version=versions).availability().code == "BACKEND_VERSION_UNSUPPORTED"


def test_a_library_is_imported_when_its_kernel_is_used_and_not_before(library):
    library("fastlib", "2.0", "loaded = True")
    spec = _needing()
    assert spec.check(context()) == []
    assert "fastlib" not in sys.modules
    assert spec.load() is None
    assert "fastlib" in sys.modules
    assert spec.call is torch_sdpa.attention


@pytest.mark.parametrize(
    "code", ["raise OSError('libcuda.so.1: cannot open')", "import no_such_module", "raise RuntimeError('no driver')"]
)
def test_a_library_whose_import_fails_disables_its_kernel_once_and_for_all(library, code):
    library("fastlib", "2.0", code)
    spec = _needing()
    with events.collect() as happened:
        reasons = [spec.load(), spec.load(), spec.availability(), *spec.check(context())]
    assert [event.code for event in happened] == ["BACKEND_IMPORT_FAILED"]
    assert len(reasons) == 4
    assert len(set(reasons)) == 1
    assert reasons[0].code == "BACKEND_IMPORT_FAILED"
    with pytest.raises(KernelUnavailableError):
        _ = spec.call


def test_an_adapter_without_the_function_is_a_reason():
    spec = kernel(implementation=LazyFunction("lz_compile.lowering.kernels.attention.torch_sdpa", "atention"))
    assert spec.load().code == "BACKEND_IMPORT_FAILED"
    assert "atention" in spec.load().message


def test_a_kernel_that_cannot_be_imported_leaves_the_match_to_the_next_one(directory, monkeypatch):
    from backends import Rewriting

    cheap = [{"platform": "*", "dtypes": ["*"], "relative_latency": 0.1}]
    (directory / "absent.json").write_text(_descriptor(_entry(prior=cheap), module="no_such_library"))
    registry.reload()
    backend = Rewriting()
    query = torch.randn(2, 3, 20, 16)
    expected = (query @ query.mT).softmax(-1) @ query
    compiled = torch.compile(lambda x: (x @ x.mT).softmax(-1) @ x, backend=backend)
    torch.testing.assert_close(compiled(query), expected)
    (match,) = backend.report.matches
    assert match.kernel != "new.kernel"
    assert "BACKEND_IMPORT_FAILED" in [event.code for event in backend.report.events]
    assert "BACKEND_IMPORT_FAILED" in [reason.code for reason in match.reasons]


def test_looking_at_kernels_imports_no_adapter_and_importing_an_adapter_no_library():
    files = (TESTS.parent / "lz_compile/lowering/kernels").glob("*/*.json")
    described = {each: json.loads(each.read_text()).get("module") for each in files}
    modules = [
        f"lz_compile.lowering.kernels.{each.parent.name}.{each.stem}" for each, name in described.items() if name
    ]
    libraries = {name.partition(".")[0] for name in described.values() if name} | {"apex"}
    code = f"""
        import importlib, sys
        from lz_compile.runtime.kernels import registry
        specs = registry.kernels("attention")
        assert len(specs) >= 3
        for info in registry.list_kernels():
            info.to_dict()
        loaded = [name for name in sys.modules if name.startswith("lz_compile.lowering.kernels.")]
        assert loaded == [], loaded
        for module in {modules}:
            importlib.import_module(module)
            found = {libraries} & sys.modules.keys()
            assert not found, (module, found)
        assert "lz_compile.lowering.kernels.attention.torch_sdpa" not in sys.modules
        specs["torch.sdpa"].call
        assert "lz_compile.lowering.kernels.attention.torch_sdpa" in sys.modules
    """
    assert libraries >= {"flash_attn", "flash_attn_interface", "flashinfer", "triton", "xformers"}
    assert len(modules) > 12
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=TESTS.parent)


# ---- what speaks against a kernel ------------------------------------------------------------------------------------


def gpu(sm_version: int) -> Hardware:
    return Hardware("cuda", "a GPU", sm_version, *generation_of(sm_version))


CPU = Hardware("cpu", "a CPU", isa=frozenset({"avx2", "avx512"}), threads=2)


def context(**changes: Any) -> SelectionContext:
    dims = {"batch_size": 2, "num_heads": 8, "num_kv_heads": 8, "seq_len_q": 512, "seq_len_k": 512}
    sizes = {**dims, "head_dim": 64, "value_dim": 64, **changes.pop("dims", {})}
    given = {"operation": "attention.full", "hardware": CPU, "dtype": torch.float32, "features": {}, **changes}
    return SelectionContext(dims=sizes, **given)


def kernel(**changes: Any) -> KernelSpec:
    sets = {"platforms": {"*"}, "dtypes": {"*"}, "requires_layouts": {"BHSD"}, "supports": {"*"}}
    given = {**sets, **changes}
    names = {name: frozenset(value) if isinstance(value, (set, list)) else value for name, value in given.items()}
    return KernelSpec(kernel_id="new.kernel", source="new", **{"operation": "attention", **names})


LONG = SymbolicDim(512, 2, None, "s77")

#: Limits, a problem within them, one without, and the reason.
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "platform": (
        {"platforms": {"cuda"}}, {"hardware": gpu(80)}, {},
        "[PLATFORM_MISMATCH] new.kernel runs on cuda, not cpu",
    ),
    "min_sm": (
        {"min_sm": 90}, {"hardware": gpu(90)}, {"hardware": gpu(89)},
        "[SM_TOO_OLD] new.kernel requires SM90+, this is SM89",
    ),
    "min_sm_unknown": (
        {"min_sm": 80}, {"hardware": gpu(80)}, {"hardware": Hardware("cuda", "unknown")},
        "[SM_TOO_OLD] new.kernel requires SM80+, this is a device that reports none",
    ),
    "max_sm": (
        {"max_sm": 100}, {"hardware": gpu(90)}, {"hardware": gpu(100)},
        "[SM_TOO_NEW] new.kernel requires SM<100, this is SM100",
    ),
    "generation": (
        {"supported_generations": {"hopper", "ada"}}, {"hardware": gpu(90)}, {"hardware": gpu(120)},
        "[GPU_GENERATION_UNSUPPORTED] new.kernel supports ada, hopper, not blackwell",
    ),
    "generation_of_rocm": (
        {"supported_generations": {"gfx942"}}, {"hardware": Hardware("rocm", "a GPU", generation="gfx942")},
        {"hardware": Hardware("rocm", "a GPU", generation="gfx90a")},
        "[GPU_GENERATION_UNSUPPORTED] new.kernel supports gfx942, not gfx90a",
    ),
    "tensor_cores": (
        {"min_tensor_core_generation": 4}, {"hardware": gpu(90)}, {"hardware": gpu(80)},
        "[TENSOR_CORE_GEN_UNSUPPORTED] new.kernel requires tensor cores of generation 4+, this has 3",
    ),
    "instruction_set": (
        {"instruction_set": "wgmma"}, {"hardware": gpu(90)}, {"hardware": gpu(120)},
        "[INSTRUCTION_SET_MISMATCH] new.kernel uses wgmma, SM120 has mma.sync",
    ),
    "isa": (
        {"requires_isa": {"avx512", "amx"}}, {"hardware": replace(CPU, isa=frozenset({"avx2", "avx512", "amx"}))}, {},
        "[ISA_UNSUPPORTED] new.kernel needs amx, this CPU has avx2, avx512",
    ),
    "dtype": (
        {"dtypes": {"float16", "bfloat16"}}, {"dtype": torch.float16}, {"dtype": torch.float64},
        "[DTYPE_UNSUPPORTED] new.kernel takes bfloat16, float16, not float64",
    ),
    "head_dim": (
        {"min_head_dim": 32, "max_head_dim": 128}, {}, {"dims": {"head_dim": 256, "value_dim": 256}},
        "[HEAD_DIM_INVALID] head_dim 256, new.kernel takes 32..128",
    ),
    "value_dim": (
        {"max_head_dim": 128}, {}, {"dims": {"value_dim": 192}},
        "[HEAD_DIM_INVALID] value_dim 192, new.kernel takes 0..128",
    ),
    "head_dim_multiple": (
        {"head_dim_multiple": 8}, {}, {"dims": {"head_dim": 60, "value_dim": 60}},
        "[HEAD_DIM_ALIGNMENT] head_dim 60, new.kernel takes multiples of 8",
    ),
    "head_dim_symbolic": (
        {"head_dim_multiple": 8}, {"dims": {"head_dim": SymbolicDim(64, 16, 256, "8*s0", divisor=8)}},
        {"dims": {"head_dim": SymbolicDim(64, 16, 256, "s0"), "value_dim": SymbolicDim(64, 16, 256, "s0")}},
        "[HEAD_DIM_ALIGNMENT] head_dim s0 (16 to 256), new.kernel takes multiples of 8",
    ),
    "limits": (
        {"limits": {"seq_len_q": (1, 16)}}, {"dims": {"seq_len_q": 16}}, {"dims": {"seq_len_q": LONG}},
        "[SIZE_INVALID] seq_len_q s77 (2 to any), new.kernel takes 1..16",
    ),
    "seq_len": (
        {"max_seq_len": 4096}, {"dims": {"seq_len_q": SymbolicDim(512, 2, 4096, "s77")}}, {"dims": {"seq_len_k": 5000}},
        "[SEQ_TOO_LONG] seq_len_k 5000, new.kernel takes up to 4096",
    ),
    "seq_len_symbolic": (
        {"max_seq_len": 4096}, {}, {"dims": {"seq_len_q": LONG}},
        "[SEQ_TOO_LONG] seq_len_q s77 (2 to any), new.kernel takes up to 4096",
    ),
    "feature": (
        {"supports": {"gqa"}}, {"features": {"gqa": "fewer key heads"}}, {"features": {"softcap": "scores capped at 30"}},
        "[SOFTCAP_UNSUPPORTED] new.kernel does not take scores capped at 30",
    ),
    "scale": (
        {"supports_scale": False}, {}, {"has_custom_scale": True},
        "[SCALE_UNSUPPORTED] new.kernel does not take a scale other than head_dim ** -0.5",
    ),
    "layout": (
        {"requires_layouts": {"BSHD"}}, {"layout": "BHSD"}, {"layout": "NHD"},
        "[LAYOUT_UNSUPPORTED] new.kernel takes BSHD, not NHD",
    ),
    "stride": (
        {"requires_last_dim_stride1": True}, {}, {"is_last_dim_contiguous": False},
        "[STRIDE_LAST_DIM] new.kernel needs stride 1 in the last dimension of query, key and value",
    ),
    "graph": (
        {}, {}, {"is_cuda_graph_capturing": True},
        "[CUDA_GRAPH_UNSAFE] new.kernel is not safe to capture in a CUDA graph",
    ),
    "deterministic": (
        {}, {}, {"requires_deterministic": True},
        "[NON_DETERMINISTIC] new.kernel does not give the same bits for the same inputs",
    ),
    "memory": (
        {"workspace": "batch_size * 1024"}, {"memory_headroom_bytes": 2048}, {"memory_headroom_bytes": 2047},
        "[MEMORY_HEADROOM_EXCEEDED] new.kernel needs 2048 bytes of workspace, the headroom is 2047",
    ),
    "variant": (
        {"operation": "attention.causal"}, {"operation": "attention.causal"}, {},
        "[VARIANT_UNSUPPORTED] new.kernel computes attention.causal, not attention.full",
    ),
    "grid": (
        {"grid": Grid("seq_len_q", "batch_size * num_heads")}, {"hardware": gpu(90)},
        {"hardware": gpu(90), "dims": {"batch_size": 8192}},
        "[CUDA_GRID_DIM_EXCEEDED] new.kernel needs 65536 blocks in grid dimension y, the limit is 65535",
    ),
    "threads": (
        {"grid": Grid("1", threads="head_dim * 8")}, {"hardware": gpu(90)},
        {"hardware": gpu(90), "dims": {"head_dim": 256, "value_dim": 256}},
        "[CUDA_BLOCK_LIMIT_EXCEEDED] new.kernel needs 2048 threads in a block, the limit is 1024",
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_lets_pass_what_is_within_and_refuses_the_rest_with_a_reason(limit):
    limits, within, without, reason = LIMITS[limit]
    spec = kernel(**limits)
    assert spec.check(context(**within)) == []
    assert [str(each) for each in spec.check(context(**without))] == [reason]


def test_every_reason_is_given_and_not_only_the_first():
    spec = kernel(
        platforms={"cuda"}, dtypes={"float16"}, max_head_dim=32, head_dim_multiple=128, max_seq_len=8, supports=set(),
        package="no_such_library", workspace="1", requires_last_dim_stride1=True,
    )  # fmt: skip
    problem = context(
        features={"gqa": "fewer key heads", "dropout": "dropout"}, is_cuda_graph_capturing=True,
        requires_deterministic=True, memory_headroom_bytes=0, is_last_dim_contiguous=False,
    )  # fmt: skip
    assert [reason.code for reason in spec.check(problem)] == [
        "PLATFORM_MISMATCH", "DTYPE_UNSUPPORTED", "HEAD_DIM_INVALID", "HEAD_DIM_ALIGNMENT", "SEQ_TOO_LONG", "SEQ_TOO_LONG",
        "GQA_UNSUPPORTED", "DROPOUT_UNSUPPORTED", "STRIDE_LAST_DIM", "CUDA_GRAPH_UNSAFE", "NON_DETERMINISTIC",
        "MEMORY_HEADROOM_EXCEEDED", "NOT_INSTALLED",
    ]  # fmt: skip


def test_a_check_of_ones_own_adds_reasons_and_one_that_fails_refuses():
    odd = Reason("CONSTRAINT_FAILED", "only on Sundays")
    assert kernel(extra_check=lambda problem: [odd] if problem.dims["head_dim"] == 64 else []).check(context()) == [odd]
    with events.collect() as happened:
        (reason,) = kernel(extra_check=lambda problem: problem.dims["depth"]).check(context())
    assert reason.code == "CONSTRAINT_FAILED"
    assert "KeyError: 'depth'" in reason.message
    assert [event.code for event in happened] == ["CONSTRAINT_FAILED"]


def test_workspace_counts_the_largest_declared_size_or_else_the_traced_one():
    spec = kernel(workspace="seq_len_q * dtype_bytes")
    assert spec.workspace_bytes(context()) == 2048
    assert spec.workspace_bytes(context(dims={"seq_len_q": SymbolicDim(512, 2, 4096)})) == 16384
    assert spec.workspace_bytes(context(dims={"seq_len_q": LONG})) == 2048
    with pytest.raises(FormulaError, match="no size 'pages'"):
        kernel(workspace="pages").workspace_bytes(context())


def test_a_launch_is_validated_on_a_gpu_only():
    spec = kernel(grid=Grid("1", z="batch_size"))
    assert "CUDA_GRID_DIM_EXCEEDED" not in [reason.code for reason in spec.check(context(dims={"batch_size": 1 << 20}))]
    problem = context(hardware=gpu(90), dims={"batch_size": 1 << 20})
    assert [reason.code for reason in spec.check(problem)] == ["CUDA_GRID_DIM_EXCEEDED"]
    assert [r.code for r in kernel(grid=Grid("pages")).check(context(hardware=gpu(90)))] == ["CONSTRAINT_FAILED"]


def test_a_prior_fits_by_platform_dtype_features_and_sizes():
    limits = {"seq_len_q": (128, 512), "head_dim": (8, None)}
    prior = Prior("cpu", frozenset({"float32"}), 0.5, frozenset({"gqa"}), frozenset({"dropout"}), limits)
    grouped = context(features={"gqa": "fewer key heads", "causal": "a causal mask"})
    lengths = [prior.fits(grouped, {"seq_len_q": length, "head_dim": 64}) for length in (127, 128, 512, 513)]
    assert lengths == [False, True, True, False]
    sizes = {"seq_len_q": 128, "head_dim": 64}
    assert prior.fits(grouped, sizes)
    assert not prior.fits(grouped, {**sizes, "head_dim": 4})
    assert not prior.fits(context(), sizes)
    assert not prior.fits(context(features={"gqa": "fewer key heads", "dropout": "dropout"}), sizes)
    assert not prior.fits(replace(grouped, dtype=torch.float16), sizes)
    assert not prior.fits(replace(grouped, hardware=gpu(90)), sizes)


# ---- registering -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cleared():
    """Takes away what a test registers under ``new.kernel``."""
    yield
    if any(spec.kernel_id == "new.kernel" for spec in kernels("attention").values()):
        registry.unregister_kernel("new.kernel")


def test_a_kernel_comes_and_goes_and_changes_version_and_digest(cleared):
    version, digest = registry.version(), registry.digest()
    registry.register(kernel())
    assert "new.kernel" in kernels("attention")
    assert next(iter(kernels("attention"))) == "inductor"
    assert registry.version() > version
    assert registry.digest() != digest
    registry.unregister_kernel("new.kernel")
    assert "new.kernel" not in kernels("attention")
    assert registry.digest() == digest
    assert registry.version() > version + 1


def test_a_variant_has_its_own_kernels_and_those_of_its_op(cleared):
    registry.register(kernel(operation="attention.causal"))
    assert "new.kernel" in kernels("attention.causal")
    assert "new.kernel" in kernels("attention")
    assert "new.kernel" not in kernels("attention.full")
    assert "torch.sdpa" in kernels("attention.full")


def test_a_replaced_kernel_is_an_event_and_is_back_when_the_new_one_goes(cleared):
    old = kernels("attention")["torch.sdpa"]
    with events.collect() as happened:
        registry.register(replace(kernel(), kernel_id="torch.sdpa"))
    assert [event.code for event in happened] == ["KERNEL_REPLACED"]
    assert kernels("attention")["torch.sdpa"].source == "new"
    registry.unregister_kernel("torch.sdpa")
    assert kernels("attention")["torch.sdpa"] == old


def test_what_cannot_be_registered_or_removed_is_an_error():
    with pytest.raises(
        UnknownOperationError, match=r"no operation 'attention.casual' \(did you mean 'attention.causal'\?\)"
    ):
        registry.register(kernel(operation="attention.casual"))
    with pytest.raises(ValueError, match="that name leaves an operation to Inductor"):
        registry.register(replace(kernel(), kernel_id="inductor"))
    with pytest.raises(
        ValueError, match=r"'torch\.sdpa': it is to be removed, but was not registered; registered are: none"
    ):
        registry.unregister_kernel("torch.sdpa")


def test_the_digest_follows_the_installed_version(library, cleared):
    registry.register(_needing())
    absent = registry.digest()
    library("fastlib", "2.0", "")
    assert registry.digest() != absent


def test_threads_that_look_while_kernels_come_and_go_see_whole_tables(cleared):
    stop, seen, errors = threading.Event(), set(), []

    def look() -> None:
        while not stop.is_set():
            try:
                names = tuple(kernels("attention.causal"))
                seen.add(names[0])
                assert "torch.sdpa" in names
            except Exception as error:  # noqa: BLE001 the test reports it
                errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        registry.register(kernel())
        registry.unregister_kernel("new.kernel")
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert seen == {"inductor"}
    assert "new.kernel" not in kernels("attention.causal")


# ---- plugins -------------------------------------------------------------------------------------------------------


ENTRY = "[layerzero.backends]\nmine = fastplugin:register_backend\n"
SPEC = """
    from lz_compile.runtime.kernels.registry import KernelSpec
    ANY = frozenset("*")
    spec = KernelSpec("new.kernel", "attention", "new", ANY, ANY, ANY)
"""


def plugged() -> list[str]:
    return [name for name in kernels("attention") if name.startswith("new.")]


def test_a_plugin_registers_kernels_with_the_registry_it_is_given(library):
    library("fastplugin", "1.0", SPEC + "    def register_backend(registry):\n        registry.register(spec)\n", ENTRY)
    with events.collect() as happened:
        assert plugged() == ["new.kernel"]
        registry.reload()
        assert plugged() == ["new.kernel"]
    assert happened == []


def test_a_plugin_may_take_nothing_and_use_the_decorator(library):
    code = """
        import lz_compile as lz

        def register_backend():
            @lz.register_kernel(
                operation="attention.causal", kernel_id="new.kernel", platform="cpu", supported_dtypes=["float32"]
            )
            def attention(q, k, v, scale=None, causal=True):
                return v
    """
    library("fastplugin", "1.0", code, ENTRY)
    assert plugged() == ["new.kernel"]


def test_a_plugin_may_give_a_descriptor_and_the_module_of_its_functions(library):
    code = """
        from pathlib import Path

        def register_backend():
            return [(Path(__file__).with_name("kernels.json"), "fastplugin")]

        def attention(query, key, value, *, attrs):
            return value
    """
    site = library("fastplugin", "1.0", code, ENTRY)
    (site / "kernels.json").write_text(_descriptor(_entry(), package="fastplugin", backend_version=">=1"))
    spec = kernels("attention")["new.kernel"]
    assert (spec.source, spec.version, spec.call.__module__) == ("new", "1.0", "fastplugin")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import no_such_library\ndef register_backend(): pass",
            "ModuleNotFoundError: No module named 'no_such_library'",
        ),
        ("def register_backend(registry): raise OSError('no driver')", "OSError: no driver"),
        ("pass", "has no attribute 'register_backend'"),
        ("register_backend = 3", "is not a callable object"),
        ("def register_backend(): return ['kernels.json']", r"expected pairs (path, module name) or nothing"),
        ("def register_backend(a, b): pass", "missing 1 required positional argument"),
        (
            textwrap.dedent(SPEC)
            + "def register_backend(registry):\n    registry.register(spec)\n    raise OSError('late')",
            "OSError: late",
        ),
    ],
    ids=["no_library", "raises", "no_function", "no_callable", "no_pair", "parameters", "late"],
)
def test_a_plugin_that_fails_is_an_event_and_adds_nothing(library, code, message):
    library("fastplugin", "1.0", code, ENTRY)
    with events.collect() as happened:
        assert plugged() == []
        assert "torch.sdpa" in kernels("attention")
    assert [event.code for event in happened] == ["BACKEND_IMPORT_FAILED"]
    assert happened[0].message.startswith("plugin mine of fastplugin (fastplugin:register_backend) is disabled: ")
    assert message in happened[0].message


def test_a_wrong_descriptor_of_a_plugin_is_an_event(library):
    code = "def register_backend(): return (__file__.replace('fastplugin.py', 'none.json'), 'fastplugin')"
    library("fastplugin", "1.0", code, ENTRY)
    with events.collect() as happened:
        assert plugged() == []
    assert [event.code for event in happened] == ["CAPABILITIES_SCHEMA_MISMATCH"]


def test_what_a_program_registered_stays_when_plugins_are_read_again(library, cleared):
    registry.register(kernel())
    registry.reload()
    assert plugged() == ["new.kernel"]


# ---- listing -------------------------------------------------------------------------------------------------------


def test_kernels_are_listed_with_what_people_ask_for():
    listed = {info.kernel_id: info for info in lz.list_kernels("attention.causal")}
    assert set(listed) == set(kernels("attention.causal"))
    info = listed["torch.sdpa"]
    assert (info.operation, info.source, info.version, info.is_available) == ("attention", "torch.sdpa", None, True)
    assert "cpu" in info.platforms
    assert "causal" in info.supports
    for each in lz.list_kernels():
        printed = json.loads(json.dumps(each.to_dict()))
        assert printed["is_available"] == (printed["unavailable"] is None)


def test_an_absent_library_is_listed_with_its_reason(library, cleared):
    registry.register(_needing())
    info = next(info for info in lz.list_kernels("attention") if info.kernel_id == "new.kernel")
    assert not info.is_available
    assert info.to_dict()["unavailable"] == {"code": "NOT_INSTALLED", "message": "fastlib is not installed"}


def test_listing_an_unknown_operation_names_the_nearest():
    with pytest.raises(
        UnknownOperationError, match=r"listing kernels: no operation 'atention' \(did you mean 'attention'\?\)"
    ):
        lz.list_kernels("atention")


# ---- completeness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.names())
def test_an_op_has_a_reference_features_attributes_and_facts(op):
    module = ops.module(op)
    assert module.__doc__
    assert module.reference.__doc__
    assert "attrs" in inspect.signature(module.reference).parameters
    assert list(inspect.signature(module.features).parameters) == ["attrs", "facts"]
    owned = {
        value
        for value in vars(module).values()
        if isinstance(value, type) and is_dataclass(value) and value.__name__ != "OpAttributes"
    }
    (attrs,) = [kind for kind in owned if kind.__name__.endswith("Attrs")]
    (facts,) = [kind for kind in owned if kind.__name__.endswith("Facts")]
    assert attrs.__dataclass_params__.frozen
    assert facts.__dataclass_params__.frozen
    named = {field.name: field.type for field in fields(facts)}
    assert {"dtype", "device"} <= named.keys()  # what selection reads
    assert "Size" in named.values()
    json.dumps(attrs().to_dict())


@pytest.mark.parametrize("op", ops.names())
def test_an_op_has_a_recogniser_a_kernel_and_a_test_file(op):
    assert op in recognisers()
    assert [spec for spec in kernels(op).values() if spec.implementation is not None]
    assert (TESTS / f"test_{op}.py").is_file()


def test_a_room_of_matching_alone_is_found(tmp_path, monkeypatch):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "matching.py").touch()
    module = types.ModuleType("matching")
    module.matches = lambda graph, effects: iter(())
    monkeypatch.setitem(sys.modules, "lz_compile.passes.toy.matching", module)
    monkeypatch.setitem(recognisers.__wrapped__.__globals__, "__file__", str(tmp_path / "recognisers.py"))
    assert recognisers.__wrapped__()["toy"] is module.matches


@pytest.mark.parametrize("op", recognisers())
def test_a_recogniser_recognises_an_op_that_there_is(op):
    assert op in ops.names()


def _adapter(spec: KernelSpec) -> Any:
    """The function, with or without its library."""
    return getattr(importlib.import_module(spec.implementation.module), spec.implementation.name)


@pytest.mark.parametrize("op", ops.names())
def test_a_kernel_takes_the_operands_of_its_op_as_the_reference_does(op):
    given = inspect.signature(ops.module(op).reference).parameters
    if isinstance(getattr(ops.module(op), "Operands", None), type):
        assert list(given) == ["x", "attrs"]
    for spec in kernels(op).values():
        if spec.implementation is None:
            continue
        call = _adapter(spec)
        taken = {
            name: parameter
            for name, parameter in inspect.signature(call).parameters.items()
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


def test_an_interrupt_while_kernels_are_found_loses_none_of_them(monkeypatch):
    everything, add = set(registry.kernels("attention")), registry._add_descriptor
    monkeypatch.setattr(registry, "_state", registry._State())

    def interrupted(table, path, module):
        if len(table) > 3:
            raise KeyboardInterrupt
        add(table, path, module)

    monkeypatch.setattr(registry, "_add_descriptor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        registry.kernels("attention")
    monkeypatch.setattr(registry, "_add_descriptor", add)
    assert set(registry.kernels("attention")) >= everything
