"""Recurrent models of other people's libraries by ``lz.roll_loops``: which loops over time become scans, and why others stay.

    pip install --no-deps fla-core norse snntorch spikingjelly speechbrain xlstm mambapy ncps ... transformers
    python -m benchmarks.rolled_libraries [--rows norse fla] [--quick]

Results of a model before and after, and as compiled (PyTorch runs the graphs as they are), are equal, is the claim, and every
loop over time is one scan, or told with its reason. Small models, random weights, eight steps. A library that is not
installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import lz_compile as lz
from benchmarks.publish import Publication, table_of
from lz_compile.ground.events import collect

STEPS, BATCH = 8, 2
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A model of a library, and how to make it with its inputs."""

    library: str
    model: str
    make: Callable[[], Case]


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _heads(count: int = 3) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, STEPS, 2, 4) for _ in range(count))


def _module(module: str, name: str, *given: Any, inputs: Sequence[int], **named: Any) -> Callable[[], Case]:
    """A class of modules, and one tensor of a shape."""
    return lambda: (_of(module, name)(*given, **named), (5 * torch.randn(*inputs),), {})


def _speechbrain(name: str, **named: Any) -> Callable[[], Case]:
    def make() -> Case:
        if "torchaudio" not in sys.modules:  # which it asks for its backends, and does not use here
            sys.modules["torchaudio"] = audio = types.ModuleType("torchaudio")
            audio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
            audio.list_audio_backends, audio.__version__ = (lambda: ["soundfile"]), "2.1.0"  # type: ignore[attr-defined]
        kind = _of("speechbrain.nnet.RNN", name)
        return kind(hidden_size=8, input_shape=(BATCH, STEPS, 6), **named), (torch.randn(BATCH, STEPS, 6),), {}

    return make


def _transformers(name: str, config: str, **named: Any) -> Callable[[], Case]:
    def make() -> Case:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(vocab_size=16, hidden_size=8, **named)).eval()
        return model, (), {"input_ids": torch.randint(0, 16, (BATCH, STEPS)), "use_cache": False}

    return make


def _gated_delta_rule() -> Case:
    rule = _of("transformers.models.qwen3_next.modeling_qwen3_next", "torch_recurrent_gated_delta_rule")
    more = {"g": -torch.rand(BATCH, STEPS, 2), "beta": torch.rand(BATCH, STEPS, 2), "output_final_state": True}
    rule = getattr(rule, "__wrapped__", rule)  # of the library, whatever else is installed
    return rule, _heads(), {**more, "initial_state": None, "use_qk_l2norm_in_kernel": True}


