"""One kernel for one operation: what it needs, what it can do, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lz_compile.errors import KernelUnavailableError
from lz_compile.ground import formulas
from lz_compile.ground.records import Reason
from lz_compile.runtime.kernels import constraints, libraries
from lz_compile.runtime.kernels.libraries import LazyFunction
from lz_compile.runtime.problem.context import SelectionContext

if TYPE_CHECKING:  # nobody who asks for the policy alone pays for a parser
    from lz_compile.runtime.kernels.capabilities import Grid, Prior

#: The package with the adapters of this one.
ADAPTERS = "lz_compile.lowering.kernels"


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and its limits; what is not listed is not supported, ``"*"`` stands for everything.

    ``operation`` is an op or one of its variants, ``source`` the backend's short name, ``provenance`` what that is and
    where the limits were read. ``supports`` names features (see the op's ``features``), ``requires_features`` those that a
    problem must have where it has another one (``"*"``: in any case). ``max_sm`` is the first SM version that is too new.
    ``implementation`` is None for the kernel that leaves the subgraph alone. ``validation_arguments`` make the small sizes
    of a proof meet what large ones meet, such as several blocks. ``extra_check`` looks for what the fields cannot say.
    """

    kernel_id: str
    operation: str
    source: str
    platforms: frozenset[str]
    dtypes: frozenset[str]
    requires_layouts: frozenset[str]
    supports: frozenset[str] = frozenset()
    requires_features: Mapping[str, frozenset[str]] = field(default_factory=dict)
    implementation: LazyFunction | Callable[..., Any] | None = None
    provenance: str = ""
    package: str | None = None
    backend_version: str | None = None

    min_sm: int | None = None
    max_sm: int | None = None
    supported_generations: frozenset[str] = frozenset()
    min_tensor_core_generation: int | None = None
    instruction_set: str | None = None
    requires_isa: frozenset[str] = frozenset()

    min_head_dim: int | None = None
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    multiples: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    max_seq_len: int | None = None
    supports_scale: bool = True
    requires_last_dim_stride1: bool = False

    is_cuda_graph_safe: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    split_invariant: bool = False
    is_opaque: bool = True
    priority: int = 50
    fuses_ops: tuple[str, ...] = ()
    workspace: str = "0"
    grid: Grid | None = None
    extra_check: Callable[[SelectionContext], Iterable[Reason]] | None = None

    validation_arguments: Mapping[str, Any] = field(default_factory=dict)
    prior: tuple[Prior, ...] = ()
    prior_source: str = ""
    capabilities_hash: str = ""

    @property
    def version(self) -> str | None:
        """The installed version of what the kernel comes from; None where that is this package or the user's code."""
        return None if self.package is None else libraries.installed_version(self.package)

    @property
    def identity(self) -> str:
        """What a proof of this kernel is about: its id, its limits, its code, and the installed version."""
        code = self.implementation
        name = getattr(code, "name", "")  # of one that was registered: its code alone does not tell two closures apart
        source = code.source_digest() if isinstance(code, LazyFunction) and not self.is_shipped else ""
        return f"{self.kernel_id} {self.version} {self.capabilities_hash} {name} {source}"

    @property
    def is_shipped(self) -> bool:
        """Whether the function (not the library that it may call) is this package's own."""
        code = self.implementation
        return code is None or (isinstance(code, LazyFunction) and code.module.startswith(f"{ADAPTERS}."))

    @property
    def is_reproducible(self) -> bool:
        """Whether the kernel is the same in every process of that identity: ours, or a library's of a version."""
        return self.is_shipped or self.version is not None

    @property
    def is_described(self) -> bool:
        """Whether a descriptor says what it can do, not the program that registered it."""
        return self.version is not None or isinstance(self.implementation, (LazyFunction, type(None)))

    @property
    def limits_head_dim(self) -> bool:
        """Whether not every size of the features, or of a block, will do."""
        is_any = self.head_dim_multiple == 1 and self.min_head_dim is None and self.max_head_dim is None
        return not is_any or bool(self.multiples)

    @property
    def call(self) -> Callable[..., Any] | None:
        """The function over the op's canonical operands, imported now; None for the kernel that has none.

        Raises:
            KernelUnavailableError: its library or adapter is not there; :meth:`load` gives that as a reason.
        """
        if not isinstance(self.implementation, LazyFunction):
            return self.implementation
        reason = self.load()
        if reason is not None:
            raise KernelUnavailableError(self.kernel_id, reason)
        return self.implementation.resolve()

    def load(self, *, waits: bool = False) -> Reason | None:
        """Import the library and the adapter; why that is not possible (yet, unless one ``waits``), or None."""
        reason = self.availability()
        if reason is not None or not isinstance(self.implementation, LazyFunction):
            return reason
        return libraries.load(self.implementation, self.package, waits=waits)

    def availability(self) -> Reason | None:
        """Why the library is not there as far as can be seen without importing it, or None."""
        if self.package is not None:
            reason = libraries.missing(self.package, self.backend_version)
            if reason is not None:
                return reason
        return libraries.import_failure(self.implementation) if isinstance(self.implementation, LazyFunction) else None

    def check(self, context: SelectionContext) -> list[Reason]:
        """Every reason why the kernel cannot run a problem; none if it can."""
        return list(constraints.reasons(self, context))

    def workspace_bytes(self, context: SelectionContext) -> int:
        """The memory that the kernel uses beside operands and result.

        Symbolic sizes count as the largest that was declared, or else as the one that was traced.

        Raises:
            FormulaError: the descriptor's formula does not fit the problem.
        """
        return formulas.evaluate(self.workspace, context.sizes())
