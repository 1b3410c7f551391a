"""Optional libraries are imported in another process first: real shared objects that abort, hang, and lack a symbol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lz_compile.ground import events
from lz_compile.ground.store import Store
from lz_compile.runtime.kernels import first_import, import_trial, libraries, registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.libraries import LazyFunction
from lz_compile.tools import diagnosis, installation
from lz_compile.tools.command_line import main

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = """
#include <Python.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
extern int symbol_of_another_version(void);
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "%(name)s", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_%(name)s(void) { %(body)s return PyModule_Create(&module); }
"""
ABORTS = 'fprintf(stderr, "built for another ABI\\n"); abort();'
HANGS = "for (;;) pause();"
LACKS = "symbol_of_another_version();"


@pytest.fixture
def built(tmp_path, monkeypatch) -> Callable[[str, str], LazyFunction]:
    """Builds an extension module of that name, whose initialisation does something else than usual."""
    if COMPILER is None or not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        pytest.skip("needs a C compiler and Python's headers")
    monkeypatch.syspath_prepend(tmp_path)
    libraries.forget()

    def build(name: str, body: str) -> LazyFunction:
        source = tmp_path / f"{name}.c"
        source.write_text(SOURCE % {"name": name, "body": body})
        path = tmp_path / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = f"-I{sysconfig.get_paths()['include']}"
        subprocess.run([COMPILER, "-shared", "-fPIC", include, str(source), "-o", str(path)], check=True, timeout=60)
        return LazyFunction(name, "__name__", name)

    yield build
    libraries.forget()


def test_a_library_that_aborts_when_it_is_imported_is_refused_and_the_process_goes_on(built):
    function = built("lz_test_aborts", ABORTS)
    with events.collect() as happened:
        reasons = [libraries.load(function, waits=True), libraries.load(function)]
    assert [event.code for event in happened] == ["BACKEND_IMPORT_FAILED"]
    assert reasons[0] is reasons[1]
    assert "ends its process" in reasons[0].message
    assert "SIGABRT" in reasons[0].message
    assert "built for another ABI" in reasons[0].message
    assert "doctor --fix" in reasons[0].message
    assert "lz_test_aborts" not in sys.modules


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr(import_trial, "COPY_S", 0.5)
    monkeypatch.setattr(import_trial, "NEW_S", 0.5)
    monkeypatch.setattr(first_import, "PATIENCE_S", 0.2)
    monkeypatch.setattr(first_import, "_waited", {})


def test_a_library_that_hangs_is_stopped_and_refused(built, short_limits):
    reason = libraries.load(built("lz_test_hangs", HANGS), waits=True)
    assert "importing lz_test_hangs hangs" in reason.message
    assert "it was not imported within 0.5 s" in reason.message
    told = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "lz_test_hangs" not in told, "no process is left behind"


def test_nobody_waits_long_for_a_library_and_what_came_of_it_holds_later(built, short_limits, monkeypatch):
    function = built("lz_test_slow", HANGS)
    decided = registry.version()
    with events.collect() as happened:
        reasons = [libraries.load(function), libraries.load(function)]
    assert [event.code for event in happened] == ["BACKEND_NOT_TRIED_YET"]
    assert "its first import goes on in a process of its own" in reasons[0].message
    assert libraries.import_failure(function) is None, "it may come"
    waits = [first_import._waited["lz_test_slow"]]
    assert waits[0] < 30, "a bound for busy machines; it is the patience, once"
    assert registry.version() == decided
    assert libraries.try_first(function).outcome == "hangs"
    assert registry.version() == decided + 1, "what was decided without it is decided anew"
    assert "importing lz_test_slow hangs" in libraries.load(function).message


def test_a_later_process_does_not_wait_for_what_an_earlier_one_has_waited_for(built, short_limits, monkeypatch):
    function = built("lz_test_interrupted", HANGS)
    assert libraries.load(function).code == "BACKEND_NOT_TRIED_YET"
    (running,) = first_import._running.values()
    running._trial.stop()  # as this process's end does
    running._trial.wait(None)
    monkeypatch.setattr(first_import, "_running", {})
    monkeypatch.setattr(first_import, "_waited", {})
    given = []
    monkeypatch.setattr(import_trial.ImportTrial, "wait", lambda _, limit_s: given.append(limit_s))
    assert libraries.load(function).code == "BACKEND_NOT_TRIED_YET"
    assert given == [0.0]
    (running,) = first_import._running.values()
    running._trial.stop()


def test_a_process_that_ends_leaves_no_trial_behind_and_no_answer(tmp_path):
    (tmp_path / "lz_test_left.py").write_text("import time\ntime.sleep(600)\n")
    code = (
        "from lz_compile.runtime.kernels import first_import, libraries\n"
        "print(libraries.load(libraries.LazyFunction('lz_test_left', 'x', 'lz_test_left')).code)\n"
        "print(first_import._running['lz_test_left']._trial._copy._pid)\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "LAYERZERO_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    reason, pid = told.stdout.split()
    assert reason == "BACKEND_NOT_TRIED_YET"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    (kept,) = (json.loads(path.read_text()) for path in tmp_path.glob("libraries/*/*.json"))
    assert kept["outcome"] == "is being tried"


def test_a_library_that_lacks_a_symbol_is_refused_with_the_name_of_it(built):
    function = built("lz_test_lacks", LACKS)
    reason = libraries.load(function)
    assert reason.code == "BACKEND_IMPORT_FAILED"
    assert "symbol_of_another_version" in reason.message
    assert libraries.try_first(function).outcome == "raises"


def test_a_library_that_is_well_is_imported_and_tried_once(built, monkeypatch):
    function = built("lz_test_well", "")
    assert libraries.load(function) is None
    assert "lz_test_well" in sys.modules
    del sys.modules["lz_test_well"]
    monkeypatch.setattr(first_import, "_Running", lambda *_: pytest.fail("it was tried before"))
    trial = libraries.try_first(function)
    assert (trial.outcome, trial.library) == ("imports", "lz_test_well")
    assert trial.seconds < 5


def test_what_ended_a_process_is_remembered_until_its_files_are_others(built, monkeypatch):
    function = built("lz_test_mended", ABORTS)
    assert libraries.load(function, waits=True) is not None
    libraries.forget()
    with monkeypatch.context() as patch:
        patch.setattr(first_import, "_Running", lambda *_: pytest.fail("it was tried before"))
        assert libraries.load(function) is not None
    libraries.forget()
    built("lz_test_mended", "")
    assert libraries.load(function) is None


def test_what_raised_is_tried_here_again_for_what_it_lacks_may_have_come(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lz_test_needy.py").write_text("import lz_test_needed\nfunction = lz_test_needed.function\n")
    function = LazyFunction("lz_test_needy", "function", "lz_test_needy")
    assert "lz_test_needed" in libraries.load(function).message
    (tmp_path / "lz_test_needed.py").write_text("def function(): ...\n")
    libraries.forget()
    assert libraries.load(function) is None


def test_a_library_that_exits_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lz_test_exits.py").write_text("import os\nos._exit(7)\n")
    reason = libraries.load(LazyFunction("lz_test_exits", "x", "lz_test_exits"), waits=True)
    assert "ended its process with code 7" in reason.message
    libraries.forget()


def test_what_this_process_has_imported_or_brought_is_not_tried(monkeypatch):
    monkeypatch.setattr(first_import, "tried", lambda *_, **__: pytest.fail("no trial is needed"))
    assert libraries.try_first(LazyFunction("lz_compile.lowering.kernels.attention.torch_sdpa", "attention")) is None
    assert libraries.try_first(LazyFunction("json", "loads", "json")) is None


def test_a_copy_that_fails_where_a_new_process_does_not_is_no_verdict(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = f"import os\nif os.getppid() == {os.getpid()} and 'pytest' in __import__('sys').modules: os.abort()\nx = 1\n"
    (tmp_path / "lz_test_threads.py").write_text(code)
    trial = libraries.try_first(LazyFunction("lz_test_threads", "x", "lz_test_threads"))
    assert trial.outcome == "imports"


def test_a_trial_costs_less_than_a_second_and_answers_are_plain_json(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lz_test_quick.py").write_text("x = 1\n")
    start = time.perf_counter()
    trial = libraries.try_first(LazyFunction("lz_test_quick", "x", "lz_test_quick"))
    assert time.perf_counter() - start < 30, "a bound for busy machines; usually some hundredths"
    kept = [json.loads(path.read_text()) for path in Store("libraries").directory.glob("*.json")]
    assert trial.to_dict() in kept


def test_a_plugin_that_aborts_is_an_event(tmp_path, monkeypatch):
    from importlib import metadata

    from lz_compile.runtime.kernels import registry

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lz_test_plugin.py").write_text("import os\nos.abort()\n")
    entry = metadata.EntryPoint("bad", "lz_test_plugin:register", registry.GROUP)
    libraries.try_first(LazyFunction("lz_test_plugin", "register"))  # which waits; a plugin that takes long comes later
    with pytest.raises(ImportError, match=r"importing it ends its process.*SIGABRT"):
        registry.Plugin(entry).run(sys.modules[__name__])


# ---- the matrix ----------------------------------------------------------------------------------------------------


@pytest.fixture
def aborting_kernel(tmp_path, monkeypatch):
    """A kernel of an installed distribution whose module aborts."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lz_test_broken_wheel.py").write_text("import os\nos.abort()\n")
    spec = KernelSpec(
        kernel_id="test.broken_wheel",
        operation="norm",
        source="test",
        platforms=frozenset({"cpu"}),
        dtypes=frozenset({"*"}),
        requires_layouts=frozenset({"*"}),
        implementation=LazyFunction("lz_test_broken_wheel", "norm", "lz_test_broken_wheel"),
        package="pytest",
        backend_version=">=8",
    )
    registry.register(spec)
    yield spec
    registry.unregister_kernel(spec.kernel_id)
    libraries.forget()


