"""How much of real architectures is recognised: the families of ``tests/zoo.py``, spelled by others.

python -m benchmarks.coverage [--families llama t5] [--attn eager sdpa] [--quick]

Every family is explained with the attention that transformers spells out and, where it has one, with its call of SDPA.
Kernels are preferred to Inductor's code here: what counts is whether an attention is understood and can be run, not what
is fastest at these tiny sizes. An instance is rewritten, or calls the chosen kernel already, or there is a reason.

Norms, rotary embeddings and gated MLPs are counted where the models' own code names them (``occurrences.py``) and compared
with how many are recognised; more may be recognised than are named.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch._dynamo.utils import counters

import lz_compile
from benchmarks.harness import INDUCTOR
from benchmarks.occurrences import occurrences
from benchmarks.publish import Publication, table_of
from tests import zoo

COUNTS = ("instances", "rewritten", "as_called", "reasons", "unexplained", "events")
QUICK_FAMILIES = ("gpt2", "llama", "bert", "t5", "vit", "whisper")
KERNELS = ("lz.blocked", "torch.sdpa")
#: Ops beside attention, of which the share that is recognised counts.
NAMED = ("norm", "rope", "mlp")


def cover(name: str, attn: str) -> dict[str, Any]:
    """What becomes of a family's attention. A model that fails is a row with its error: the other rows still count."""
    family = zoo.family(name)
    row: dict[str, Any] = {"case": {"family": name, "kind": family.kind, "attention": attn}}
    if lacks := family.lacks(attn):
        return row | {"instances": 0, "lacks": lacks}
    start = time.perf_counter()
    try:
        named = _named(family, attn)
        report, breaks = _explained(family, attn)
    except Exception as error:  # noqa: BLE001 one broken model must not hide the others; it is reported as such
        return row | {"instances": family.instances, "error": f"{type(error).__name__}: {error}"}
    return (
        row
        | _outcome(family, report, breaks)
        | {"named": _recognised(report, named), "seconds": round(time.perf_counter() - start, 2)}
    )


def _named(family: zoo.Family, attn: str) -> Counter[str]:
    model, inputs = family.build(attn)
    return occurrences(model, inputs)


def _recognised(report: lz_compile.Report, named: Counter[str]) -> dict[str, dict[str, Any]]:
    """By op: how many the model names, how many are recognised, and why others are not."""
    return {
        op: {
            "instances": named[op],
            "recognised": sum(match.op == op for match in report.matches),
            "near_misses": [_without_directories(str(miss.reason)) for miss in report.near_misses if miss.op == op],
        }
        for op in NAMED
    }


def _explained(family: zoo.Family, attn: str) -> tuple[lz_compile.Report, list[str]]:
    """The report of one forward pass, and why Dynamo left out parts of it."""
    torch._dynamo.reset()
    counters.clear()
    model, tensors = family.build(attn)
    inputs: dict[str, Any] = dict(tensors)
    with torch.no_grad(), lz_compile.prefer(*KERNELS), lz_compile.avoid(INDUCTOR):
        report = lz_compile.explain(model, print_report=False, **inputs)
    return report, [text.splitlines()[0] for text in counters["graph_break"]]


def _outcome(family: zoo.Family, report: lz_compile.Report, breaks: Sequence[str]) -> dict[str, Any]:
    matches = [match for match in report.matches if match.op == "attention"]
    codes = [{reason.code for reason in match.reasons} for match in matches]
    rewritten = sum(match.rewritten for match in matches)
    as_called = sum("ALREADY_THIS_KERNEL" in found for found in codes)
    left = [
        str(match.reasons[0])
        for match, found in zip(matches, codes, strict=True)
        if not match.rewritten and found and "ALREADY_THIS_KERNEL" not in found
    ]
    missed = [str(miss.reason) for miss in report.near_misses if miss.op == "attention"]
    rest = max(family.instances - rewritten - as_called - len(left) - len(missed), 0)
    outside = [f"in no graph: {', '.join(breaks)}"] * rest if breaks else []
    return {
        "instances": family.instances,
        "rewritten": rewritten,
        "as_called": as_called,
        "reasons": [_without_directories(text) for text in (*left, *missed, *outside)],
        "unexplained": rest - len(outside),
        "masks": dict(Counter(_meaning(match) for match in matches)),
        "mask_reasons": dict(
            Counter(_without_directories(str(reason)) for match in matches for reason in _mask_reasons(match))
        ),
        "kernels": dict(Counter(match.kernel for match in matches)),
        "events": [_without_directories(f"{event.code}: {event.message}") for event in report.events],
    }


def _without_directories(text: str) -> str:
    """A text without the place where packages are installed on this machine."""
    return re.sub(r"/\S*?site-packages/", "", text)


def _meaning(match: Any) -> str:
    return getattr(match, "mask", "") or "none"


