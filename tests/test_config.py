"""Configuration files and arguments: every key arrives, and what is wrong is refused with its place and the nearest right."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lz_compile as lz
from lz_compile.compile.options import split
from lz_compile.errors import ConfigError, LayerZeroError
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import config, environment, names, policy, rules
from lz_compile.runtime.policy.names import Invalid
from lz_compile.runtime.policy.rules import Lock, Statement
from lz_compile.runtime.policy.settings import CacheSettings, PerfDBSettings, RanksSettings, Settings
from lz_compile.runtime.problem.context import SelectionContext, SymbolicDim

KERNELS = (
    "inductor lz.blocked torch.sdpa torch.flex torch.flex.cpu flash_attn.v2 flash_attn.v3 flashinfer xformers".split()
)
KERNEL_LIST = ", ".join(sorted(KERNELS))
SOURCE_LIST = "flash_attn, flashinfer, inductor, lz, torch, xformers"
H200 = SimpleNamespace(platform="cuda", device_name="NVIDIA H200", sm_version=90, generation="hopper")
CPU = SimpleNamespace(platform="cpu", device_name="AMD EPYC", sm_version=None, generation=None)

#: Every operation, as messages list them.
OPERATIONS = (
    "attention, attention.causal, attention.full, "
    "blend, blend.channel, blend.confidence, blend.convex, blend.logit, blend.margin, blend.residual, blend.soft_gate, "
    "linear, linear.quantised, mlp, mlp.gated, mlp.plain, norm, norm.layer, norm.rms, paged_attention, "
    "paged_attention.decode, paged_attention.ragged, rope, "
    "routing, routing.act, routing.grad, routing.none, sampling, sampling.ids, sampling.probs, sampling.scores, scan, scan.delta, scan.diagonal"
).split(", ")


REAL_KERNELS = registry.kernels


@pytest.fixture(autouse=True)
def known_kernels(monkeypatch):
    specs = {name: SimpleNamespace(kernel_id=name, source=name.partition(".")[0]) for name in KERNELS}
    monkeypatch.setattr(registry, "kernels", lambda _: specs)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "layerzero.yaml"
    file.write_text(text)
    return file


def refusal(tmp_path: Path, text: str) -> str:
    """The text of the error, the file's name replaced."""
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as failure:
        config.read(file)
    return str(failure.value).replace(str(file), "FILE")


def problem(operation="attention.causal", hardware=H200, dtype=torch.bfloat16, **dims):
    return SelectionContext(operation=operation, hardware=hardware, dtype=dtype, dims=dims)


# ---- what is too much ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["[" * 5000 + "]" * 5000, "rules: " + "[" * 3000 + "]" * 3000, "locks: {" * 300 + "}" * 300]
)
def test_a_file_that_is_nested_too_deeply_is_refused_in_one_line(tmp_path, text):
    with pytest.raises(ConfigError, match=r"^reading "):
        config.read(written(tmp_path, text))


