"""A PyTorch compiler backend that knows what your model computes: ``torch.compile(model, backend="layerzero")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lz_compile.api.attention import attention
    from lz_compile.api.blender import Blender, SoftGate
    from lz_compile.api.blending import BlenderConfig, BlendMode, blend
    from lz_compile.api.functional import alibi, embedding, layer_norm, linear, mlp_fused, rms_norm, rope
    from lz_compile.api.rolling.rolled import roll_loops
    from lz_compile.api.routing import routed_adapter
    from lz_compile.api.routing_record import RoutingRecord
    from lz_compile.api.sampling import (
        apply_token_bitmask,
        domain_fusion,
        sample,
        sample_topk,
        sample_topp,
        sampling_probs,
    )
    from lz_compile.api.scans import kda, linear_scan
    from lz_compile.api.speculation import Verification, speculative_verify
    from lz_compile.api.warming import warmup
    from lz_compile.errors import (
        ArgumentError,
        ArtifactError,
        CapabilitiesError,
        CommandError,
        ConfigError,
        ConstraintError,
        DispatchTableError,
        DoubleBackwardError,
        FormulaError,
        GradientUnsupportedError,
        IntegrationError,
        KernelExecutionError,
        KernelUnavailableError,
        LayerZeroError,
        MeasurementError,
        NoKernelFoundError,
        OperatorRedefinedError,
        OptionError,
        RanksDifferError,
        RegistrationError,
        RewriteFailedError,
        SolveError,
        TokenArgumentError,
        TransformUnsupportedError,
        TrialError,
        UnknownKernelError,
        UnknownOperationError,
    )
    from lz_compile.ground.json_logs import log_as_json
    from lz_compile.report.report import GraphReport, Report, clear_reports, reports
    from lz_compile.runtime.kernels.registration import register_kernel
    from lz_compile.runtime.kernels.registry import KernelInfo, list_kernels, unregister_kernel
    from lz_compile.runtime.policy.policy import avoid, configure, disabled, load_config, lock, prefer, unlock
    from lz_compile.runtime.ranks.agree import join_ranks, leave_ranks, ranks
    from lz_compile.runtime.tables.dispatch_table import DispatchTable
    from lz_compile.runtime.tables.loaded import load_dispatch_table, unload_dispatch_table
    from lz_compile.tools.artifacts import Artifacts, inspect_artifacts, load_artifacts, merge_artifacts, save_artifacts
    from lz_compile.tools.diagnosis import DoctorReport, doctor
    from lz_compile.tools.inspection import SelectionReport, dry_run, explain, which
    from lz_compile.tools.readiness import ReadinessReport, readiness_check
    from lz_compile.tools.serving import Padding, Served, ServedState, serve
    from lz_compile.tools.solving import save_decisions, solve
    from lz_compile.tools.telemetry import instrument
    from lz_compile.tools.trial import validate
    from lz_compile.tools.tuning import TuneReport, tune

__version__ = "0.1.0"
__all__ = [
    "ArgumentError", "ArtifactError", "Artifacts", "BlendMode", "Blender", "BlenderConfig", "CapabilitiesError",
    "CommandError", "ConfigError", "ConstraintError", "DispatchTable", "DispatchTableError", "DoctorReport",
    "DoubleBackwardError", "FormulaError", "GradientUnsupportedError", "GraphReport", "IntegrationError",
    "KernelExecutionError", "KernelInfo", "KernelUnavailableError", "LayerZeroError", "MeasurementError",
    "NoKernelFoundError", "OperatorRedefinedError", "OptionError", "Padding", "QuantizedModel", "RanksDifferError",
    "ReadinessReport", "RegistrationError", "Report", "RewriteFailedError", "RoutingRecord", "SelectionReport",
    "Served", "ServedState", "SoftGate", "SolveError", "TokenArgumentError", "TransformUnsupportedError",
    "TrialError", "TuneReport", "UnknownKernelError", "UnknownOperationError", "Verification", "__version__", "alibi",
    "apply_token_bitmask", "attention", "avoid", "blend", "clear_reports", "configure", "dequantize_", "disabled",
    "doctor", "domain_fusion", "dry_run", "embedding", "explain", "inspect_artifacts", "instrument", "join_ranks",
    "kda", "layer_norm", "leave_ranks", "linear", "linear_scan", "list_kernels", "load_artifacts", "load_config",
    "load_dispatch_table", "lock", "log_as_json", "merge_artifacts", "mlp_fused", "paged_attention", "prefer",
    "quantize_", "ranks", "readiness_check", "register_kernel", "reports", "rms_norm", "roll_loops", "rope",
    "routed_adapter", "sample", "sample_topk", "sample_topp", "sampling_probs", "save_artifacts", "save_decisions",
    "serve", "solve", "speculative_verify", "tune", "unload_dispatch_table", "unlock", "unregister_kernel",
    "validate", "warmup", "which", "write_to_cache",
]  # fmt: skip

#: Which module a public name is from.
_HOMES = {
    name: f"lz_compile.{home}"
    for home, names in {
        "api.attention": "attention",
        "api.blender": "Blender SoftGate",
        "api.blending": "BlendMode BlenderConfig blend",
        "api.functional": "alibi embedding layer_norm linear mlp_fused rms_norm rope",
        "api.paged": "paged_attention write_to_cache",
        "api.quantising": "QuantizedModel dequantize_ quantize_",
        "api.rolling.rolled": "roll_loops",
        "api.routing": "routed_adapter",
        "api.routing_record": "RoutingRecord",
        "api.sampling": "apply_token_bitmask domain_fusion sample sample_topk sample_topp sampling_probs",
        "api.scans": "kda linear_scan",
        "api.speculation": "Verification speculative_verify",
        "api.warming": "warmup",
        "errors": " ".join(name for name in __all__ if name.endswith("Error")),
        "ground.json_logs": "log_as_json",
        "report.report": "GraphReport Report clear_reports reports",
        "runtime.kernels.registration": "register_kernel",
        "runtime.kernels.registry": "KernelInfo list_kernels unregister_kernel",
        "runtime.policy.policy": "avoid configure disabled load_config lock prefer unlock",
        "runtime.ranks.agree": "join_ranks leave_ranks ranks",
        "runtime.tables.dispatch_table": "DispatchTable",
        "runtime.tables.loaded": "load_dispatch_table unload_dispatch_table",
        "tools.artifacts": "Artifacts inspect_artifacts load_artifacts merge_artifacts save_artifacts",
        "tools.diagnosis": "DoctorReport doctor",
        "tools.inspection": "SelectionReport dry_run explain which",
        "tools.readiness": "ReadinessReport readiness_check",
        "tools.serving": "Padding Served ServedState serve",
        "tools.solving": "save_decisions solve",
        "tools.telemetry": "instrument",
        "tools.trial": "validate",
        "tools.tuning": "TuneReport tune",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: importing the package imports no torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
