"""Models of other people's packages: results against eager, instances counted by hand against those found, and time.

    pip install --no-deps x-transformers vit-pytorch fair-esm litgpt einops einx ...
    python -m benchmarks.third_party [--rows cait esm2] [--without-timing] [--quick]

A row says what its model holds: how many instances of each op (as its source reads, not as a report says), and how often a
near miss is the true answer, by its code. Random weights, small depth, forward. A package that is not installed is skipped
with a line that says so. Kernels are preferred to Inductor's own code while instances are counted, not while time is taken.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import lz_compile
from benchmarks import third_party_scans
from benchmarks.arguments import parse, parser
from benchmarks.harness import INDUCTOR, LAYERZERO, compare, compiled, measure, prepare, tensors
from benchmarks.publish import Publication, table_of, timing_table
from lz_compile.backend import layerzero
from lz_compile.runtime.policy import policy

#: What packages import for data, training and files, which no forward pass here uses: they are installed without it.
UNUSED = (
    "torchvision",
    "lightning",
    "lightning_utilities",
    "jsonargparse",
    "adam_atan2_pytorch",
    "psutil",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "nir",
    "nirtorch",
    "h5py",
)
KERNELS = ("lz.blocked", "torch.sdpa")
#: Of Inductor's time: no row may take longer.
SLOWEST = 1.03

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    """A model of a package, with what it holds: instances by op, and near misses (of attention) by code."""

    name: str
    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    expected: Mapping[str, int]
    told: Mapping[str, int] = field(default_factory=dict)

    def lacks(self) -> str:
        """The import that fails, empty where all is there."""
        try:
            with StandIns():
                importlib.import_module(self.package)
        except ImportError as error:
            return str(error)
        return ""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """While entered, empty modules stand in for those of :data:`UNUSED` that are not installed."""

    def __init__(self) -> None:
        self.names = {name for name in UNUSED if name not in sys.modules and importlib.util.find_spec(name) is None}

    def __enter__(self) -> StandIns:
        sys.meta_path.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in [each for each in sys.modules if each.partition(".")[0] in self.names]:
            del sys.modules[name]

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """A package for each of the names, and all that is in it."""
        is_unused = fullname.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module in which every name is an empty class."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class _Nothing:
    """What is made of a class of an empty module: it takes everything, and is false."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


# ---- the models ---------------------------------------------------------------------------------------------------------