def test_a_file_that_repeats_itself_is_refused_in_few_words(tmp_path):
    aliases = [f"k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ConfigError) as failure:
        config.read(written(tmp_path, "\n".join(["locks: &a0 [1, 2]", *aliases, "rules: *a11"])))
    assert len(str(failure.value)) < 1000


def test_a_file_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected at most 1 MiB, received 2\. Is it the right file\?"):
        config.read(written(tmp_path, "#" * (2 << 20)))


# ---- what is right ---------------------------------------------------------------------------------------------------

EVERYTHING = """
version: 1
enabled: false
fallback_enabled: false
log_selections: true
explain_enabled: true
deterministic: true
strict_mode: true
plan_mode: false
allow_adaptation: true
graph_strict_mode: false
backend_isolation: in_process
memory_headroom_mb: 1024
prefer_sources: [flash_attn, flashinfer]
avoid_sources: [xformers]
locks:
  attention.causal: flash_attn.v3
perfdb:
  enabled: false
  path: measured.sqlite
  auto_tune: true
  tune_samples: 7
cache:
  enabled: false
  max_size: 11
  ttl_seconds: 2
rules:
  - match: {sm: ">=90", operation: "attention.*"}
    prefer: flash_attn.v3.*
  - match: {seq_len: ">16384"}
    avoid_sources: [xformers]
    prefer_sources: [flashinfer]
    avoid: [torch.flex, lz.blocked]
    forbid: torch.sdpa
  - match: {operation: attention.full, dtype: float32}
    lock: torch.sdpa
"""


def test_every_key_of_a_file_arrives(tmp_path):
    file = written(tmp_path, EVERYTHING)
    layer = config.read(file)
    settings = Settings().replaced({value.name: value.value for value in layer.values})
    assert settings == Settings(
        enabled=False,
        fallback_enabled=False,
        log_selections=True,
        deterministic=True,
        strict_mode=True,
        memory_headroom_mb=1024,
        perfdb=PerfDBSettings(enabled=False, path=str(tmp_path / "measured.sqlite"), auto_tune=True, tune_samples=7),
        cache=CacheSettings(enabled=False, max_size=11, ttl_seconds=2.0),
    )
    assert settings.memory_headroom_bytes == 2**30
    assert {value.origin for value in layer.values} == {str(file)}
    assert layer.locks == (Lock("attention.causal", "flash_attn.v3", str(file)),)
    assert [(s.kind, s.pattern) for s in layer.statements] == [
        ("avoid", "xformers"),
        ("prefer", "flash_attn"),
        ("prefer", "flashinfer"),
    ]
    assert [rule.origin for rule in layer.rules] == [f"rule {n} of {file}" for n in (1, 2, 3)]
    assert [rule.to_dict() for rule in layer.rules] == [
        {
            "match": {"operation": "attention.*", "sm": ">=90"},
            "lock": None,
            "statements": [["prefer", "flash_attn.v3.*"]],
        },
        {
            "match": {"seq_len": ">=16385"},
            "lock": None,
            "statements": [
                ["forbid", "torch.sdpa"],
                ["avoid", "torch.flex"],
                ["avoid", "lz.blocked"],
                ["avoid", "xformers"],
                ["prefer", "flashinfer"],
            ],
        },
        {"match": {"dtype": "float32", "operation": "attention.full"}, "lock": "torch.sdpa", "statements": []},
    ]


def test_every_setting_can_be_configured_but_debugging_which_the_environment_switches():
    keys = {field.name for field in msgspec.structs.fields(config.Keys)} - set(config._ABOUT_KERNELS)
    assert keys - {"tune_samples", "distributed_selection"} == {field.name for field in fields(Settings)} - {
        "debug"
    } | set(config._ONE_VALUE)
    assert {f.name for f in msgspec.structs.fields(config.PerfDBKeys)} == {f.name for f in fields(PerfDBSettings)}
    assert {f.name for f in msgspec.structs.fields(config.CacheKeys)} == {f.name for f in fields(CacheSettings)}
    assert {f.name for f in msgspec.structs.fields(config.RanksKeys)} == {f.name for f in fields(RanksSettings)}
    assert set(Settings().flat()) == set(EVERYTHING_FLAT) | {"debug"}


EVERYTHING_FLAT = """enabled fallback_enabled log_selections deterministic strict_mode memory_headroom_mb max_reports perfdb.enabled perfdb.path perfdb.auto_tune perfdb.tune_samples
cache.enabled cache.max_size cache.ttl_seconds ranks.selection ranks.timeout_s ranks.lease_s ranks.versions""".split()


def test_what_the_specification_configures_is_accepted():
    """Its calls of ``lz.configure``, word for word but for values that are refused with a reason."""
    lz.configure(auto_tune_on_warmup=False, tune_samples=10)
    assert policy.current().settings.perfdb.tune_samples == 10
    lz.configure(
        prefer_sources=["flash_attn"], avoid_sources=["xformers"], fallback_enabled=True, deterministic=False,
        log_selections=False, strict_mode=False, plan_mode=False, allow_adaptation=True, graph_strict_mode=False,
        backend_isolation="in_process", memory_headroom_mb=1024, distributed_selection="independent",
    )  # fmt: skip
    for name, (only, why) in config._ONE_VALUE.items():
        assert name not in policy.current().settings.flat()
        with pytest.raises(ConfigError, match=re.escape(f"configuring {name}: expected {only!r}, received")) as refused:
            lz.configure(**{name: "another"})
        assert str(refused.value).endswith(why)


def test_a_file_and_arguments_mean_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import yaml

    from_file, from_code = config.read(written(tmp_path, EVERYTHING)), config.arguments(yaml.safe_load(EVERYTHING))
    assert from_file.canonical() == from_code.canonical()
    assert [v.value for v in from_file.values] == [v.value for v in from_code.values]
    assert {value.origin for value in from_code.values} == {"lz.configure()"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n", "version: 1\n", "rules: []\nlocks: {}\n"])
def test_a_file_that_says_nothing_is_a_layer_that_says_nothing(tmp_path, text):
    assert config.read(written(tmp_path, text)) == config.layer({}, "", tmp_path)


def test_the_reference_of_the_specification_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    layer = config.read(
        written(
            tmp_path,
            """
version: 1
enabled: true
memory_headroom_mb: 1024
prefer_sources:
  - flash_attn
  - flashinfer
  - xformers
avoid_sources: []
locks: {}
  # attention.causal: flash_attn.v3.causal
perfdb:
  enabled: true
  path: ~/.cache/layerzero/perfdb.sqlite
  auto_tune: false
  tune_samples: 20
cache:
  enabled: true
  max_size: 10000
rules: []
""",
        )
    )
    assert {v.name: v.value for v in layer.values}["perfdb.path"] == "/home/somebody/.cache/layerzero/perfdb.sqlite"
    assert len(layer.statements) == 3


def test_an_anchor_can_be_used_again(tmp_path):
    layer = config.read(
        written(tmp_path, "rules:\n- match: &long {seq_len: '>4096'}\n  prefer: lz\n- match: *long\n  avoid: torch\n")
    )
    assert layer.rules[0].conditions == layer.rules[1].conditions


# ---- what is wrong ---------------------------------------------------------------------------------------------------

TOP = ", ".join(field.name for field in msgspec.structs.fields(config.Keys))
CONDITIONS = (
    "operation, dtype, platform, generation, device_name, sm, seq_len, "
    "batch_size, num_heads, num_kv_heads, seq_len_q, seq_len_k, head_dim, value_dim, "
    "num_rows, num_channels, inner_size, num_classes, in_features, out_features, intermediate_size, hidden_size, "
    "num_requests, num_queries, block_size, rotary_dim, num_rollouts, rollout_length, rank, quarantine_rank, vocab_size, "
    "length, key_dim, reads"
)
COMPARISONS = "a number, a comparison such as '>=90' or '<128', or a range such as '512..2048'"

WRONG = {
    "an unknown key": (
        "\nenabeld: true",
        "line 2: enabeld: no key 'enabeld' (did you mean 'enabled'?)",
    ),
    "an unknown key that resembles none": ("xyzzy: 1", f"line 1: xyzzy: no key 'xyzzy'; valid are {TOP}"),
    "an unknown key inside": (
        "cache:\n  max_szie: 3",
        "line 2: cache.max_szie: no key 'max_szie' (did you mean 'max_size'?); valid are enabled, max_size, ttl_seconds",
    ),
    "an unknown key of perfdb": (
        "perfdb: {autotune: true}",
        "line 1: perfdb.autotune: no key 'autotune' (did you mean 'auto_tune'?); valid are enabled, path, auto_tune, tune_samples",
    ),
    "an unknown key of a rule": (
        "rules:\n- match: {sm: 90}\n  prefer: lz\n- match: {sm: 90}\n  prefers: lz",
        "line 5: rules[1].prefers: no key 'prefers' (did you mean 'prefer'?); "
        "valid are match, prefer, avoid, forbid, prefer_sources, avoid_sources, lock",
    ),
    "a text for a bool": ("enabled: maybe", "line 1: enabled: expected bool, received str 'maybe'"),
    "a number for a bool": ("enabled: 1", "line 1: enabled: expected bool, received int 1"),
    "a bool for a number": (
        "memory_headroom_mb: yes",
        "line 1: memory_headroom_mb: expected int or None, received bool True",
    ),
    "too small a number": ("memory_headroom_mb: -1", "line 1: memory_headroom_mb: expected int >= 0, received int -1"),
    "a cache of nothing": ("cache:\n  max_size: 0", "line 2: cache.max_size: expected int >= 1, received int 0"),
    "a time of nothing": ("cache: {ttl_seconds: 0}", "line 1: cache.ttl_seconds: expected float > 0.0, received int 0"),
    "no samples": ("perfdb: {tune_samples: 0}", "line 1: perfdb.tune_samples: expected int >= 1, received int 0"),
    "a text for a list": ("prefer_sources: torch", "line 1: prefer_sources: expected a list, received str 'torch'"),
    "nothing for a list": ("prefer_sources:", "line 1: prefer_sources: expected a list, received NoneType None"),
    "a number in a list": ("avoid_sources:\n- torch\n- 3", "line 3: avoid_sources[1]: expected str, received int 3"),
    "a list for a mapping": ("locks: [attention]", "line 1: locks: expected a mapping, received list ['attention']"),
    "a list for everything": ("- 1", "line 1: expected a mapping, received list [1]"),
    "a mapping for a list": ("rules: {a: 1}", "line 1: rules: expected a list, received dict {'a': 1}"),
    "a number for a path": ("perfdb: {path: 3}", "line 1: perfdb.path: expected a path, received int 3"),
    "an empty path": ("perfdb: {path: ''}", "line 1: perfdb.path: expected a path, received str ''"),
    "a key that is no text": ("locks: {1: torch.sdpa}", "line 1: locks: expected keys that are text"),
    "another version": (
        "version: 2",
        "line 1: version: expected 1, received int 2: there is no other version of this file",
    ),
    "a version in quotes": (
        "version: '1'",
        "line 1: version: expected 1, received str '1': there is no other version of this file",
    ),
    "a choice that there is not": (
        "backend_isolation: subproces",
        "line 1: backend_isolation: expected 'in_process', received str 'subproces': kernels run in this process",
    ),
    "planning, which is not there yet": (
        "plan_mode: true",
        "line 1: plan_mode: expected False, received bool True: kernels are chosen for one operation and what they compute along, "
        "not for a whole model",
    ),
    "isolation, which is not there yet": (
        "backend_isolation: subprocess",
        "line 1: backend_isolation: expected 'in_process', received str 'subprocess': kernels run in this process",
    ),
    "trial captures, which are not there yet": (
        "graph_strict_mode: true",
        "line 1: graph_strict_mode: expected False, received bool True: kernels are not captured on trial",
    ),
    "a key twice": (
        "enabled: true\n\nenabled: true",
        "line 3: the key 'enabled' stands twice, first in line 1; keep one of them",
    ),
    "a key inside twice": (
        "rules:\n- match:\n    sm: 90\n    sm: 80\n  prefer: lz",
        "line 4: the key 'rules[0].match.sm' stands twice, first in line 3; keep one of them",
    ),
    "an unknown source": (
        "prefer_sources:\n- torch\n- flash_atn",
        f"line 3: prefer_sources[1]: no source 'flash_atn' (did you mean 'flash_attn'?); valid are {SOURCE_LIST}",
    ),
    "a kernel for a source": (
        "avoid_sources: [flash_attn.v2]",
        "line 1: avoid_sources[0]: 'flash_attn.v2' names kernels, not a source; name them under 'prefer' or 'avoid' of a rule",
    ),
    "a source both ways": (
        "prefer_sources: [lz]\navoid_sources: [lz]",
        "line 1: prefer_sources[0]: 'lz' stands under 'avoid' as well; keep one of them",
    ),
    "a lock to an unknown kernel": (
        "locks:\n  attention: torch.spda",
        f"line 2: locks.attention: no kernel 'torch.spda' for attention (did you mean 'torch.sdpa'?); valid are {KERNEL_LIST}",
    ),
    "a lock to a library": (
        "locks: {attention: flash_attn.*}",
        "line 1: locks.attention: no kernel 'flash_attn.*' for attention (did you mean 'flash_attn.v3'?); "
        f"valid are {KERNEL_LIST}; a lock names one kernel",
    ),
    "a lock to a number": (
        "locks: {attention: 3}",
        "line 1: locks.attention: expected the id of a kernel, received int 3",
    ),
    "a lock of an unknown operation": (
        "locks: {xyzzy: torch.sdpa}",
        f"line 1: locks.xyzzy: no operation 'xyzzy'; valid are {', '.join(OPERATIONS)}",
    ),
    "a rule with an unknown condition": (
        "rules:\n- match: {xyzzy: 64}\n  prefer: lz",
        f"line 2: rules[0].match: no condition 'xyzzy'; valid are {CONDITIONS}",
    ),
    "a rule with an unreadable condition": (
        "rules:\n- match:\n    sm: '=>90'\n  prefer: lz",
        f"line 3: rules[0].match.sm: expected {COMPARISONS}, received '=>90'",
    ),
    "a rule with a fraction": (
        "rules: [{match: {sm: 8.9}, prefer: lz}]",
        f"line 1: rules[0].match.sm: expected {COMPARISONS}, received float 8.9",
    ),
    "a rule with a negative number": (
        "rules: [{match: {head_dim: -1}, prefer: lz}]",
        f"line 1: rules[0].match.head_dim: expected {COMPARISONS}, received int -1",
    ),
    "a rule with a bool": (
        "rules: [{match: {head_dim: true}, prefer: lz}]",
        f"line 1: rules[0].match.head_dim: expected {COMPARISONS}, received bool True",
    ),
    "a rule that never holds": (
        "rules: [{match: {seq_len: 2048..512}, prefer: lz}]",
        "line 1: rules[0].match.seq_len: '2048..512' never holds; the smaller end of a range comes first",
    ),
    "a rule of no alternatives": (
        "rules: [{match: {seq_len: []}, prefer: lz}]",
        "line 1: rules[0].match.seq_len: expected at least one alternative, received an empty list",
    ),
    "a rule for an unknown operation": (
        "rules: [{match: {operation: atention}, prefer: lz}]",
        "line 1: rules[0].match.operation: no operation 'atention' (did you mean 'attention'?)",
    ),
    "a rule for an unknown platform": (
        "rules: [{match: {platform: cdua}, prefer: lz}]",
        "line 1: rules[0].match.platform: no platform 'cdua' (did you mean 'cuda'?); valid are cpu, cuda, rocm, xpu, mps",
    ),
    "a rule for an unknown generation": (
        "rules: [{match: {generation: hoper}, prefer: lz}]",
        "line 1: rules[0].match.generation: no generation 'hoper' (did you mean 'hopper'?); "
        "valid are blackwell, hopper, ada, ampere, turing",
    ),
    "a rule for a number as a name": (
        "rules: [{match: {platform: 3}, prefer: lz}]",
        "line 1: rules[0].match.platform: expected a name or a glob, received int 3",
    ),
    "a rule without conditions": (
        "rules: [{match: {}, prefer: lz}]",
        "line 1: rules[0].match: expected a condition, received none; what holds always stands outside of rules",
    ),
    "a rule without a match": ("rules: [{prefer: lz}]", "line 1: rules[0]: expected a key 'match', received none"),
    "a rule without effect": (
        "rules: [{match: {sm: 90}}]",
        "line 1: rules[0]: the rule says nothing; expected one of forbid, avoid, avoid_sources, prefer, prefer_sources, lock",
    ),
    "a rule for an unknown kernel": (
        "rules: [{match: {sm: 90}, prefer: [lz, flash_attn.v9.*]}]",
        "line 1: rules[0].prefer[1]: no kernel or source 'flash_attn.v9.*' (did you mean 'flash_attn.v3'?); valid are "
        "flash_attn, flash_attn.v2, flash_attn.v3, flashinfer, inductor, lz, lz.blocked, torch, torch.flex, torch.flex.cpu, "
        "torch.sdpa, xformers",
    ),
    "a rule that forbids what remains": (
        "rules: [{match: {sm: 90}, forbid: inductor}]",
        "line 1: rules[0].forbid: 'inductor' cannot be forbidden: it is what runs where nothing else may; use 'avoid'",
    ),
    "a rule that wants both": (
        "rules: [{match: {sm: 90}, prefer: lz, avoid: [lz]}]",
        "line 1: rules[0].prefer: 'lz' stands under 'avoid' as well; keep one of them",
    ),
    "a rule that locks anything": (
        "rules: [{match: {sm: 90}, lock: lz.blocked}]",
        "line 1: rules[0].lock: expected 'operation' among the conditions of a rule that locks, received none",
    ),
    "a rule that locks to an unknown kernel": (
        "rules: [{match: {operation: attention}, lock: lz.blokced}]",
        f"line 1: rules[0].lock: no kernel 'lz.blokced' for attention (did you mean 'lz.blocked'?); valid are {KERNEL_LIST}",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_with_the_place_and_the_nearest_right(tmp_path, case):
    text, expected = WRONG[case]
    assert refusal(tmp_path, text) == f"reading FILE, {expected}"


def test_a_dtype_that_there_is_not_is_refused(tmp_path):
    text = refusal(tmp_path, "rules: [{match: {dtype: bflot16}, prefer: lz}]")
    assert "rules[0].match.dtype: no dtype 'bflot16' (did you mean 'bfloat16'?); valid are bfloat16, float16," in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [\n", 3),
        ("a: b: c", 1),
        ("x: !!python/object/apply:os.system ['true']", 1),
        ("? [a]\n: 1", 1),
        ("a: *b", 1),
    ],
)
def test_what_is_no_plain_yaml_is_refused_with_its_line(tmp_path, text, line):
    assert refusal(tmp_path, text).startswith(f"reading FILE, line {line}: not plain YAML: ")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_bytes(b"enabled: \xff\xfe")
    with pytest.raises(ConfigError, match=r"reading .*layerzero\.yaml: not plain YAML"):
        config.read(file)


def test_several_documents_are_refused(tmp_path):
    assert "expected a single document" in refusal(tmp_path, "enabled: true\n---\nenabled: false\n")


def test_aliases_that_repeat_each_other_are_read_in_no_time(tmp_path):
    lines = ["x0: &x0 [1, 1]", *(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 40))]
    assert "no key 'x0'" in refusal(tmp_path, "\n".join(lines))
    assert "no key 'a'" in refusal(tmp_path, "a: &a [*a]")


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(ConfigError, match=r"reading the configuration .*absent\.yaml: No such file or directory"):
        config.read(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        config.read(tmp_path)


def test_wrong_arguments_are_refused_by_their_names():
    with pytest.raises(ConfigError) as failure:
        config.arguments({"prefer_source": ["torch"]})
    assert str(failure.value) == "configuring prefer_source: no key 'prefer_source' (did you mean 'prefer_sources'?)"
    with pytest.raises(ConfigError, match=r"configuring cache\.max_size: expected int >= 1, received int 0"):
        config.arguments({"cache": {"max_size": 0}})
    assert issubclass(ConfigError, (LayerZeroError, ValueError))
    assert issubclass(ConfigError, ValueError)


def test_an_absolute_path_stays_as_it_is_and_none_is_the_default(tmp_path):
    given_path = config.read(written(tmp_path, f"perfdb: {{path: {tmp_path}/x/y.db}}"))
    assert given_path.values[0].value == f"{tmp_path}/x/y.db"
    assert config.read(written(tmp_path, "perfdb: {path: null}")).values[0].value is None


# ---- names and conditions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("flash_attn", {"flash_attn.v2", "flash_attn.v3"}),
        ("flash_attn.*", {"flash_attn.v2", "flash_attn.v3"}),
        ("flash_attn.v3.*", {"flash_attn.v3"}),
        ("flash*", {"flash_attn.v2", "flash_attn.v3", "flashinfer"}),
        ("torch.flex", {"torch.flex", "torch.flex.cpu"}),
        ("torch.flex.*", {"torch.flex", "torch.flex.cpu"}),
        ("flash", set()),
        ("TORCH", set()),
    ],
)
def test_a_pattern_names_kernels_and_everything_below(pattern, named):
    kernels = registry.kernels("attention").values()
    assert {kernel.kernel_id for kernel in kernels if names.covers_kernel(pattern, kernel)} == named


@pytest.mark.parametrize(
    ("name", "kernel_id"),
    [
        ("flash_attn.v3.causal", "flash_attn.v3"),
        ("flash_attn.v2.causal", "flash_attn.v2"),
        ("flashinfer.causal", "flashinfer"),
        ("xformers.causal", "xformers"),
        ("torch.sdpa.causal", "torch.sdpa"),
        ("torch.sdpa.full", "torch.sdpa"),
        ("torch.norm.rms", "torch.norm"),
        ("liger.rms_norm", "liger.rms_norm"),
        ("apex.rms_norm", "apex.rms_norm"),
        ("torch.rms_norm", "torch.norm"),
    ],
)
def test_a_kernel_may_be_called_as_the_specification_calls_it(monkeypatch, name, kernel_id):
    monkeypatch.setattr(registry, "kernels", REAL_KERNELS)
    operation = "norm.rms" if "norm" in name else "attention.full" if name.endswith("full") else "attention.causal"
    layer = config.arguments(
        {"locks": {operation: name}, "rules": [{"match": {"operation": operation}, "prefer": name}]}
    )
    assert [lock.kernel_id for lock in layer.locks] == [kernel_id]
    assert [statement.pattern for rule in layer.rules for statement in rule.statements] == [kernel_id]
    monkeypatch.setenv("LAYERZERO_PREFER", name)
    monkeypatch.setenv("LAYERZERO_LOCK_" + operation.upper().replace(".", "_"), name)
    variables = environment.read(environment.snapshot())
    assert [statement.pattern for statement in variables.statements] == [kernel_id]
    assert [lock.kernel_id for lock in variables.locks] == [kernel_id]
    assert split({"layerzero.lock": {operation: name}})[0].lock == {operation: kernel_id}
    lz.lock(operation, name)
    with lz.prefer(name):
        pass


def test_a_name_for_another_variant_or_of_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "kernels", REAL_KERNELS)
    text = "'torch.sdpa.causal' names torch.sdpa for the variant causal, not for full; lock it to 'torch.sdpa'"
    with pytest.raises(ConfigError, match=re.escape(text)):
        lz.lock("attention.full", "torch.sdpa.causal")
    for wrong in ("torch.sdpa.casual", "torch.sdpa.rms.causal", "torch.causal"):
        with pytest.raises(ConfigError, match="no kernel"):
            lz.lock("attention", wrong)


