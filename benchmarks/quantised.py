"""Products with weights of few bits, as models spell them: over the float32 product, and over Inductor's code for the source.

One row of 4,096 x 4,096 takes at most 0.35 of float32's time in int8 and 0.25 in packed int4; 256 rows are not slower than
dequantising first: that is the claim. ``--model`` adds a Llama whose layers ``lz.quantize_`` has put into int8 (by torchao),
one token: not slower than by Inductor, and 1.5 times as fast as in float32.

    python -m benchmarks.quantised [--rows 1 4 16 256] [--rounds 15] [--model] [--quick]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.table import Table
from torch import Tensor

import lz_compile
from benchmarks.harness import EAGER, INDUCTOR, LAYERZERO, Quartiles, compiled
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.backend import layerzero
from lz_compile.runtime.measure.timing import measure

FLOAT, KERNEL = "float32 product", "lz.cpp_linear"
WIDTH, GROUP = 4096, 128


def int8(x: Tensor, weight: Tensor, scale: Tensor, _zero: Tensor) -> Tensor:
    """A scale for each row, after the product."""
    return F.linear(x, weight.to(x.dtype)) * scale[:, 0]


def int4(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Neighbours in a byte, groups with zero points."""
    numbers = torch.stack([packed & 15, packed >> 4], -1).view(WIDTH, -1, GROUP)
    return F.linear(x, ((numbers - zero[..., None]) * scale[..., None]).view(WIDTH, WIDTH))


def float8(x: Tensor, weight: Tensor, scale: Tensor, _zero: Tensor) -> Tensor:
    """A scale for each row, before the product."""
    return F.linear(x, weight.to(x.dtype) * scale[:, :1])


