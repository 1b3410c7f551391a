"""Every test starts from a clean Dynamo, an empty report and a cache of the session's own."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

# Before torch and lz_compile are imported: both read these once.
CACHE = tempfile.mkdtemp(prefix="lz_compile_tests_")
os.environ["LAYERZERO_CACHE_DIR"] = CACHE
os.environ["XDG_CONFIG_HOME"] = CACHE  # a developer's own layerzero.yaml must not steer the tests
# Some thirty processes are started by tests, and each would compile the package anew where nothing may be kept of that.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors here are small; threads only make tests wait for each other
# With more than one, the C++ kernels of a graph are built as one library. Only Triton's would be compiled by processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
os.environ.setdefault("TORCH_WARM_POOL", "0")
# Hundreds of libraries are linked against PyTorch's, which gold does in less than half of the time that the usual linker takes.
if (gold := shutil.which("ld.gold")) and "COMPILER_PATH" not in os.environ:
    os.environ["COMPILER_PATH"] = tempfile.mkdtemp(dir=CACHE)
    os.symlink(gold, os.path.join(os.environ["COMPILER_PATH"], "ld"))
# Nobody debugs those libraries: without line numbers each is built in a seventh less.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
# oneDNN's bfloat16 products with AMX leak a NaN into the row before it (K = 23): eager must be the same on every machine.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import tiers  # noqa: E402 - keeps the imports of this file together
import torch  # noqa: E402 - reads the variables above
import torch._dynamo.guards  # noqa: E402 - reads the variables above
import torch._dynamo.symbolic_convert  # noqa: E402 - reads the variables above
from hypothesis import settings  # noqa: E402 - keeps the imports of this file together
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - reads the variables above

from lz_compile import clear_reports  # noqa: E402 - reads the variables above
from lz_compile.compile import choices, match_tuning  # noqa: E402 - reads the variables above
from lz_compile.lowering import inductor  # noqa: E402 - reads the variables above
from lz_compile.runtime.choose import select  # noqa: E402 - reads the variables above
from lz_compile.runtime.kernels import registry  # noqa: E402 - reads the variables above
from lz_compile.runtime.kernels.capabilities import Prior  # noqa: E402 - reads the variables above
from lz_compile.runtime.measure import cost  # noqa: E402 - reads the variables above
from lz_compile.runtime.policy import policy  # noqa: E402 - reads the variables above

#: Where tensors are made that name no device. ``cuda`` runs tests on a GPU, those of kernels in Triton's interpreter too.
DEVICE = os.environ.get("LZ_TEST_DEVICE")

if DEVICE is not None:

    class _Generator(torch.Generator):
        """A generator of the device's, as factories ask for."""

        def __new__(cls, device: object = DEVICE) -> torch.Generator:
            return super().__new__(cls, device)

    torch.Generator = _Generator  # type: ignore[misc]

# PyTorch writes structured traces, every graph as text, as soon as this logger has a handler, and pytest gives one to
# loggers that do not propagate.
logging.getLogger("torch.__trace").propagate = True
# Dynamo times the guards of every compile after flushing the processor's caches: a thirtieth of the suite, for a log.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# Nor does it need to split every traced file into tokens, to name functions in another log.
torch._dynamo.symbolic_convert.get_funcname = lambda *_: None
# Nor to tell of each guard and each side effect where in the program it comes from, for two more: a twenty-fifth of tracing.
torch._dynamo.guards.get_verbose_code_part = lambda code_part, _guard: code_part
torch._dynamo.config.side_effect_replay_policy = "silent"


def _read_settings_quickly() -> None:
    """Dynamo reads PyTorch's settings at every instruction: of nearly all, only what was set in their place can change."""
    from torch.utils import _config_module as settings_of

    unset = settings_of._UNSET_SENTINEL
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # settings are kept in another way there
        return

    def quick(entry: Any, default: Any) -> property:
        def read(_: Any) -> Any:
            if entry.hide:
                raise AttributeError  # it is looked up as ever, which says what it is
            value = entry.user_override.get()
            return default if value is unset else value

        return property(read)

    for module in [each for each in sys.modules.values() if isinstance(each, settings_of.ConfigModule)]:
        for name, entry in module._config.items():
            default = entry.default if entry.env_value_default is unset else entry.env_value_default
            depends = entry.alias is not None or entry.justknob is not None or entry.deprecated or "." in name
            if (
                not depends
                and entry.env_value_force is unset
                and isinstance(default, settings_of._IMMUTABLE_CONFIG_TYPES)
            ):
                setattr(type(module), name, quick(entry, default))


_read_settings_quickly()


def _interpret_quickly() -> None:
    """Triton's interpreter looks through all of its language and types at every call of a function: half of its time."""
    from triton import language
    from triton.runtime import interpreter

    @functools.cache
    def members(part: Any) -> list[tuple[str, Any]]:
        return [(name, each) for name, each in inspect.getmembers(part) if language.core.is_builtin(each)]

    def patched(part: Any, *given: Any) -> None:
        for name, each in members(part):
            if getattr(part, name) is not each:  # patched already, by the call that calls this one
                break
            interpreter._patch_attr(part, name, each, *given)

    def numpys(dtype: Any, *, look_up: Callable[[Any], Any] = interpreter._get_np_dtype) -> Any:
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    known: dict[str, Any] = {}
    interpreter._patch_builtin, interpreter._get_np_dtype = patched, numpys