def test_a_kernel_is_named_by_its_backend_too():
    kernel = SimpleNamespace(kernel_id="fa.fast", source="flash_attn")
    assert names.sources_of(kernel) == {"fa", "flash_attn"}
    assert names.covers_kernel("flash_attn", kernel)
    assert names.covers_kernel("flash*", kernel)
    assert not names.covers_kernel("some*", kernel)


def test_every_kernel_of_ours_is_named_by_its_id_and_by_its_library(monkeypatch):
    monkeypatch.setattr(registry, "kernels", REAL_KERNELS)
    found = REAL_KERNELS("attention")
    assert {"inductor", "lz.blocked", "torch.sdpa"} <= set(found)
    for kernel_id, kernel in found.items():
        names.locked("attention", kernel_id)
        for source in names.sources_of(kernel):
            names.checked_source(source)
            assert names.covers_kernel(source, kernel)
        assert kernel_id.partition(".")[0] in names.sources_of(kernel)


def holds(key, wanted, **subject):
    return rules.condition(key, wanted).holds(problem(**subject))


COMPARE = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "": lambda a, b: a == b,
}
sizes = st.integers(0, 40)


@given(st.sampled_from(sorted(COMPARE)), sizes, sizes, st.sampled_from(["", " ", "  "]))
def test_a_comparison_holds_where_pythons_does(sign, number, size, space):
    text = f"{space}{sign}{space}{number}{space}"
    if (sign, number) == ("<", 0):
        with pytest.raises(Invalid, match="never holds"):
            rules.condition("head_dim", text)
    else:
        assert holds("head_dim", text, head_dim=size) == COMPARE[sign](size, number)


