"""The policy: who wins over whom, what holds where and until when, and what a decision may depend on."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lz_compile as lz
from lz_compile.errors import ConfigError
from lz_compile.ground import events
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import environment, policy
from lz_compile.runtime.policy.resolved import Policy, ResolvedPolicy
from lz_compile.runtime.policy.settings import WITHOUT_EFFECT_ON_DECISIONS, Settings
from lz_compile.runtime.problem.context import SelectionContext

KERNELS = (
    "inductor lz.blocked torch.sdpa torch.flex torch.flex.cpu flash_attn.v2 flash_attn.v3 flashinfer xformers".split()
)
H200 = SimpleNamespace(platform="cuda", device_name="NVIDIA H200", sm_version=90, generation="hopper")
A100 = SimpleNamespace(platform="cuda", device_name="NVIDIA A100", sm_version=80, generation="ampere")


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch, tmp_path):
    """Kernels of our own choice, no file of the user, no variable but that of the cache; everything is forgotten after."""
    specs = {name: SimpleNamespace(kernel_id=name, source=name.partition(".")[0]) for name in KERNELS}
    monkeypatch.setattr(registry, "kernels", lambda _: specs)
    monkeypatch.setattr(policy.platformdirs, "user_config_dir", lambda *_, **__: str(tmp_path / "user"))
    for name in [name for name in os.environ if name.startswith("LAYERZERO_") and name != "LAYERZERO_CACHE_DIR"]:
        monkeypatch.delenv(name)
    policy.reset()
    yield
    policy.reset()


def problem(operation="attention.causal", hardware=H200, seq_len=1024, dtype=torch.bfloat16):
    dims = {"batch_size": 1, "seq_len_q": seq_len, "seq_len_k": seq_len, "head_dim": 64}
    return SelectionContext(operation=operation, hardware=hardware, dtype=dtype, dims=dims)


def resolved_policy(**changes) -> ResolvedPolicy:
    return policy.current().resolved_policy(problem(**changes))


def file(tmp_path: Path, text: str, name: str = "layerzero.yaml") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- defaults, and one origin at a time ------------------------------------------------------------------------------


def test_without_configuration_there_are_defaults_and_nothing_is_said():
    assert policy.current().settings == Settings()
    assert resolved_policy() == ResolvedPolicy()
    assert policy.current().to_dict()["settings"]["enabled"] == {"value": True, "origin": "default"}


def test_configure_changes_what_it_names_and_keeps_the_rest():
    lz.configure(deterministic=True, cache={"max_size": 5}, prefer_sources=["flashinfer", "torch"])
    lz.configure(strict_mode=True, cache={"enabled": False})
    settings = policy.current().settings
    assert (settings.deterministic, settings.strict_mode, settings.cache.max_size, settings.cache.enabled) == (
        True,
        True,
        5,
        False,
    )
    assert [name for name, _ in resolved_policy().prefer] == [
        "flashinfer",
        "torch.sdpa",
        "torch.flex",
        "torch.flex.cpu",
    ]
    lz.configure(prefer_sources=["lz"])
    assert resolved_policy().prefer == (("lz.blocked", "lz.configure()"),)
    lz.configure(prefer_sources=[])
    assert resolved_policy() == ResolvedPolicy()


def test_a_later_call_wins_over_an_earlier_one_that_said_the_opposite():
    lz.configure(avoid_sources=["lz", "torch"])
    lz.configure(prefer_sources=["lz"])
    assert resolved_policy().preference("lz.blocked") == (0, "lz.configure()")
    assert resolved_policy().avoided("lz.blocked") is None
    assert resolved_policy().avoided("torch.sdpa") == "lz.configure()"
    assert policy.current().to_dict()["avoid"] == [{"name": "torch", "origin": "lz.configure()"}]


def test_a_wrong_call_changes_nothing():
    before = policy.current()
    with pytest.raises(ConfigError, match=r"configuring cache\.max_size"):
        lz.configure(deterministic=True, cache={"max_size": "many"})
    assert policy.current() is before


def test_a_lock_is_for_its_operation_and_unlock_takes_it_back():
    lz.lock("attention.causal", "torch.sdpa")
    assert (resolved_policy().lock, resolved_policy().lock_origin) == ("torch.sdpa", "lz.lock()")
    assert resolved_policy(operation="attention.full").lock is None
    assert resolved_policy(operation="attention").lock is None
    lz.unlock("attention.causal")
    assert resolved_policy() == ResolvedPolicy()


@pytest.mark.parametrize("pattern", ["attention", "attention.*", "*"])
def test_a_lock_of_an_op_is_for_all_of_its_variants(pattern):
    lz.lock(pattern, "torch.sdpa")
    assert [resolved_policy(operation=f"attention{end}").lock for end in ("", ".causal", ".full")] == ["torch.sdpa"] * 3


def test_the_narrower_of_two_locks_holds():
    lz.lock("attention.causal", "torch.sdpa")
    lz.lock("attention", "lz.blocked")
    lz.lock("attention.*", "xformers")
    assert resolved_policy().lock == "torch.sdpa"
    assert resolved_policy(operation="attention.full").lock == "lz.blocked"


def test_locking_again_replaces_the_lock():
    lz.lock("attention", "torch.sdpa")
    lz.lock("attention", "lz.blocked")
    assert resolved_policy().lock == "lz.blocked"
    lz.unlock("attention")
    assert resolved_policy().lock is None


def test_unlocking_a_variant_leaves_the_others_locked_until_all_are_locked_anew():
    lz.lock("attention", "torch.sdpa")
    lz.unlock("attention.causal")
    assert (resolved_policy().lock, resolved_policy(operation="attention.full").lock) == (None, "torch.sdpa")
    lz.lock("attention", "lz.blocked")
    assert resolved_policy().lock == "lz.blocked"


def test_unlocking_an_op_unlocks_its_variants_and_what_was_never_locked_is_no_fault():
    lz.lock("attention.causal", "torch.sdpa")
    lz.unlock("attention")
    digest = policy.current().digest
    lz.unlock("attention")
    lz.unlock("attention.full")
    assert resolved_policy().lock is None
    assert policy.current().digest == digest == Policy().digest


def test_unlock_reaches_the_file(tmp_path):
    lz.load_config(file(tmp_path, "locks: {attention.*: torch.sdpa}"))
    assert resolved_policy().lock == "torch.sdpa"
    lz.unlock("attention.causal")
    assert (resolved_policy().lock, resolved_policy(operation="attention.full").lock) == (None, "torch.sdpa")


def test_unlock_reaches_the_rules_of_the_file(tmp_path):
    lz.load_config(file(tmp_path, "rules: [{match: {operation: attention, sm: 90}, lock: torch.sdpa}]"))
    assert resolved_policy().lock == "torch.sdpa"
    lz.unlock("attention")
    assert resolved_policy().lock is None


def test_what_unlock_cannot_undo_is_refused(monkeypatch):
    lz.configure(rules=[{"match": {"operation": "attention.causal"}, "lock": "torch.sdpa"}])
    with pytest.raises(
        ConfigError, match=r"unlocking 'attention': rule 1 of lz\.configure\(\) locks it to torch\.sdpa"
    ):
        lz.unlock("attention")
    lz.unlock("attention.full")
    lz.configure(rules=[])
    lz.unlock("attention")
    with lz.lock("attention", "lz.blocked"), pytest.raises(ConfigError, match=r"lz\.lock\(\) locks it to lz\.blocked"):
        lz.unlock("attention")
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "xformers")
    with pytest.raises(ConfigError, match="environment LAYERZERO_LOCK_ATTENTION locks it to xformers"):
        lz.unlock("attention.causal")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: lz.lock("atention", "torch.sdpa"),
            "locking 'atention': no operation 'atention' (did you mean 'attention'?)",
        ),
        (
            lambda: lz.lock("attention", "torch.spda"),
            "locking 'attention': no kernel 'torch.spda' for attention (did you mean 'torch.sdpa'?)",
        ),
        (lambda: lz.unlock("atention"), "unlocking: no operation 'atention' (did you mean 'attention'?)"),
        (lambda: lz.prefer("flash_atn"), "lz.prefer(): no kernel or source 'flash_atn' (did you mean 'flash_attn'?)"),
        (lambda: lz.avoid("lz", "xfomers"), "lz.avoid(): no kernel or source 'xfomers' (did you mean 'xformers'?)"),
        (lz.prefer, "lz.prefer(): expected the name of a kernel or source, received none"),
    ],
)
def test_a_name_that_there_is_not_is_refused_with_the_nearest_and_changes_nothing(call, text):
    before = policy.current()
    with pytest.raises(ConfigError) as failure:
        call()
    assert str(failure.value).startswith(text)
    assert policy.current() is before


# ---- what is resolved ------------------------------------------------------------------------------------------------


def test_the_kernels_of_a_preferred_library_share_a_place():
    lz.configure(prefer_sources=["torch", "flash_attn"])
    places = {name: resolved_policy().preference(name) for name in KERNELS}
    assert {name: place and place[0] for name, place in places.items()} == {
        **dict.fromkeys(KERNELS),
        **dict.fromkeys(("torch.sdpa", "torch.flex", "torch.flex.cpu"), 0),
        **dict.fromkeys(("flash_attn.v2", "flash_attn.v3"), 1),
    }


def test_a_stronger_origin_takes_kernels_out_of_what_a_weaker_one_says_of_their_library():
    lz.configure(avoid_sources=["torch"])
    with lz.prefer("torch.flex.cpu"):
        assert resolved_policy().prefer == (("torch.flex.cpu", "lz.prefer()"),)
        assert [name for name, _ in resolved_policy().avoid] == ["torch.sdpa", "torch.flex"]
    with lz.avoid("torch.sdpa"), lz.prefer("torch"):
        assert [name for name, _ in resolved_policy().prefer] == ["torch.sdpa", "torch.flex", "torch.flex.cpu"]
        assert resolved_policy().avoid == ()


def test_of_two_statements_in_one_place_avoidance_holds():
    lz.configure(rules=[{"match": {"sm": 90}, "prefer": ["flash_attn", "lz"], "avoid": "flash_attn.v3"}])
    assert [name for name, _ in resolved_policy().prefer] == ["flash_attn.v2", "lz.blocked"]
    assert resolved_policy().avoid == (("flash_attn.v3", "rule 1 of lz.configure()"),)


def test_the_first_of_two_rules_holds_and_rules_hold_before_what_is_said_without_conditions():
    lz.configure(
        avoid_sources=["lz"],
        rules=[{"match": {"sm": 90}, "prefer": "lz"}, {"match": {"head_dim": 64}, "avoid": ["lz", "torch.sdpa"]}],
    )
    assert resolved_policy().prefer == (("lz.blocked", "rule 1 of lz.configure()"),)
    assert resolved_policy().avoid == (("torch.sdpa", "rule 2 of lz.configure()"),)
    assert resolved_policy(hardware=A100).prefer == ()
    assert resolved_policy(hardware=A100).avoided("lz.blocked") == "rule 2 of lz.configure()"


def test_rules_read_architecture_operation_and_length(tmp_path):
    path = file(
        tmp_path,
        """