class Words(torch.nn.Module):
    """As GPTQ stores four bits: eight numbers in a word, down a column, scales by an index of groups.

    ``is_shuffled``: the columns of a group are anywhere (act-order). What a module holds is unpacked once for all calls.
    """

    words: Tensor
    scale: Tensor
    index: Tensor

    def __init__(self, *, is_shuffled: bool) -> None:
        super().__init__()
        groups = torch.arange(WIDTH) // GROUP
        self.register_buffer("words", torch.randint(-(2**31), 2**31 - 1, (WIDTH // 8, WIDTH), dtype=torch.int32))
        self.register_buffer("scale", torch.rand(WIDTH // GROUP, WIDTH) / 128)
        self.register_buffer("index", groups[torch.randperm(WIDTH)] if is_shuffled else groups)

    def forward(self, x: Tensor) -> Tensor:
        """The product with rows of the weight."""
        numbers = ((self.words[:, None] >> torch.arange(0, 32, 4)[:, None]) & 15).reshape(WIDTH, WIDTH)
        return x @ (self.scale[self.index] * (numbers - 8))


def problems() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """What is spelled, with its weight, scales and zero points."""
    scale, zero = torch.rand(WIDTH, WIDTH // GROUP) / 128, torch.full((WIDTH, WIDTH // GROUP), 8.0)
    weight = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
    packed = torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8)
    return {
        "int8": (int8, (weight, scale, zero)),
        "int4": (int4, (packed, scale, zero)),
        "float8": (float8, (weight.to(torch.float8_e4m3fn), scale, zero)),
        "int4 in words": (Words(is_shuffled=False), ()),
        "int4 in words, shuffled": (Words(is_shuffled=True), ()),
    }


def run_case(
    name: str, function: Callable[..., Tensor], others: tuple[Tensor, ...], rows: int, rounds: int
) -> dict[str, Any]:
    """All in turns."""
    torch._dynamo.reset()
    lz_compile.clear_reports()
    x, full = torch.randn(rows, WIDTH), torch.randn(WIDTH, WIDTH)
    functions = compiled(function, [KERNEL], "linear")
    calls: dict[str, Callable[[], Any]] = {each: _bound(call, (x, *others)) for each, call in functions.items()}
    expected = calls[EAGER]()
    size = expected.abs().max()
    apart = {each: float((call() - expected).abs().max() / size) for each, call in calls.items()}
    chosen = [match.kernel for report in lz_compile.reports() for match in report.matches if match.op == "linear"]
    calls[FLOAT] = _bound(F.linear, (x, full))
    found = measure(calls, torch.device("cpu"), rounds=rounds)
    return {
        "case": {"weight": name, "rows": rows},
        "kernel": chosen[0] if chosen else "nothing recognised",
        "latency_us": {each: rounded(Quartiles.of(timing.rounds_us)) for each, timing in found.items()},
        "of_float": {each: rounded(found[each].relative_to(found[FLOAT])) for each in (LAYERZERO, KERNEL, INDUCTOR)},
        "variants": {
            each: {"of_inductor": rounded(found[each].relative_to(found[INDUCTOR]))} for each in (LAYERZERO, KERNEL)
        },
        "apart": apart,
    }


def run_model(rounds: int) -> dict[str, Any]:
    """A Llama of four layers in float32 and int8; its weights are random, so that only times count."""
    torch._dynamo.reset()
    lz_compile.clear_reports()
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model("llama", vocab_size=4000, num_hidden_layers=4, **shape)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    token, quantised = torch.tensor([[7]]), copy.deepcopy(plain)
    error = lz_compile.quantize_(quantised, "int8").worst_error
    models: dict[str, tuple[Any, Any]] = {
        FLOAT: (plain, "inductor"),
        INDUCTOR: (quantised, "inductor"),
        LAYERZERO: (quantised, layerzero),
    }
    functions: dict[str, Any] = {
        name: torch.compile(copy.deepcopy(model), backend=by, dynamic=False) for name, (model, by) in models.items()
    }
    results = {name: call(token, use_cache=False).logits for name, call in functions.items()}
    calls = {name: partial(call, token, use_cache=False) for name, call in functions.items()}
    found = measure(calls, torch.device("cpu"), rounds=rounds)
    kernels = [match.kernel for report in lz_compile.reports() for match in report.matches if match.op == "linear"]
    of_inductor = {"of_inductor": rounded(found[LAYERZERO].relative_to(found[INDUCTOR]))}
    of_float = rounded(found[LAYERZERO].relative_to(found[FLOAT]))
    return {
        "case": {"weight": "int8 by torchao, a Llama of four layers", "rows": 1},
        "kernel": kernels[0] if kernels else "nothing recognised",
        "latency_us": {each: rounded(Quartiles.of(timing.rounds_us)) for each, timing in found.items()},
        "of_float": {LAYERZERO: of_float, KERNEL: of_float},
        "variants": {LAYERZERO: of_inductor, KERNEL: of_inductor},
        "apart": {LAYERZERO: float((results[LAYERZERO] - results[INDUCTOR]).abs().max())},
        "error": error,
    }


def _bound(function: Callable[..., Any], operands: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: function(*operands)


def quantised_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case."""
    columns = ["weight", "rows", "chosen", "ms", "of float32", "of Inductor", "kernel of float32", "kernel of Inductor"]
    table = table_of(
        f"products with weights of few bits, {WIDTH} x {WIDTH} (medians)", columns, left=("weight", "chosen")
    )
    for row in rows:
        figures = [row["latency_us"][LAYERZERO]["median"] / 1e3]
        for each in (LAYERZERO, KERNEL):
            figures += [row["of_float"][each]["median"], row["variants"][each]["of_inductor"]["median"]]
        case = row["case"]
        table.add_row(case["weight"], str(case["rows"]), row["kernel"], *(f"{each:.2f}" for each in figures))
    return table


def main() -> None:
    """Measure, and publish."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 256])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--model", action="store_true", help="the model alone, beside what was published before")
    options.add_argument("--quick", action="store_true", help="one row, few rounds; no published result")
    settings = options.parse_args()
    rounds = 3 if settings.quick else settings.rounds
    publication = Publication("quantised", torch.device("cpu"), is_quick=settings.quick, rounds=rounds)
    with torch.no_grad():
        if settings.model:
            publication.resume()
            found = run_model(rounds)
            publication.rows[:] = [each for each in publication.rows if each["case"] != found["case"]]
            publication.add(found)
        for name, (function, others) in problems().items() if not settings.model else ():
            for rows in settings.rows[: 1 if settings.quick else None]:
                publication.add(run_case(name, function, others, rows, rounds))
    publication.show(quantised_table(publication.rows))


if __name__ == "__main__":
    main()