@given(sizes, sizes, sizes)
def test_a_range_holds_between_its_ends_and_both_belong_to_it(one, other, size):
    low, high = sorted((one, other))
    assert holds("seq_len_k", f"{low}..{high}", seq_len_k=size) == (low <= size <= high)


conditions = st.one_of(
    sizes,
    st.builds("{}{}".format, st.sampled_from([">=", "<=", ">", "==", "!="]), sizes),
    st.builds(lambda a, b: f"{min(a, b)}..{max(a, b)}", sizes, sizes),
)


@given(st.lists(conditions, min_size=1, max_size=5), sizes)
def test_a_list_holds_where_one_of_its_entries_does(wanted, size):
    single = [rules.condition("head_dim", each).holds(problem(head_dim=size)) for each in wanted]
    assert rules.condition("head_dim", wanted).holds(problem(head_dim=size)) == any(single)


@given(st.lists(conditions, min_size=1, max_size=5), st.randoms())
def test_conditions_that_mean_the_same_are_equal(wanted, random):
    shuffled = [*wanted, wanted[0]]
    random.shuffle(shuffled)
    assert rules.condition("head_dim", shuffled) == rules.condition("head_dim", wanted)
    again = str(rules.condition("head_dim", wanted)).split(", ")
    assert rules.condition("head_dim", again) == rules.condition("head_dim", wanted)