def _made(module: str, name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with StandIns():
            model: nn.Module = getattr(importlib.import_module(module), name)(**settings)
        return model

    return build


def _images(size: int = 128) -> Callable[[], Inputs]:
    return lambda: (torch.randn(2, 3, size, size),)


def _tokens(words: int = 101, length: int = 256) -> Callable[[], Inputs]:
    return lambda: (torch.randint(4, words, (2, length)),)


_VIT: Mapping[str, Any] = {
    "image_size": 128, "patch_size": 8, "num_classes": 10, "dim": 96, "depth": 2, "heads": 4, "mlp_dim": 192
}  # fmt: skip


def _vit(name: str, module: str, cls: str, attentions: int, told: Mapping[str, int] | None = None, **more: Any) -> Row:
    settings = {**_VIT, **more.pop("settings", {})}
    build = _made(f"vit_pytorch.{module}", cls, **settings)
    return Row(name, "vit_pytorch", build, _images(), {"attention": attentions, **more}, told or {})


def _x(
    name: str, told: Mapping[str, int] | None = None, *, attentions: int = 2, ropes: int = 0, **settings: Any
) -> Row:
    def build() -> nn.Module:
        with StandIns():
            package: Any = importlib.import_module("x_transformers")
        layers = package.Decoder(dim=96, depth=2, heads=4, attn_dim_head=24, **settings)
        model: nn.Module = package.TransformerWrapper(num_tokens=101, max_seq_len=256, attn_layers=layers)
        return model

    return Row(f"x_{name}", "x_transformers", build, _tokens(), {"attention": attentions, "rope": ropes}, told or {})


def _litgpt(name: str, config: str, ropes: int, **settings: Any) -> Row:
    def build() -> nn.Module:
        with StandIns():
            source: Any = importlib.import_module("litgpt")
        sizes = {"n_layer": 2, "n_embd": 96, "n_head": 4, "padded_vocab_size": 101, "block_size": 256}
        model: nn.Module = source.GPT(source.Config.from_name(config, **sizes, intermediate_size=192, **settings))
        return model

    return Row(f"litgpt_{name}", "litgpt", build, _tokens(), {"attention": 2, "rope": ropes})


_T2T = {"dim": 96, "image_size": 128, "depth": 2, "heads": 4, "mlp_dim": 192, "num_classes": 10}
_CROSS = {
    "image_size": 128, "num_classes": 10, "depth": 1, "sm_dim": 64, "sm_patch_size": 8, "sm_enc_depth": 1,
    "sm_enc_heads": 4, "sm_enc_mlp_dim": 96, "lg_dim": 80, "lg_patch_size": 16, "lg_enc_depth": 1, "lg_enc_heads": 4,
    "lg_enc_mlp_dim": 112, "cross_attn_depth": 1, "cross_attn_heads": 4,
}  # fmt: skip


def _recurrent(row: third_party_scans.Row) -> Row:
    """A row of recurrences, which are built together with their inputs."""

    def build() -> tuple[nn.Module, Inputs]:
        with StandIns():
            return row.build()

    return Row(row.name, row.package, lambda: build()[0], lambda: build()[1], row.expected)


ROWS: tuple[Row, ...] = (
    _vit("vit", "vit", "ViT", 2),
    _vit("simple_vit", "simple_vit", "SimpleViT", 2),
    _vit("deepvit", "deepvit", "DeepViT", 0, {"HEADS_MIXED": 2}),
    _vit("cait", "cait", "CaiT", 0, {"HEADS_MIXED": 3}, settings={"cls_depth": 1}),
    _vit("rvt", "rvt", "RvT", 2, rope=4),
    _vit("parallel_vit", "parallel_vit", "ViT", 4),
    _vit("small_dataset_vit", "vit_for_small_dataset", "ViT", 2),
    _vit("xcit", "xcit", "XCiT", 3, settings={"cls_depth": 1}),
    _vit("qk_norm_vit", "simple_vit_with_qk_norm", "SimpleViT", 2),
    Row("t2t_vit", "vit_pytorch", _made("vit_pytorch.t2t", "T2TViT", t2t_layers=((7, 4), (3, 2)), **_T2T), _images(),
        {"attention": 3}),  # one between the two stages, and the depth
    Row("cross_vit", "vit_pytorch", _made("vit_pytorch.cross_vit", "CrossViT", **_CROSS), _images(), {"attention": 4}),
    Row("esm2", "esm", _made("esm.model.esm2", "ESM2", num_layers=2, embed_dim=96, attention_heads=4), _tokens(24),
        {"attention": 2, "rope": 4}),
    _x("plain"),
    _x("rotary", ropes=4, rotary_pos_emb=True),
    _x("alibi", alibi_pos_bias=True),
    _x("t5_bias", rel_pos_bias=True),
    _x("grouped", attn_kv_heads=2),
    _x("one_key_head", attn_one_kv_head=True),
    _x("qk_norm", attn_qk_norm=True),
    _x("memories", attn_num_mem_kv=5),
    _x("top_k", {"INTERIOR_USED": 2}, attentions=0, attn_sparse_topk=8),
    _x("talking_heads", {"HEADS_MIXED": 2}, attentions=0, attn_post_talking_heads=True),
    _x("hyper_connections", num_residual_streams=2),
    _x("flash", attn_flash=True),
    _litgpt("pythia", "pythia-14m", 4),
    _litgpt("llama", "Llama-3.2-1B", 4, n_query_groups=2, head_size=24),
    _litgpt("gemma2", "Gemma-2-2b", 4, n_query_groups=2, head_size=24),
    *map(_recurrent, third_party_scans.ROWS),
)  # fmt: skip


# ---- what is told of each -----------------------------------------------------------------------------------------------


def count(row: Row) -> tuple[Counter[str], Counter[str]]:
    """Instances that a kernel computes, by op, and near misses of attention, by code; both equal to eager in result.

    Raises:
        DisagreementError: the result differs from eager's.
    """
    torch._dynamo.reset()
    lz_compile.clear_reports()
    policy.prefer(*KERNELS)
    try:
        model, inputs = row.build().eval(), row.inputs()
        with torch.no_grad():
            got = torch.compile(model, backend=layerzero, dynamic=False)(*inputs)
            compare(row.name, tensors(got), tensors(model(*inputs)))
    finally:
        policy.reset()
    reports = lz_compile.reports()
    found = Counter(match.op for report in reports for match in report.matches)
    told = Counter(miss.reason.code for report in reports for miss in report.near_misses if miss.op == "attention")
    return found, told


def run_row(row: Row, publication: Publication, settings: argparse.Namespace) -> None:
    """Count, compare and time one model."""
    torch.manual_seed(0)
    found, told = count(row)
    matched = {op: found[op] for op in row.expected}
    is_as_counted = matched == dict(row.expected) and told == Counter(row.told)
    case, more = {"model": row.name, "package": row.package}, {"expected": dict(row.expected), "matched": matched}
    told_of = {"told": dict(told), "to_be_told": dict(row.told), "is_as_counted": is_as_counted}
    if settings.without_timing:
        publication.add({"case": case, "variants": {}, **more, **told_of})
        return
    torch._dynamo.reset()
    model, inputs = row.build().eval(), row.inputs()
    with torch.no_grad():
        prepared = prepare(compiled(model), lambda function: function(*inputs))
        timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    publication.add_timings(case, prepared, timings, **more, **told_of)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not as it should be: counts, and rows slower than Inductor by more than its noise."""
    found = []
    for row in rows:
        name = row["case"]["model"]
        if not row["is_as_counted"]:
            wanted = f"counted {row['expected']} and {row['to_be_told'] or 'nothing to tell'}"
            found.append(f"{name}: {wanted}, found {row['matched']} and {row['told'] or 'nothing'}")
        ratio = row["variants"].get(LAYERZERO, {}).get("of_inductor")
        if ratio is not None and ratio["low"] > SLOWEST:
            found.append(f"{name}: {ratio['median']:.2f} of {INDUCTOR}'s time")
    return found


def main() -> None:
    """Run every row whose package is there."""
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    options.add_argument("--without-timing", action="store_true", help="count and compare only")
    settings = parse(options, ())
    publication = Publication("third_party", settings.device, is_quick=settings.quick or settings.without_timing)
    for row in (row for row in ROWS if row.name in settings.rows):
        lacks = row.lacks()
        if lacks:
            print(f"{row.name} is skipped: {lacks}", flush=True)
            continue
        run_row(row, publication, settings)
    table = table_of(
        "counted by hand, and found", ["model", "counted", "found", "told"], left=("counted", "found", "told")
    )
    for done in publication.rows:
        table.add_row(done["case"]["model"], *(str(done[key]) for key in ("expected", "matched", "told")))
    found = verdicts(publication.rows)
    publication.show(*([] if settings.without_timing else [timing_table("third party", publication.rows)]), table)
    print(*found or ["every row is as counted"], sep="\n")


if __name__ == "__main__":
    main()