def _mask_reasons(match: Any) -> Iterable[Any]:
    return getattr(match, "mask_reasons", ())


def shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By attention implementation and in total: how many instances there are, and how many a kernel runs."""
    groups = {attn: [row for row in rows if row["case"]["attention"] == attn] for attn in zoo.MODES}
    return {name: _share(group) for name, group in {**groups, "both": list(rows)}.items() if group}


def named_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By op: how many instances models name, and how many are recognised, at most as many in each model."""
    found = {}
    for op in NAMED:
        counts = [row["named"][op] for row in rows if "named" in row]
        instances = sum(each["instances"] for each in counts)
        recognised = sum(min(each["recognised"], each["instances"]) for each in counts)
        share = round(recognised / instances, 4) if instances else None
        found[op] = {"instances": instances, "recognised": recognised, "share": share}
    return found


def named_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The share of norms, rotary embeddings and gated MLPs that are recognised, and where some are not."""
    table = table_of(
        "recognised, of those that models name", ["op", "instances", "recognised", "share", "less in"], left=("op",)
    )
    for op, found in named_shares(rows).items():
        less = [
            f"{row['case']['family']} {row['named'][op]['recognised']} of {row['named'][op]['instances']}"
            for row in rows
            if "named" in row and row["named"][op]["recognised"] < row["named"][op]["instances"]
        ]
        share = "" if found["share"] is None else f"{found['share']:.1%}"
        table.add_row(
            op, str(found["instances"]), str(found["recognised"]), share, escape("\n".join(dict.fromkeys(less)))
        )
    return table


def _share(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    instances = sum(row["instances"] for row in rows)
    run = sum(min(_count(row, "rewritten") + _count(row, "as_called"), row["instances"]) for row in rows)
    return {
        "families": sum("lacks" not in row for row in rows),
        "instances": instances,
        "run_by_kernel": run,
        "share": round(run / instances, 4) if instances else None,
        "unexplained": sum(_count(row, "unexplained") for row in rows),
    }


def coverage_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per family and attention implementation, and the totals."""
    text = ("family", "kind", "attention", "masks", "why not")
    columns = ["family", "kind", "attention", *COUNTS, "s", "masks", "why not"]
    table = table_of("attention in transformers", columns, left=text)
    rows = [row for row in rows if "lacks" not in row]
    counts = [[_count(row, name) for name in COUNTS] for row in rows]
    for row, found in zip(rows, counts, strict=True):
        masks = "\n".join(f"{count} {mask}" for mask, count in row.get("masks", {}).items())
        cells = (*row["case"].values(), *map(str, found), str(row.get("seconds", "")))
        table.add_row(*cells, escape(masks), _why_not(row))
    table.add_section()
    total = [str(sum(column)) for column in zip(*counts, strict=True)]
    table.add_row(f"{len(rows)} models", "", "", *total, "", "", "")
    return table


def share_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The share of instances that a kernel runs."""
    columns = ["attention", "families", "instances", "run by a kernel", "share", "unexplained"]
    table = table_of("rewritten, or calling the chosen kernel already", columns, left=("attention",))
    for name, found in shares(rows).items():
        *numbers, share, unexplained = found.values()
        percent = "" if share is None else f"{share:.1%}"
        table.add_row(name, *map(str, numbers), percent, str(unexplained))
    return table


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    return value if isinstance(value, int) else len(value)


def _why_not(row: Mapping[str, Any]) -> str:
    texts = [*row.get("reasons", []), *row.get("events", [])]
    texts += [row["error"]] if "error" in row else []
    return escape("\n".join(dict.fromkeys(texts)))


def main() -> None:
    """Explain every family."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--families", nargs="+", choices=zoo.names())
    options.add_argument("--attn", nargs="+", choices=zoo.MODES, default=list(zoo.MODES))
    options.add_argument("--quick", action="store_true", help="a few families; no published result")
    settings = options.parse_args()
    families = settings.families or (QUICK_FAMILIES if settings.quick else zoo.names())
    is_partial = settings.quick or settings.families is not None or settings.attn != list(zoo.MODES)
    publication = Publication("coverage", torch.device("cpu"), is_quick=is_partial)
    for name, attn in ((name, attn) for name in families for attn in settings.attn):
        row = cover(name, attn)
        publication.record["shares"] = shares([*publication.rows, row])
        publication.record["named_shares"] = named_shares([*publication.rows, row])
        publication.add(row)
        run = _count(row, "rewritten") + _count(row, "as_called")
        outcome = row.get("lacks") or f"{run} of {row['instances']}"
        print(name, attn, outcome, row.get("error", ""), sep=" | ", flush=True)
    publication.show(coverage_table(publication.rows), share_table(publication.rows), named_table(publication.rows))


if __name__ == "__main__":
    main()