@given(st.text("<>=!.0123456789_ x٣", max_size=8).filter(lambda text: not re.fullmatch(READABLE, text)))
def test_what_is_no_condition_is_refused_whatever_it_is(text):
    with pytest.raises(Invalid, match=r"sm: (expected a number|'.*' never holds)"):
        rules.condition("sm", text)


READABLE = r" *(>=|>|==|!=|) *[0-9]+ *| *<= *[0-9]+ *| *< *0*[1-9][0-9]* *| *[0-9]+ *\.\. *[0-9]+ *"


@pytest.mark.parametrize(
    ("key", "wanted", "expected"),
    [
        ("operation", "attention", True),
        ("operation", "attention.*", True),
        ("operation", "attention.causal", True),
        ("operation", "attention.full", False),
        ("operation", ["attention.full", "attention.causal"], True),
        ("sm", ">=90", True),
        ("sm", 90, True),
        ("sm", "<90", False),
        ("platform", "cuda", True),
        ("platform", ["cpu", "xpu"], False),
        ("generation", "hopper", True),
        ("generation", "gfx942", False),
        ("device_name", "NVIDIA H*", True),
        ("dtype", "bfloat16", True),
        ("dtype", "torch.bfloat16", True),
        ("dtype", "float*", False),
        ("seq_len", ">16384", True),
        ("seq_len_q", ">16384", False),
        ("head_dim", 128, True),
        ("value_dim", 128, False),
    ],
)
def test_a_condition_reads_the_problem(key, wanted, expected):
    assert holds(key, wanted, seq_len_q=1, seq_len_k=20_000, head_dim=128) is expected


