"""Options: ours are split from Inductor's, and a wrong one is an error that says what would be right."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from lz_compile import reports
from lz_compile.backend import layerzero
from lz_compile.compile.options import Options, split
from lz_compile.errors import LayerZeroError, OptionError, RewriteFailedError, UnknownKernelError, nearest

pytestmark = pytest.mark.usefixtures("no_code_generation")


@pytest.fixture(autouse=True)
def _no_dump_directory(monkeypatch):
    monkeypatch.delenv("LAYERZERO_DUMP", raising=False)


@pytest.mark.parametrize("nothing", [None, {}])
def test_without_options_everything_has_its_default(nothing):
    assert split(nothing) == (Options(strict=False, dump=None, lock={}), {})


def test_ours_are_taken_and_the_rest_is_inductors_unchanged():
    given = {"layerzero.strict": True, "max_autotune": True, "triton.cudagraphs": False, "layerzero.dump": "graphs"}
    ours, rest = split(given)
    assert ours == Options(strict=True, dump="graphs")
    assert rest == {"max_autotune": True, "triton.cudagraphs": False}
    assert set(given) == {"layerzero.strict", "max_autotune", "triton.cudagraphs", "layerzero.dump"}


def test_an_option_without_our_prefix_is_inductors_and_told_where_only_we_have_one_of_that_name():
    assert split({"max_autotune": True}) == (Options(), {"max_autotune": True})
    with pytest.raises(OptionError, match=r"no option 'lock' of Inductor \(did you mean 'layerzero.lock'\?\)"):
        split({"lock": {"attention": "torch.sdpa"}})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("strickt", " (did you mean 'layerzero.strict'?)"),
        ("lcok", " (did you mean 'layerzero.lock'?)"),
        ("Dump", " (did you mean 'layerzero.dump'?)"),
        ("nothing_like_it", ""),
        ("", ""),
        ("strict.strict", " (did you mean 'layerzero.strict'?)"),
    ],
)
def test_an_unknown_name_gives_the_nearest_or_all_valid_ones(name, hint):
    with pytest.raises(OptionError) as failure:
        split({f"layerzero.{name}": True})
    valid = f"; valid are {', '.join(f'layerzero.{field.name}' for field in fields(Options))}"
    assert str(failure.value) == f"reading options: no option 'layerzero.{name}'{hint or valid}"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("strict", 1, "'layerzero.strict' takes True or False, not int 1"),
        ("strict", "yes", "'layerzero.strict' takes True or False, not str 'yes'"),
        ("strict", None, "'layerzero.strict' takes True or False, not NoneType None"),
        ("tune_budget_s", True, "'layerzero.tune_budget_s' takes int or float, not bool True"),
        ("tune_budget_s", -1, "'layerzero.tune_budget_s' is at least 0, not -1"),
        ("tune_budget_s", math.nan, "'layerzero.tune_budget_s' takes int or float, not float nan"),
        ("dump", 3, "'layerzero.dump' takes str or PathLike, not int 3"),
        ("dump", True, "'layerzero.dump' takes str or PathLike, not bool True"),
        (
            "lock",
            "torch.sdpa",
            "'layerzero.lock' takes kernels by op, as {'attention': 'torch.sdpa'}, not str 'torch.sdpa'",
        ),
        (
            "lock",
            ["attention"],
            "'layerzero.lock' takes kernels by op, as {'attention': 'torch.sdpa'}, not list ['attention']",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name, value, text):
    with pytest.raises(OptionError) as failure:
        split({f"layerzero.{name}": value})
    assert str(failure.value) == f"reading options: {text}"


def test_a_lock_on_an_unknown_op_names_the_ops():
    with pytest.raises(OptionError) as failure:
        split({"layerzero.lock": {"atention": "torch.sdpa"}})
    assert str(failure.value) == "reading options: no op 'atention' to lock (did you mean 'attention'?)"


@pytest.mark.parametrize("kernel", [None, 3, ["torch.sdpa"]])
def test_a_lock_on_something_that_is_no_name_is_refused(kernel):
    with pytest.raises(OptionError):
        split({"layerzero.lock": {"attention": kernel}})


def test_a_path_is_a_directory_as_well_as_a_string(tmp_path):
    assert split({"layerzero.dump": Path("x")})[0].dump == Path("x")
    torch.compile(torch.sin, backend=layerzero, options={"layerzero.dump": tmp_path / "new"})(torch.randn(3))
    assert sorted(path.suffix for path in (tmp_path / "new").iterdir()) == [".diff", ".html", ".json", ".py", ".py"]


def test_the_environment_names_the_directory_only_where_the_options_do_not(monkeypatch):
    monkeypatch.setenv("LAYERZERO_DUMP", "from_environment")
    assert split(None)[0].dump == "from_environment"
    assert split({"layerzero.dump": "from_options"})[0].dump == "from_options"


def test_an_empty_directory_name_in_the_environment_is_none(monkeypatch):
    monkeypatch.setenv("LAYERZERO_DUMP", "")
    assert not split(None)[0].dump


def test_options_hold_for_the_function_that_was_compiled_with_them():
    def attention(query, key, value):
        return (query @ key.mT).softmax(-1) @ value

    args = [torch.randn(2, 3, length, 8) for length in (5, 17, 17)]
    for kernel in ("inductor", "torch.sdpa"):
        torch._dynamo.reset()
        locked = torch.compile(attention, backend=layerzero, options={"layerzero.lock": {"attention": kernel}})
        torch.testing.assert_close(locked(*args), attention(*args))
    assert [report.matches[0].kernel for report in reports()] == ["inductor", "torch.sdpa"]


def test_the_nearest_name_is_offered_only_where_one_is_near():
    assert nearest("attenton", ["attention", "rms_norm"]) == " (did you mean 'attention'?)"
    assert nearest("rope", ["attention", "rms_norm"]) == ""
    assert nearest("rope", []) == ""


def test_every_error_has_the_common_base_and_wrong_values_are_value_errors():
    assert issubclass(OptionError, (LayerZeroError, ValueError))
    assert issubclass(OptionError, ValueError)
    assert issubclass(UnknownKernelError, ValueError)
    assert issubclass(RewriteFailedError, LayerZeroError)
    unknown = UnknownKernelError("attention", "torch.spda", ["torch.sdpa", "inductor"])
    assert str(unknown) == (
        "locking attention: no kernel 'torch.spda' (did you mean 'torch.sdpa'?); valid are inductor, torch.sdpa"
    )
