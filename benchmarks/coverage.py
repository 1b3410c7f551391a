"""How much of the attention in real architectures is recognised: the families of ``tests/zoo.py``, spelled by others.

python -m benchmarks.coverage [--families llama t5] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

import lz_compile
from benchmarks.publish import Publication, table_of
from tests import zoo

COUNTS = ("instances", "expressible", "matches", "rewritten", "near_misses", "events")
QUICK_FAMILIES = ("gpt2", "llama", "bert", "t5", "vit", "whisper")


def cover(name: str) -> dict[str, Any]:
    """What is recognised in a family. A model that fails is a row with its error: the other rows still count."""
    torch._dynamo.reset()
    family = zoo.family(name)
    row: dict[str, Any] = {
        "case": {"family": name, "kind": family.kind},
        "instances": family.instances,
        "expressible": family.expressible,
    }
    start = time.perf_counter()
    try:
        model, tensors = family.build()
        inputs: dict[str, Any] = dict(tensors)
        with torch.no_grad():
            report = lz_compile.explain(model, print_report=False, **inputs)
    except Exception as error:  # noqa: BLE001 one broken model must not hide the others; it is reported as such
        return row | {"error": f"{type(error).__name__}: {error}"}
    return row | {
        "matches": len(report.matches),
        "rewritten": sum(match.rewritten for match in report.matches),
        "near_misses": [{"reason": str(miss.reason), "where": miss.where} for miss in report.near_misses],
        "events": [event.to_dict() for event in report.events],
        "seconds": round(time.perf_counter() - start, 2),
    }


def coverage_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per family, and the totals."""
    text = ("family", "kind", "why not")
    table = table_of("attention in transformers", ["family", "kind", *COUNTS, "s", "why not"], left=text)
    counts = [[_count(row, name) for name in COUNTS] for row in rows]
    for row, found in zip(rows, counts, strict=True):
        table.add_row(*row["case"].values(), *map(str, found), str(row.get("seconds", "")), _why_not(row))
    table.add_section()
    table.add_row(f"{len(rows)} families", "", *(str(sum(column)) for column in zip(*counts, strict=True)), "", "")
    return table


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    return value if isinstance(value, int) else len(value)


def _why_not(row: Mapping[str, Any]) -> str:
    texts = [miss["reason"] for miss in row.get("near_misses", [])]
    texts += [event["message"] for event in row.get("events", [])]
    texts += [row["error"]] if "error" in row else []
    return escape("\n".join(dict.fromkeys(texts)))


def main() -> None:
    """Explain every family."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--families", nargs="+", choices=zoo.names())
    options.add_argument("--quick", action="store_true", help="a few families; no published result")
    settings = options.parse_args()
    families = settings.families or (QUICK_FAMILIES if settings.quick else zoo.names())
    is_partial = settings.quick or settings.families is not None
    publication = Publication("coverage", torch.device("cpu"), is_quick=is_partial)
    for name in families:
        publication.add(row := cover(name))
        print(name, f"{row.get('rewritten', 0)} of {row['instances']}", row.get("error", ""), sep=" | ", flush=True)
    publication.show(coverage_table(publication.rows))


if __name__ == "__main__":
    main()