@pytest.mark.parametrize(
    ("key", "wanted"), [("sm", ">=0"), ("generation", "hopper"), ("head_dim", ">=0"), ("seq_len", ">=0")]
)
def test_what_a_problem_does_not_have_meets_no_condition(key, wanted):
    assert not holds(key, wanted, hardware=CPU)


def test_a_symbolic_size_counts_as_its_hint():
    assert holds("seq_len", ">4096", seq_len_q=SymbolicDim(8192, 1, None, "s0"), seq_len_k=16)
    assert not holds("seq_len", ">4096", seq_len_q=SymbolicDim(512, 1, 100_000, "s0"), seq_len_k=16)


def test_a_rule_holds_where_all_of_its_conditions_do(tmp_path):
    layer = config.read(
        written(tmp_path, "rules: [{match: {sm: '>=90', operation: attention.causal, seq_len: 1..64}, prefer: lz}]")
    )
    (rule,) = layer.rules
    assert rule.statements == (Statement("prefer", "lz", rule.origin),)
    assert rule.holds(problem(seq_len_q=64, seq_len_k=64))
    assert not rule.holds(problem(seq_len_q=65, seq_len_k=64))
    assert not rule.holds(problem("attention.full", seq_len_q=64, seq_len_k=64))
    assert not rule.holds(problem(hardware=CPU, seq_len_q=64, seq_len_k=64))