def test_doctor_tells_what_was_tried_and_how_to_mend_it(aborting_kernel, capsys):
    (library,) = [each for each in installation.installed_libraries() if each.package == "pytest"]
    assert (library.outcome, library.kernels) == ("ends its process", ("test.broken_wheel",))
    assert main(["doctor", "--fix"]) == 0
    told = capsys.readouterr().out.splitlines()
    line = next(each for each in told if "--no-binary pytest" in each)
    assert line.startswith(f"{sys.executable} -m pip install --force-reinstall")
    assert line.endswith("'pytest>=8'")
    assert aborting_kernel.load(waits=True).code == "BACKEND_IMPORT_FAILED"


def test_what_an_import_lacks_is_installed_by_the_librarys_own_requirements():
    library = installation.Library(
        "xgrammar", "m", "1", ">=1,<2", "2", "3", "raises", "No module named 'tvm_ffi'", 0.1, ()
    )
    (issue,) = diagnosis.about_libraries([library])
    assert (issue.code, issue.fix.partition(" -m ")[2]) == ("LIBRARY_RAISES", "pip install 'xgrammar>=1,<2'")


def test_the_page_of_compatibility_is_what_was_tried(tmp_path):
    told = {
        "software": {"torch": "2.99", "python": "3.11"},
        "hardware": [{"device": "cpu", "device_name": "Some CPU", "signature": "cpu_avx2"}],
        "libraries": [
            installation.Library(
                "some-lib", "a.b", "1.0", ">=1", "2.99", "3.11", "hangs", "a | b", 20.0, ("k",)
            ).to_dict()
        ],
    }
    (tmp_path / "2.99.json").write_text(json.dumps(told))
    (tmp_path / "2.99.smoke").write_text("passed\n")
    script = Path(__file__).resolve().parent.parent / "scripts" / "compatibility.py"
    command = [sys.executable, str(script), str(tmp_path / "page.md")]
    subprocess.run([*command, str(tmp_path)], check=True)
    page = (tmp_path / "page.md").read_text()
    assert "Smoke set (`scripts/smoke.py`): passed." in page
    assert "| some-lib | 1.0 | >=1 | a.b | hangs | a \\| b | 20.0 |" in page
    empty = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert (empty.returncode, "Run scripts/versions.sh" in empty.stderr) == (1, True)
