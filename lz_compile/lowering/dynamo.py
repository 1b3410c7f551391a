"""What the backend asks of Dynamo, and of Inductor's caches, without importing Inductor. Checked with torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._guards import ChainedSource, CompileContext, Source, TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, CppWrapperCodeCache, get_path
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler._cache import CacheArtifactManager

#: Whose functions and classes nobody replaces: what rolled loops call, ours and PyTorch's.
_FIXED = ("lz_compile.api.rolling.", "torch._higher_order_ops.", "torch.utils._pytree")


def drop_fixed_guards() -> None:
    """Take guards away that ask in every call whether the functions of rolled loops are the same as ever.

    They are two thirds of such a graph's guards, 12 of 60 us in a call of 64 steps. Dynamo asks nothing of Python's own
    modules, either.
    """
    context = TracingContext.try_get()
    if context is not None:
        guards = context.guards_context.dynamo_guards
        for guard in [each for each in guards.inner if _is_fixed(each.originating_source)]:
            guards.inner.discard(guard)


def _is_fixed(source: Source) -> bool:
    while isinstance(source, ChainedSource):
        source = source.base
        if isinstance(source, AttrSource) and source.member == "SUPPORTED_NODES":
            return True  # an entry of PyTorch's table of containers; whether it has one is asked for
    name = source.global_name if isinstance(source, GlobalSource) else ""
    return f"{name.removeprefix('__import_').replace('_dot_', '.')}.".startswith(_FIXED)


def cache_root() -> Path:
    """The directory that Inductor keeps what it builds in."""
    return Path(cache_dir())


def built_libraries() -> list[Path]:
    """The C++ libraries of this process, generated code and ours."""
    root = cache_root()
    keys = {key for kind in (CppCodeCache, CppPythonBindingsCodeCache, CppWrapperCodeCache) for key in kind.cache}
    return sorted(path for key in keys for path in root.glob(f"{key[1:3]}/{key}*.so"))


def is_recompile() -> bool:
    """Whether the function that is being compiled was compiled before, for other sizes or values."""
    compile_id = CompileContext.current_compile_id()
    return compile_id is not None and bool(compile_id.frame_compile_id)


def compiles_backward() -> bool:
    """Whether Dynamo traces backward passes, too (compiled autograd)."""
    return bool(dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def count(name: str, amount: int = 1) -> None:
    """Add to ``torch._dynamo.utils.counters["layerzero"]``."""
    counters["layerzero"][name] += amount


def below_cache_root(path: str) -> str:
    """Where a file of Inductor's is, below its directory."""
    return Path(path).relative_to(cache_root()).as_posix()


def generated_module(key: str) -> str:
    """The file of a module that Inductor generated."""
    return str(get_path(key, "py")[2])


def settings() -> Iterator[str]:
    """Settings of PyTorch's compilers under which the same graph may become other code, but for a program's own passes."""
    for config in (inductor_config, functorch_config):
        yield repr(sorted(config.save_config_portable().items()))


def is_cached() -> bool:
    """Whether PyTorch keeps what it compiles in its caches, each part by itself."""
    keeps = inductor_config.fx_graph_cache and functorch_config.enable_autograd_cache
    is_forbidden = inductor_config.force_disable_caches or torch.compiler.config.force_disable_caches
    whole = functorch_config.bundled_autograd_cache or dynamo_config.caching_precompile
    return bool(keeps and not is_forbidden and not whole)


def has_custom_passes() -> bool:
    """Whether a program has given its own passes, or functions that decide, to PyTorch's compilers."""
    names = inductor_config._save_config_ignore
    own = [getattr(inductor_config, name) for name in names if "custom" in name or name == "cudagraph_policy"]
    decides = [getattr(functorch_config, name, None) for name in functorch_config._save_config_ignore]
    return any(each is not None and not isinstance(each, str) for each in (*own, *decides))


def guards() -> tuple[int, int]:
    """How many guards there are on the function that is being compiled, AOTAutograd's too, and on its symbolic sizes."""
    context = TracingContext.try_get()
    if context is None:
        return 0, 0
    shapes = None if context.fake_mode is None else context.fake_mode.shape_env
    known = context.guards_context
    count = len(known.dynamo_guards.inner) + len(known.aotautograd_guards)
    return count, 0 if shapes is None else len(shapes.guards)


@contextmanager
def cache_artifacts() -> Iterator[list[str]]:
    """The keys of what Inductor puts into its caches, or finds there, inside; all are there on leaving.

    What ``torch.compiler.save_cache_artifacts`` gives is the same as without.
    """
    keys: list[str] = []
    with CacheArtifactManager.with_fresh_cache():
        yield keys
        recorded = {kind: list(found) for kind, found in CacheArtifactManager._new_cache_artifacts.items()}
    for kind, found in recorded.items():
        keys.extend(f"{kind}/{artifact.key}" for artifact in found)
        for artifact in found:
            if artifact not in CacheArtifactManager._seen_artifacts:
                CacheArtifactManager._seen_artifacts.add(artifact)
                CacheArtifactManager._new_cache_artifacts[kind].append(artifact)
