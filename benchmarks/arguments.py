"""The command line that the benchmarks share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from benchmarks.shapes import SHAPES

ROUNDS, QUICK_ROUNDS, QUICK_LENGTHS = 15, 3, 2


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every timing script takes; parse them with :func:`parse`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lengths", nargs="+", type=int, help="sequence lengths")
    options.add_argument("--dtypes", nargs="+", type=_dtype, default=[torch.float32, torch.bfloat16])
    options.add_argument("--rounds", type=int, help=f"rounds of timing, {ROUNDS} by default")
    options.add_argument("--batch", type=int, default=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--device", type=torch.device, default=device)
    options.add_argument("--quick", action="store_true", help="the shortest lengths, few rounds; no published result")
    return options


def parse(options: argparse.ArgumentParser, lengths: Sequence[int]) -> argparse.Namespace:
    """The settings; ``--quick`` decides on what was not asked for."""
    settings = options.parse_args()
    if settings.lengths is None:
        settings.lengths = sorted(lengths)[:QUICK_LENGTHS] if settings.quick else list(lengths)
    if settings.rounds is None:
        settings.rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    return settings


def parse_models(
    description: str | None, models: Sequence[str], *, layers: Sequence[int], quick_layers: int, trains: bool = False
) -> argparse.Namespace:
    """The settings of scripts that compile models in processes of their own, which are told by ``--child`` what to do.

    ``sizes`` are those of :class:`benchmarks.shapes.Size`, one for each depth, and ``repeats`` how often everything is
    measured.
    """
    options = parser(description)
    options.add_argument("--models", nargs="+", choices=list(SHAPES), default=models)
    options.add_argument("--layers", type=int, nargs="+")
    options.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    options.add_argument("--repeats", type=int)
    if trains:
        options.add_argument("--training", action="store_true", help="forward and backward")
    options.add_argument("--resume", action="store_true", help="add to what was measured before")
    options.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    settings = options.parse_args()
    depths = settings.layers or ([quick_layers] if settings.quick else layers)
    settings.repeats = settings.repeats or (1 if settings.quick else 3)
    settings.sizes = [{"length": 128, "layers": depth, "hidden": settings.hidden} for depth in depths]
    return settings


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"no dtype '{name}'; valid are fp32, bf16, fp16 and torch's own names")
    return found
