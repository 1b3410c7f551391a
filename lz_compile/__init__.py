"""A PyTorch compiler backend that knows what your model computes: ``torch.compile(model, backend="layerzero")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lz_compile.api import attention, warmup
    from lz_compile.blender import Blender, SoftGate
    from lz_compile.blending import BlenderConfig, BlendMode, blend
    from lz_compile.diagnosis import DoctorReport, doctor
    from lz_compile.errors import (
        ArgumentError,
        CapabilitiesError,
        ConfigError,
        ConstraintError,
        DispatchTableError,
        DoubleBackwardError,
        FormulaError,
        GradientUnsupportedError,
        KernelExecutionError,
        KernelUnavailableError,
        LayerZeroError,
        MeasurementError,
        NoKernelFoundError,
        OperatorRedefinedError,
        OptionError,
        RegistrationError,
        RewriteFailedError,
        SolveError,
        TokenArgumentError,
        TransformUnsupportedError,
        TrialError,
        UnknownKernelError,
        UnknownOperationError,
    )
    from lz_compile.functional import alibi, embedding, layer_norm, linear, mlp_fused, rms_norm, rope
    from lz_compile.inspection import SelectionReport, dry_run, explain, which
    from lz_compile.readiness import ReadinessReport, readiness_check
    from lz_compile.routing import RoutingRecord, routed_adapter
    from lz_compile.runtime.dispatch_table import DispatchTable
    from lz_compile.runtime.loaded_tables import load_dispatch_table, unload_dispatch_table
    from lz_compile.runtime.policy import avoid, configure, disabled, load_config, lock, prefer, unlock
    from lz_compile.runtime.registration import register_kernel
    from lz_compile.runtime.registry import KernelInfo, list_kernels, unregister_kernel
    from lz_compile.runtime.report import GraphReport, Report, clear_reports, reports
    from lz_compile.sampling import (
        apply_token_bitmask,
        domain_fusion,
        sample,
        sample_topk,
        sample_topp,
        sampling_probs,
    )
    from lz_compile.scans import kda, linear_scan
    from lz_compile.solving import save_decisions, solve
    from lz_compile.speculation import Verification, speculative_verify
    from lz_compile.trial import validate
    from lz_compile.tuning import TuneReport, tune

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "BlendMode",
    "Blender",
    "BlenderConfig",
    "CapabilitiesError",
    "ConfigError",
    "ConstraintError",
    "DispatchTable",
    "DispatchTableError",
    "DoctorReport",
    "DoubleBackwardError",
    "FormulaError",
    "GradientUnsupportedError",
    "GraphReport",
    "KernelExecutionError",
    "KernelInfo",
    "KernelUnavailableError",
    "LayerZeroError",
    "MeasurementError",
    "NoKernelFoundError",
    "OperatorRedefinedError",
    "OptionError",
    "ReadinessReport",
    "RegistrationError",
    "Report",
    "RewriteFailedError",
    "RoutingRecord",
    "SelectionReport",
    "SoftGate",
    "SolveError",
    "TokenArgumentError",
    "TransformUnsupportedError",
    "TrialError",
    "TuneReport",
    "UnknownKernelError",
    "UnknownOperationError",
    "Verification",
    "__version__",
    "alibi",
    "apply_token_bitmask",
    "attention",
    "avoid",
    "blend",
    "clear_reports",
    "configure",
    "disabled",
    "doctor",
    "domain_fusion",
    "dry_run",
    "embedding",
    "explain",
    "kda",
    "layer_norm",
    "linear",
    "linear_scan",
    "list_kernels",
    "load_config",
    "load_dispatch_table",
    "lock",
    "mlp_fused",
    "prefer",
    "readiness_check",
    "register_kernel",
    "reports",
    "rms_norm",
    "rope",
    "routed_adapter",
    "sample",
    "sample_topk",
    "sample_topp",
    "sampling_probs",
    "save_decisions",
    "solve",
    "speculative_verify",
    "tune",
    "unload_dispatch_table",
    "unlock",
    "unregister_kernel",
    "validate",
    "warmup",
    "which",
]

_HOMES = {
    "attention": "lz_compile.api",
    "warmup": "lz_compile.api",
    **dict.fromkeys(("Blender", "SoftGate"), "lz_compile.blender"),
    **dict.fromkeys(("BlendMode", "BlenderConfig", "blend"), "lz_compile.blending"),
    **dict.fromkeys(
        (
            "ArgumentError",
            "CapabilitiesError",
            "ConfigError",
            "ConstraintError",
            "DispatchTableError",
            "DoubleBackwardError",
            "FormulaError",
            "GradientUnsupportedError",
            "KernelExecutionError",
            "KernelUnavailableError",
            "LayerZeroError",
            "MeasurementError",
            "NoKernelFoundError",
            "OperatorRedefinedError",
            "OptionError",
            "RegistrationError",
            "RewriteFailedError",
            "SolveError",
            "TokenArgumentError",
            "TransformUnsupportedError",
            "TrialError",
            "UnknownKernelError",
            "UnknownOperationError",
        ),
        "lz_compile.errors",
    ),
    **dict.fromkeys(("RoutingRecord", "routed_adapter"), "lz_compile.routing"),
    "DispatchTable": "lz_compile.runtime.dispatch_table",
    "load_dispatch_table": "lz_compile.runtime.loaded_tables",
    "unload_dispatch_table": "lz_compile.runtime.loaded_tables",
    **dict.fromkeys(("kda", "linear_scan"), "lz_compile.scans"),
    **dict.fromkeys(
        ("apply_token_bitmask", "domain_fusion", "sample", "sample_topk", "sample_topp", "sampling_probs"),
        "lz_compile.sampling",
    ),
    **dict.fromkeys(("Verification", "speculative_verify"), "lz_compile.speculation"),
    "save_decisions": "lz_compile.solving",
    "solve": "lz_compile.solving",
    "KernelInfo": "lz_compile.runtime.registry",
    "list_kernels": "lz_compile.runtime.registry",
    "register_kernel": "lz_compile.runtime.registration",
    "unregister_kernel": "lz_compile.runtime.registry",
    **dict.fromkeys(
        ("alibi", "embedding", "layer_norm", "linear", "mlp_fused", "rms_norm", "rope"), "lz_compile.functional"
    ),
    "DoctorReport": "lz_compile.diagnosis",
    "doctor": "lz_compile.diagnosis",
    **dict.fromkeys(("SelectionReport", "dry_run", "explain", "which"), "lz_compile.inspection"),
    "ReadinessReport": "lz_compile.readiness",
    "readiness_check": "lz_compile.readiness",
    "validate": "lz_compile.trial",
    **dict.fromkeys(("TuneReport", "tune"), "lz_compile.tuning"),
    "GraphReport": "lz_compile.runtime.report",
    "Report": "lz_compile.runtime.report",
    "clear_reports": "lz_compile.runtime.report",
    "reports": "lz_compile.runtime.report",
    **dict.fromkeys(
        ("avoid", "configure", "disabled", "load_config", "lock", "prefer", "unlock"), "lz_compile.runtime.policy"
    ),
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