def _leaky_net() -> Case:
    snn = importlib.import_module("snntorch")

    class Net(nn.Module):
        """As in the library's tutorials: state in the neurons."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.lif = nn.Linear(6, 8), snn.Leaky(beta=0.95)

        def forward(self, x: Tensor) -> Tensor:
            """Spikes of all steps."""
            membrane, spikes = self.lif.init_leaky(), []
            for step in range(x.shape[0]):
                spike, membrane = self.lif(self.fc(x[step]), membrane)
                spikes.append(spike)
            return torch.stack(spikes)

    return Net(), (torch.randn(STEPS, BATCH, 6),), {}


def _fla(op: str, name: str, *, gates: Callable[[], tuple[Any, ...]]) -> Callable[[], Case]:
    return lambda: (_of(f"fla.ops.{op}.naive", name), (*_heads(), *gates()), {})


def _kda_gates() -> tuple[Any, ...]:
    return -torch.rand(BATCH, STEPS, 2, 4), torch.rand(BATCH, STEPS, 2), None, None, True


def _chunkwise() -> Case:
    tensors = [torch.randn(BATCH, 2, 24, 4) for _ in range(3)]
    gates = [torch.randn(BATCH, 2, 24) for _ in range(2)]
    return _of("xlstm.blocks.mlstm.backends", "chunkwise_simple"), (*tensors, *gates, None, None, None, 4), {}


def _mambapy() -> Case:
    config = _of("mambapy.mamba", "MambaConfig")(d_model=8, n_layers=1, d_state=4, pscan=False)
    return _of("mambapy.mamba", "Mamba")(config), (torch.randn(BATCH, STEPS, 8),), {}


_SPIKING = "spikingjelly.activation_based.rnn"
_MAMBA = {"state_size": 4, "num_hidden_layers": 2, "use_associative_scan": False}
_RWKV = {"attention_hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "context_length": 16}
_FIRST = (STEPS, BATCH, 6)
ROWS = (
    Row("torch", "quantizable LSTM", _module("torch.ao.nn.quantizable", "LSTM", 6, 8, 2, inputs=_FIRST)),
    Row("fla-core", "KDA", _fla("kda", "naive_recurrent_kda", gates=_kda_gates)),
    Row("fla-core", "gated linear attention", _fla("gla", "naive_recurrent_gla", gates=lambda: _kda_gates()[:1])),
    Row(
        "fla-core",
        "linear attention",
        _fla("linear_attn", "naive_recurrent_linear_attn", gates=lambda: (None, None, True)),
    ),
    Row("norse", "LIF", _module("norse.torch", "LIF", inputs=_FIRST)),
    Row("norse", "recurrent LIF", _module("norse.torch", "LIFRecurrent", 6, 8, inputs=_FIRST)),
    Row("spikingjelly", "spiking LSTM", _module(_SPIKING, "SpikingLSTM", 6, 8, 1, inputs=_FIRST)),
    Row("spikingjelly", "spiking GRU", _module(_SPIKING, "SpikingGRU", 6, 8, 1, inputs=_FIRST)),
    Row("snntorch", "leaky neurons", _leaky_net),
    Row("speechbrain", "LiGRU", _speechbrain("LiGRU", num_layers=2)),
    Row("speechbrain", "SLiGRU", _speechbrain("SLiGRU", ff_normalization="layernorm")),
    Row("ncps", "CfC", _module("ncps.torch", "CfC", 6, 8, inputs=(BATCH, STEPS, 6))),
    Row("xlstm", "mLSTM in chunks", _chunkwise),
    Row("mambapy", "Mamba", _mambapy),
    Row("transformers", "Mamba", _transformers("MambaModel", "MambaConfig", **_MAMBA)),
    Row("transformers", "RWKV", _transformers("RwkvModel", "RwkvConfig", **_RWKV)),
    Row("transformers", "Qwen3-Next, gated delta rule", _gated_delta_rule),
)


def run_row(row: Row) -> dict[str, Any]:
    """What becomes of the loops of one model, and whether results are the same."""
    torch.manual_seed(0)
    target, given, named = row.make()
    expected = _called(_copy(target), given, named)
    with collect() as events:
        rolled = lz.roll_loops(_copy(target), *given, **named)
    scans: list[int] = []

    def counted(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        scans.append(sum(node.target is torch.ops.higher_order.scan for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    fast = torch.compile(_copy(rolled), backend=counted)
    return {
        "case": {"library": row.library, "model": row.model, "version": importlib.metadata.version(row.library)},
        "equal": _is_same(_called(_copy(rolled), given, named), expected),
        "compiled_equal": _is_same(_called(fast, given, named), expected),
        "scans": sum(scans),
        "stays": [event.message.partition("site-packages/")[2] or event.message for event in events],
    }


def _called(target: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    found = torch.utils._pytree.tree_leaves(target(*copy.deepcopy(given), **copy.deepcopy(named)))
    return [each.detach() for each in found if isinstance(each, Tensor)]


def _copy(target: Callable[..., Any]) -> Callable[..., Any]:
    """Models may keep a state."""
    return copy.deepcopy(target) if isinstance(target, nn.Module) else target


def _is_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True) for one, other in pairs)


def libraries_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per model."""
    table = table_of(
        "loops over time of libraries", ["model", "scans", "equal", "compiled", "what stays"], ("model", "what stays")
    )
    for row in rows:
        words = ["yes" if row[name] else "NO" for name in ("equal", "compiled_equal")]
        case = row["case"]
        table.add_row(f"{case['library']}, {case['model']}", str(row["scans"]), *words, "; ".join(row["stays"]))
    return table


def main() -> None:
    """All models of libraries that are installed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", nargs="*", default=[], help="libraries, or parts of their names")
    options.add_argument("--quick", action="store_true", help="into scratch/")
    settings = options.parse_args()
    is_quick = settings.quick or bool(settings.rows)
    publication = Publication("rolled_libraries", torch.device("cpu"), is_quick=is_quick, steps=STEPS)
    for row in ROWS:
        if settings.rows and not any(each in row.library for each in settings.rows):
            continue
        try:
            found = run_row(row)
        except ImportError as error:
            print(f"{row.library}, {row.model}: left out, {error}")
            continue
        publication.add(found)
        print(
            row.library, row.model, found["scans"], found["equal"], found["compiled_equal"], found["stays"], flush=True
        )
    publication.show(libraries_table(publication.rows))


if __name__ == "__main__":
    main()