if os.environ.get("TRITON_INTERPRET") == "1":
    _interpret_quickly()


def _keep_nothing_of_symbols() -> None:
    """Of calls with symbolic sizes PyTorch keeps what they gave, and tries that out: a quarter of tracing with symbols.

    The second tier leaves it on.
    """
    kept = FakeTensorMode._cached_dispatch_impl

    def quick(mode: Any, *call: Any) -> object:
        has_symbols = mode.shape_env is not None and mode.shape_env.var_to_range
        return mode._dispatch_impl(*call) if has_symbols else kept(mode, *call)

    FakeTensorMode._cached_dispatch_impl = quick  # type: ignore[method-assign]


if not tiers.IS_THOROUGH:
    _keep_nothing_of_symbols()

# An eighth of the suite's time went into collecting what the imports above made and what lives as long as they.
gc.freeze()
gc.set_threshold(10_000, 20, 50)
torch._dynamo.config.run_gc_after_compile = False

# Without a GPU, every ``torch.manual_seed`` is remembered with its stack trace, in case that one comes.
_seeded = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci")


@pytest.fixture(scope="module", autouse=True)
def _old_objects_rest() -> Iterator[None]:
    """Leave what the tests of a file made and kept out of every later collection; some tests end that for themselves."""
    yield
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """Forget compiled code, reports and what was configured, and make random numbers repeat."""
    torch._dynamo.reset()
    _forget()
    torch.set_default_device(DEVICE)
    _seeded(0)
    yield
    _forget()


def _forget() -> None:
    clear_reports()
    policy.reset()


@pytest.fixture(autouse=True)
def kernels_first(request: pytest.FixtureRequest, clean_compiler: None) -> None:
    """Rewrite whatever can be: at the small sizes of tests, Inductor's own code would be preferred to most kernels.

    A test of choices asks for ``sdpa_first`` or ``no_preference``.
    """
    if not {"sdpa_first", "no_preference"} & set(request.fixturenames):
        policy.prefer("lz.blocked", "torch.sdpa")
        request.getfixturevalue("by_priors")


@pytest.fixture(autouse=True)
def usual_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of tests are those of one machine, whatever runs them."""
    monkeypatch.setattr(cost, "rates", cost.usual)
    monkeypatch.setattr(match_tuning, "little", lambda _: 0.0)


@pytest.fixture
def no_code_generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``backend="layerzero"`` decides, proves and reports as it does; AOTAutograd's graphs run eagerly, no code is made of them.

    Of a file that has it, a test marked ``through_inductor`` has it not.
    """
    if request.node.get_closest_marker("through_inductor"):
        return

    def traced(graph: torch.fx.GraphModule, inputs: Sequence[Any], *_: object, **_named: object) -> Callable[..., Any]:
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # type: ignore[no-any-return]

    monkeypatch.setattr(inductor, "compile_graph", traced)


@pytest.fixture
def one_mode_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """``roll_loops`` proves loops of modules in the mode that these are in, which is half of such a proof."""
    from lz_compile.api.rolling import rolled

    monkeypatch.setattr(rolled._Session, "_try_other_mode", lambda *_: None)


@pytest.fixture
def proofs_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """``roll_loops`` proves what loops give and not their gradients, which are a third of such a proof, and counts as proven."""
    from lz_compile.api.rolling import rolled

    run = rolled._Session._run

    def without_gradients(session: Any, *given: Any, **named: Any) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(session.support, "is_undifferentiated", True)
            return run(session, *given, **named)

    monkeypatch.setattr(rolled._Session, "_run", without_gradients)


@pytest.fixture
def no_preference() -> None:
    """Choose as a program does that configures nothing."""


@pytest.fixture
def by_priors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose by the priors of kernels, which a test sets, as if Inductor fused nothing by itself."""
    monkeypatch.setattr(cost, "parts", lambda *_: None)
    monkeypatch.setattr(choices, "left_as", lambda _: None)


@pytest.fixture
def sdpa_first(monkeypatch: pytest.MonkeyPatch, by_priors: None) -> None:
    """A fixed prior, for tests of what happens around a choice: SDPA before Inductor before everything else."""
    order = {"torch.sdpa": 0.8, "inductor": 1.0}

    def ranked(operation: str) -> dict[str, registry.KernelSpec]:
        found = registry.kernels(operation)
        anywhere = frozenset({"*"})
        return {
            name: replace(spec, prior=(Prior("*", anywhere, order.get(name, 1.5)),)) for name, spec in found.items()
        }

    monkeypatch.setattr(select, "kernels", ranked)


def pytest_sessionstart(session: pytest.Session) -> None:
    """PyTorch traces itself at DEBUG: pages of it before the line that failed.

    ``log_level`` would set the root logger's level for each phase of a test, which makes all loggers forget their levels.
    """
    plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler):
        handler.setLevel(logging.WARNING)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the second tier out, unless it or one case is asked for."""
    if tiers.IS_THOROUGH or any("[" in argument for argument in config.args):
        return
    later = set(tiers.left_out(items))
    config.hook.pytest_deselected(items=[item for item in items if item in later])
    items[:] = [item for item in items if item not in later]


def pytest_collection_finish() -> None:
    """Leave what the test files imported out of every later collection: Transformers and Inductor are half of all objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Remove the session's cache."""
    shutil.rmtree(CACHE, ignore_errors=True)