rules:
  - match: {sm: ">=90", operation: "attention.*"}
    prefer: "flash_attn.v3.*"
  - match: {seq_len: ">16384"}
    avoid_sources: [xformers]
  - match: {operation: attention.full, dtype: float32}
    lock: torch.sdpa
""",
    )
    lz.load_config(path)
    assert resolved_policy().prefer == (("flash_attn.v3", f"rule 1 of {path}"),)
    assert resolved_policy(hardware=A100).prefer == ()
    assert resolved_policy(seq_len=16_384).avoid == ()
    assert resolved_policy(seq_len=16_385).avoid == (("xformers", f"rule 2 of {path}"),)
    full = resolved_policy(operation="attention.full", dtype=torch.float32)
    assert (full.lock, full.lock_origin) == ("torch.sdpa", f"rule 3 of {path}")
    assert resolved_policy(operation="attention.full").lock is None


def test_a_rule_that_locks_is_stronger_than_a_lock_of_the_same_file(tmp_path):
    lz.load_config(
        file(
            tmp_path,
            "locks: {attention.causal: xformers}\nrules: [{match: {operation: attention, sm: 90}, lock: torch.sdpa}]",
        )
    )
    assert resolved_policy().lock == "torch.sdpa"
    assert resolved_policy(hardware=A100).lock == "xformers"


def test_what_is_forbidden_is_excluded_whoever_prefers_it_but_inductor_remains():
    lz.configure(rules=[{"match": {"sm": 90}, "forbid": ["*"]}])
    with lz.prefer("torch.sdpa"):
        assert [name for name, _ in resolved_policy().exclude] == [name for name in KERNELS if name != "inductor"]
        assert resolved_policy().excluded("torch.sdpa") == "rule 1 of lz.configure()"
        assert resolved_policy().excluded("inductor") is None
        assert resolved_policy(hardware=A100).excluded("torch.sdpa") is None


def test_only_a_stronger_lock_opens_what_is_forbidden(tmp_path):
    lz.load_config(file(tmp_path, "locks: {attention: torch.flex}\nrules: [{match: {sm: 90}, forbid: torch.*}]"))
    assert resolved_policy().lock == "torch.flex"
    assert resolved_policy().excluded("torch.flex") is not None
    lz.lock("attention", "torch.flex")
    assert [name for name, _ in resolved_policy().exclude] == ["torch.sdpa", "torch.flex.cpu"]


# ---- precedence ------------------------------------------------------------------------------------------------------

ORIGINS = ["default", "file", "code", "environment", "context", "options"]  # weakest first
LOCKED = dict(zip(ORIGINS[1:], ["flash_attn.v2", "torch.sdpa", "xformers", "lz.blocked", "flashinfer"], strict=True))


@pytest.mark.parametrize(
    "origins", [set(chosen) for n in range(6) for chosen in itertools.combinations(ORIGINS[1:], n)]
)
def test_the_strongest_origin_that_locks_holds(origins, tmp_path, monkeypatch):
    """Every subset of origins, set in an order that is not that of their strength."""
    if "environment" in origins:
        monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", LOCKED["environment"])
    if "code" in origins:
        lz.lock("attention", LOCKED["code"])
    if "file" in origins:
        lz.load_config(file(tmp_path, f"locks: {{attention: {LOCKED['file']}}}"))
    strongest = max(origins, key=ORIGINS.index, default=None)

    def decided():
        here = policy.current()
        here = here.with_locks({"attention": LOCKED["options"]}) if "options" in origins else here
        return here.resolved_policy(problem())

    if "context" in origins:
        with lz.lock("attention", LOCKED["context"]):
            found = decided()
    else:
        found = decided()
    assert found.lock == LOCKED.get(strongest)
    assert strongest != "options" or found.lock_origin == "options['layerzero.lock']"


@pytest.mark.parametrize(
    "origins", [set(chosen) for n in range(5) for chosen in itertools.combinations(ORIGINS[1:5], n)]
)
def test_the_strongest_origin_that_switches_holds(origins, tmp_path, monkeypatch):
    """The file and the environment switch off, code switches on, the context manager off."""
    if "file" in origins:
        lz.load_config(file(tmp_path, "enabled: false"))
    if "code" in origins:
        lz.configure(enabled=True)
    if "environment" in origins:
        monkeypatch.setenv("LAYERZERO_DISABLED", "1")
    expected = {"file": False, "code": True, "environment": False, "context": False}
    with lz.disabled() if "context" in origins else nullcontext():
        strongest = max(origins, key=ORIGINS.index, default=None)
        assert policy.current().settings.enabled is expected.get(strongest, True)


@pytest.mark.parametrize(
    ("weaker", "stronger"), list(itertools.combinations(["file", "code", "environment", "context"], 2))
)
@pytest.mark.parametrize("wish", ["prefer", "avoid"])
def test_of_two_origins_that_disagree_about_a_library_the_stronger_holds(weaker, stronger, wish, tmp_path, monkeypatch):
    opposite = "avoid" if wish == "prefer" else "prefer"

    def say(origin, kind):
        if origin == "file":
            lz.load_config(file(tmp_path, f"{kind}_sources: [torch]"))
        elif origin == "code":
            lz.configure(**{f"{kind}_sources": ["torch"]})
        elif origin == "environment":
            monkeypatch.setenv(f"LAYERZERO_{kind.upper()}", "torch")
        else:
            getattr(lz, kind)("torch")

    say(weaker, opposite)
    say(stronger, wish)
    found = resolved_policy()
    assert [len(found.prefer), len(found.avoid)] == ([3, 0] if wish == "prefer" else [0, 3])


def test_preferences_of_stronger_origins_come_first(tmp_path, monkeypatch):
    path = file(tmp_path, "prefer_sources: [xformers]")
    lz.load_config(path)
    lz.configure(prefer_sources=["lz"])
    monkeypatch.setenv("LAYERZERO_PREFER", "torch.sdpa, flashinfer")
    with lz.prefer("flash_attn.v2"), lz.prefer("flash_attn.v3", "xformers"):
        assert resolved_policy().prefer == (
            ("flash_attn.v3", "lz.prefer()"),
            ("xformers", "lz.prefer()"),
            ("flash_attn.v2", "lz.prefer()"),
            ("torch.sdpa", "environment LAYERZERO_PREFER"),
            ("flashinfer", "environment LAYERZERO_PREFER"),
            ("lz.blocked", "lz.configure()"),
        )


# ---- environment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1", "true", "YES", "on", " 1 "])
def test_a_switch_is_on_in_many_spellings(monkeypatch, text):
    for name in environment.SWITCHES:
        monkeypatch.setenv(name, text)
    settings = policy.current().settings
    assert (settings.enabled, settings.log_selections, settings.deterministic, settings.debug) == (
        False,
        True,
        True,
        True,
    )


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_a_switch_that_is_off_is_said_too(monkeypatch, text, tmp_path):
    lz.configure(enabled=False, deterministic=True)
    for name in environment.SWITCHES:
        monkeypatch.setenv(name, text)
    settings = policy.current().settings
    assert (settings.enabled, settings.log_selections, settings.deterministic, settings.debug) == (
        True,
        False,
        False,
        False,
    )
    assert policy.current().to_dict()["settings"]["enabled"]["origin"] == "environment LAYERZERO_DISABLED"


def test_an_empty_variable_is_not_set(monkeypatch):
    for name in (
        *environment.SWITCHES,
        *environment.LISTS,
        environment.CONFIG,
        "LAYERZERO_LOCK_ATTENTION",
        "LAYERZERO_X",
    ):
        monkeypatch.setenv(name, "")
    assert policy.current().settings == Settings()
    assert resolved_policy() == ResolvedPolicy()


def test_variables_lock_prefer_and_avoid(monkeypatch):
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "torch.sdpa")
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION_CAUSAL", "lz.blocked")
    monkeypatch.setenv("LAYERZERO_PREFER", "flashinfer,flash_attn.v3.*")
    monkeypatch.setenv("LAYERZERO_AVOID", "xformers")
    assert resolved_policy() == ResolvedPolicy(
        lock="lz.blocked",
        lock_origin="environment LAYERZERO_LOCK_ATTENTION_CAUSAL",
        prefer=(("flashinfer", "environment LAYERZERO_PREFER"), ("flash_attn.v3", "environment LAYERZERO_PREFER")),
        avoid=(("xformers", "environment LAYERZERO_AVOID"),),
        prefer_places=(0, 1),
    )
    assert resolved_policy(operation="attention.full").lock == "torch.sdpa"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("DISABLED", "maybe", "expected one of 1, true, yes, on, 0, false, no, off, received 'maybe'"),
        ("VERBOSE", "2", "expected one of 1, true, yes, on, 0, false, no, off, received '2'"),
        ("PREFER", "flash_atn", "no kernel or source 'flash_atn' (did you mean 'flash_attn'?); valid are"),
        ("AVOID", "torch,,lz", "expected names with commas between them, received an empty name"),
        (
            "LOCK_ATTENTION",
            "torch.spda",
            "no kernel 'torch.spda' for attention (did you mean 'torch.sdpa'?); valid are",
        ),
        (
            "LOCK_ATENTION",
            "torch.sdpa",
            "no operation to lock by that name (did you mean 'LAYERZERO_LOCK_ATTENTION'?); valid are "
            "LAYERZERO_LOCK_ATTENTION, LAYERZERO_LOCK_ATTENTION_CAUSAL, LAYERZERO_LOCK_ATTENTION_FULL",
        ),
    ],
)
def test_a_variable_that_cannot_be_followed_is_refused_each_time(monkeypatch, name, value, text):
    monkeypatch.setenv(f"LAYERZERO_{name}", value)
    for _ in range(2):
        with pytest.raises(ConfigError) as failure:
            policy.current()
        assert str(failure.value).startswith(f"reading environment LAYERZERO_{name}='{value}': {text}")
    monkeypatch.delenv(f"LAYERZERO_{name}")
    assert resolved_policy() == ResolvedPolicy()


def test_preferring_and_avoiding_the_same_by_variables_is_refused(monkeypatch):
    monkeypatch.setenv("LAYERZERO_PREFER", "torch")
    monkeypatch.setenv("LAYERZERO_AVOID", "torch")
    with pytest.raises(ConfigError, match="'torch' stands in the variables for both preference and avoidance"):
        policy.current()


def test_an_unknown_variable_is_an_event_once_and_ours_of_elsewhere_are_none(monkeypatch):
    monkeypatch.setenv("LAYERZERO_DETERMINISTICK", "1")
    monkeypatch.setenv("LAYERZERO_DUMP", "/nowhere")
    with events.collect() as happened:
        policy.current()
        policy.refresh()
        monkeypatch.setenv("LAYERZERO_VERBOSE", "1")
        policy.current()
    assert [event.code for event in happened] == ["CONFIG_INVALID"]
    assert happened[0].message.startswith(
        "no environment variable LAYERZERO_DETERMINISTICK (did you mean 'LAYERZERO_DETERMINISTIC'?); valid are LAYERZERO_AVOID,"
    )


def test_a_changed_variable_is_noticed_and_a_foreign_one_changes_nothing(monkeypatch):
    first = policy.current()
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert policy.current() is first
    monkeypatch.setenv("LAYERZERO_DETERMINISTIC", "1")
    second, version = policy.current(), policy.version()
    assert second.settings.deterministic
    assert policy.current() is second
    monkeypatch.delenv("LAYERZERO_DETERMINISTIC")
    assert policy.version() == version, "the cheap question does not look"
    policy.refresh()
    assert policy.version() != version
    assert not policy.current().settings.deterministic


def test_what_code_said_stays_when_the_environment_changes(monkeypatch):
    lz.configure(strict_mode=True)
    monkeypatch.setenv("LAYERZERO_DETERMINISTIC", "1")
    assert policy.current().settings.strict_mode
    policy.refresh()
    assert policy.current().settings.strict_mode


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_users_own_file_is_read_and_the_variable_names_another(tmp_path, monkeypatch):
    own = file(tmp_path, "memory_headroom_mb: 1", "user/layerzero.yaml")
    assert policy.current().settings.memory_headroom_mb == 1
    assert policy.current().file == str(own)
    other = file(tmp_path, "memory_headroom_mb: 2", "other.yaml")
    monkeypatch.setenv("LAYERZERO_CONFIG", str(other))
    assert policy.current().settings.memory_headroom_mb == 2
    assert policy.current().to_dict()["settings"]["memory_headroom_mb"] == {"value": 2, "origin": str(other)}
    asked = file(tmp_path, "memory_headroom_mb: 3", "asked.yaml")
    lz.load_config(asked)
    assert policy.current().settings.memory_headroom_mb == 3
    monkeypatch.setenv("LAYERZERO_CONFIG", str(own))
    assert policy.current().settings.memory_headroom_mb == 3
    lz.load_config()
    assert policy.current().settings.memory_headroom_mb == 1
    monkeypatch.setenv("LAYERZERO_CONFIG", "/dev/null")
    assert policy.current().settings == Settings()


def test_a_file_in_the_working_directory_is_nobodys(tmp_path, monkeypatch):
    file(tmp_path, "enabled: false")
    monkeypatch.chdir(tmp_path)
    assert policy.current().settings.enabled


def test_a_broken_file_of_the_user_is_an_event_and_defaults_hold(tmp_path):
    own = file(tmp_path, "enabled: maybe", "user/layerzero.yaml")
    with events.collect() as happened:
        assert policy.current().settings == Settings()
        policy.current()
    assert [event.code for event in happened] == ["CONFIG_INVALID"]
    assert f"reading {own}, line 1: enabled: expected bool, received str 'maybe'" in happened[0].message
    assert policy.current().file is None


def test_a_broken_file_that_was_asked_for_is_an_error_and_what_held_before_holds(tmp_path, monkeypatch):
    lz.load_config(file(tmp_path, "deterministic: true", "good.yaml"))
    broken = file(tmp_path, "enabeld: true", "broken.yaml")
    with pytest.raises(ConfigError, match="did you mean 'enabled'"):
        lz.load_config(broken)
    assert policy.current().settings.deterministic
    policy.reset()
    monkeypatch.setenv("LAYERZERO_CONFIG", str(broken))
    for _ in range(2):
        with pytest.raises(ConfigError, match="did you mean 'enabled'"):
            policy.current()
    with pytest.raises(ConfigError, match="did you mean 'enabled'"):
        lz.configure(enabled=True)
    monkeypatch.setenv("LAYERZERO_CONFIG", str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match="No such file"):
        policy.current()


def test_a_changed_file_is_read_again_when_asked(tmp_path, monkeypatch):
    path = file(tmp_path, "deterministic: true")
    monkeypatch.chdir(tmp_path)
    lz.load_config("layerzero.yaml")
    path.write_text("deterministic: false")
    monkeypatch.chdir("/")
    assert policy.current().settings.deterministic
    policy.refresh()
    assert not policy.current().settings.deterministic


# ---- context managers, threads and tasks -----------------------------------------------------------------------------


def test_context_managers_nest_and_the_inner_one_is_stronger():
    with lz.avoid("torch"):
        with lz.prefer("torch.sdpa"):
            assert resolved_policy().preference("torch.sdpa") == (0, "lz.prefer()")
            with lz.disabled():
                assert not policy.current().settings.enabled
            assert policy.current().settings.enabled
        assert resolved_policy().avoided("torch.sdpa") == "lz.avoid()"
    assert resolved_policy() == ResolvedPolicy()


def test_a_context_manager_ends_by_an_exception_too():
    with pytest.raises(KeyError), lz.lock("attention", "torch.sdpa"), lz.prefer("lz"), lz.disabled():
        raise KeyError
    assert resolved_policy() == ResolvedPolicy()
    assert policy.current().settings.enabled


def test_a_lock_as_context_manager_gives_back_the_lock_that_it_replaced():
    lz.lock("attention", "torch.sdpa")
    with lz.lock("attention", "lz.blocked"):
        assert resolved_policy().lock == "lz.blocked"
    assert resolved_policy().lock == "torch.sdpa"
    held = lz.lock("attention", "xformers")
    lz.unlock("attention")
    with held:
        assert resolved_policy().lock == "xformers"
    assert resolved_policy().lock is None


def test_a_plain_call_holds_without_a_with_statement():
    lz.prefer("torch.sdpa")
    lz.avoid("lz")
    assert resolved_policy().preference("torch.sdpa") is not None
    assert resolved_policy().avoided("lz.blocked") == "lz.avoid()"
    lz.disabled()
    assert policy.current().settings.enabled, "only entering it disables"


def test_an_override_can_be_entered_again_and_left_in_any_order():
    first, second = lz.prefer("torch.sdpa"), lz.disabled()
    for _ in range(2):
        with first, first:
            assert resolved_policy().preference("torch.sdpa") is not None
        assert resolved_policy() == ResolvedPolicy()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert resolved_policy() == ResolvedPolicy()
    assert not policy.current().settings.enabled
    second.__exit__()
    second.__exit__()
    assert policy.current().settings.enabled


def test_entering_the_same_again_gives_the_version_again():
    policy.current()
    outside = policy.version()
    seen = set()
    for _ in range(3):
        with lz.prefer("torch.sdpa"):
            seen.add(policy.version())
            inside = policy.current()
        assert policy.version() == outside
    assert len(seen) == 1
    assert outside not in seen
    with lz.prefer("torch.sdpa"):
        assert policy.current() is inside


def test_a_context_manager_is_for_its_thread_alone():
    entered, asked = threading.Event(), threading.Event()
    found = {}

    def inside():
        with lz.prefer("torch.sdpa"), lz.disabled(), lz.lock("attention", "lz.blocked"):
            entered.set()
            asked.wait(10)
            found["inside"] = resolved_policy()

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(10)
    found["outside"] = resolved_policy()
    assert policy.current().settings.enabled
    asked.set()
    thread.join()
    assert found["outside"] == ResolvedPolicy()
    assert found["inside"].lock == "lz.blocked"
    assert found["inside"].preference("torch.sdpa") is not None
    assert resolved_policy() == ResolvedPolicy()


def test_a_context_manager_is_for_its_task_alone():
    async def one(kernel):
        with lz.lock("attention", kernel), lz.prefer(kernel):
            for _ in range(5):
                await asyncio.sleep(0)
                assert (resolved_policy().lock, resolved_policy().prefer[0][0]) == (kernel, kernel)

    async def all_of_them():
        await asyncio.gather(*(one(kernel) for kernel in KERNELS[1:]))

    asyncio.run(all_of_them())
    assert resolved_policy() == ResolvedPolicy()


def test_a_task_starts_with_what_holds_where_it_is_made():
    async def child():
        return resolved_policy().preference("lz.blocked")

    async def parent():
        with lz.prefer("lz"):
            task = asyncio.create_task(child())
        return await task, resolved_policy().preference("lz.blocked")

    assert asyncio.run(parent()) == ((0, "lz.prefer()"), None)


def test_a_lock_by_a_plain_call_and_configuration_hold_in_every_thread():
    lz.lock("attention", "torch.sdpa")
    lz.configure(deterministic=True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (resolved_policy().lock, policy.current().settings.deterministic)).result() == (
            "torch.sdpa",
            True,
        )


def test_nothing_is_lost_where_many_threads_configure_at_once():
    names = [
        "deterministic",
        "strict_mode",
        "log_selections",
        "fallback_enabled",
    ]
    start, faults = threading.Barrier(len(names) + 1), []

    def change(name):
        start.wait()
        for step in range(60):
            lz.configure(**{name: bool(step % 2)})
            if getattr(policy.current().settings, name) is not bool(step % 2):
                faults.append((name, step))

    def lock_and_unlock():
        start.wait()
        for _ in range(60):
            with lz.lock("attention", "torch.sdpa"):
                if resolved_policy().lock != "torch.sdpa":
                    faults.append("lock")

    threads = [threading.Thread(target=change, args=(name,)) for name in names] + [
        threading.Thread(target=lock_and_unlock)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert all(getattr(policy.current().settings, name) for name in names)
    assert resolved_policy() == ResolvedPolicy()


# ---- digest and report -----------------------------------------------------------------------------------------------

CHANGES = {
    "enabled": False,
    "fallback_enabled": False,
    "log_selections": True,
    "deterministic": True,
    "strict_mode": True,
    "memory_headroom_mb": 5,
    "max_reports": 5,
    "perfdb.enabled": False,
    "perfdb.path": "/elsewhere.sqlite",
    "perfdb.auto_tune": True,
    "perfdb.tune_samples": 3,
    "cache.enabled": False,
    "cache.max_size": 3,
    "cache.ttl_seconds": 3.0,
    "ranks.selection": "alone",
    "ranks.timeout_s": 3.0,
    "ranks.lease_s": 3.0,
    "ranks.versions": "refuse",
}
ONE_VALUE = {"debug"}  # nothing else can be configured


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_the_digest_exactly_if_it_can_change_a_decision(name):
    before = policy.current().digest
    group, _, leaf = name.rpartition(".")
    lz.configure(**({group: {leaf: CHANGES[name]}} if group else {leaf: CHANGES[name]}))
    assert policy.current().settings.flat()[name] == CHANGES[name]
    assert (policy.current().digest == before) is (name in WITHOUT_EFFECT_ON_DECISIONS)


def test_the_digest_is_tested_for_every_setting():
    assert set(CHANGES) | ONE_VALUE == set(Settings().flat())
    assert set(Settings().flat()) >= WITHOUT_EFFECT_ON_DECISIONS


SAID: list[dict[str, object]] = [
    {},
    {"prefer_sources": ["torch"]},
    {"avoid_sources": ["torch"]},
    {"prefer_sources": ["torch", "lz"]},
    {"prefer_sources": ["lz", "torch"]},
    {"locks": {"attention": "torch.sdpa"}},
    {"locks": {"attention": "lz.blocked"}},
    {"locks": {"attention.causal": "torch.sdpa"}},
    {"rules": [{"match": {"sm": ">=90"}, "prefer": "torch"}]},
    {"rules": [{"match": {"sm": ">=91"}, "prefer": "torch"}]},
    {"rules": [{"match": {"head_dim": ">=90"}, "prefer": "torch"}]},
    {"rules": [{"match": {"sm": ">=90"}, "forbid": "torch"}]},
    {"rules": [{"match": {"sm": ">=90", "operation": "attention"}, "lock": "torch.sdpa"}]},
]


def test_whatever_is_said_of_kernels_has_a_digest_of_its_own():
    digests = set()
    for said in SAID:
        policy.reset()
        lz.configure(**said)
        digests.add(policy.current().digest)
    assert len(digests) == len(SAID)


def test_the_digest_asks_which_of_two_is_stronger(tmp_path):
    lz.load_config(file(tmp_path, "avoid_sources: [torch]"))
    with lz.prefer("torch"):
        one = policy.current().digest
    lz.load_config(file(tmp_path, "prefer_sources: [torch]"))
    with lz.avoid("torch"):
        assert policy.current().digest != one


def test_the_digest_does_not_ask_who_said_it_nor_how_it_is_spelled(tmp_path, monkeypatch):
    digests = set()
    lz.configure(prefer_sources=["torch"], deterministic=True)
    digests.add(policy.current().digest)
    policy.reset()
    lz.load_config(file(tmp_path, "deterministic: yes\nprefer_sources:\n- torch\nversion: 1\n"))
    digests.add(policy.current().digest)
    policy.reset()
    monkeypatch.setenv("LAYERZERO_PREFER", "torch")
    monkeypatch.setenv("LAYERZERO_DETERMINISTIC", "on")
    digests.add(policy.current().digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"match": {"sm": ">89"}, "prefer": "lz"}, {"match": {"sm": ">= 90"}, "prefer": ["lz"]}),
        ({"match": {"sm": [80, 90]}, "prefer": "lz"}, {"match": {"sm": ["==90", "80..80"]}, "prefer": "lz"}),
        (
            {"match": {"sm": 90, "head_dim": 64}, "avoid": "lz"},
            {"match": {"head_dim": "64", "sm": "90"}, "avoid_sources": ["lz"]},
        ),
    ],
)
def test_rules_that_mean_the_same_have_one_digest(one, other):
    lz.configure(rules=[one])
    digest = policy.current().digest
    lz.configure(rules=[other])
    assert policy.current().digest == digest


def test_a_digest_is_the_same_in_another_process():
    lz.configure(deterministic=True, memory_headroom_mb=7)
    code = "from lz_compile.runtime.policy import policy as p; p.configure(memory_headroom_mb=7, deterministic=True); print(p.current().digest)"
    given = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "XDG_CONFIG_HOME": "/nowhere",
    }
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == policy.current().digest


def test_a_policy_as_json_names_every_value_with_its_origin(tmp_path, monkeypatch):
    path = file(
        tmp_path,
        "strict_mode: true\nlocks: {attention: lz.blocked}\nrules: [{match: {sm: '>=90'}, forbid: torch.flex}]",
    )
    lz.load_config(path)
    lz.configure(deterministic=True, avoid_sources=["xformers"])
    monkeypatch.setenv("LAYERZERO_PREFER", "torch")
    found = policy.current().to_dict()
    assert json.loads(json.dumps(found)) == found
    assert set(found["settings"]) == set(Settings().flat())
    assert found["settings"]["strict_mode"] == {"value": True, "origin": str(path)}
    assert found["settings"]["deterministic"] == {"value": True, "origin": "lz.configure()"}
    assert found["file"] == str(path)
    assert found["locks"] == [{"operation": "attention", "kernel": "lz.blocked", "origin": str(path)}]
    assert found["prefer"] == [{"name": "torch", "origin": "environment LAYERZERO_PREFER"}]
    assert found["avoid"] == [{"name": "xformers", "origin": "lz.configure()"}]
    assert found["rules"] == [
        {"origin": f"rule 1 of {path}", "match": {"sm": ">=90"}, "lock": None, "statements": [["forbid", "torch.flex"]]}
    ]
    assert found["digest"] == policy.current().digest


def test_every_change_gives_another_version_and_reset_forgets_all(tmp_path):
    versions = [policy.version()]
    for change in (
        policy.refresh,
        lambda: lz.configure(deterministic=True),
        lambda: lz.lock("attention", "torch.sdpa"),
        lambda: lz.unlock("attention"),
        lambda: lz.load_config(file(tmp_path, "strict_mode: true")),
        lambda: lz.prefer("lz"),
        policy.reset,
    ):
        change()
        versions.append(policy.version())
    assert len(set(versions)) == len(versions)
    assert policy.current().settings == Settings()
    assert resolved_policy() == ResolvedPolicy()


def test_importing_the_policy_imports_no_parser():
    code = """
        import sys, torch
        parsers = {"yaml", "msgspec", "sqlite3"}
        before = parsers & sys.modules.keys()
        import lz_compile.runtime.policy.policy as policy
        policy.current()
        assert parsers & sys.modules.keys() == before
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    given = {**plain, "PYTHONPATH": str(Path(__file__).parent.parent), "XDG_CONFIG_HOME": "/nowhere"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=given, check=True)
