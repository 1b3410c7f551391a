"""Records decoded under a grammar, types and symbols: every one parses, fits its types, and names what there is."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance", reason="needs llguidance, the grammar engine (pip install 'lz-compile[examples]')")

from examples.constrained_decoder import SYMBOLS, UNKNOWN, decode, tokenizer
from lz_compile.domains import Domain
from lz_compile.domains.mask import ids_of
from models.constrained_decoder import State, Syntax, Vocabulary, imports, types
from models.decoder import Decoder, DecoderConfig


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(tokenizer())


@pytest.fixture(scope="module")
def decoder(vocabulary):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocabulary.size, channels=32, layers=1, heads=2, kv_heads=1, mlp_width=32)).eval()


@pytest.fixture(scope="module")
def domains():
    return {Domain.TYPES: types(), Domain.IMPORTS: imports(SYMBOLS)}


@pytest.mark.parametrize("seed", range(5))
def test_every_record_parses_and_keeps_to_its_types_and_names(decoder, vocabulary, domains, seed):
    decoded = decode(decoder, vocabulary, domains, seed)
    record = decoded.record
    assert list(record) == ["import", "count", "pure"]
    assert record["import"] in SYMBOLS
    assert type(record["count"]) is int
    assert type(record["pure"]) is bool
    assert decoded.relaxed == ()
    assert decode(decoder, vocabulary, domains, seed).text == decoded.text


def test_a_name_that_nobody_knows_drops_imports_alone(decoder, vocabulary, domains):
    decoded = decode(decoder, vocabulary, domains, 0, begin=f' {{ "import": "{UNKNOWN}')
    assert decoded.record["import"].startswith(UNKNOWN)
    assert decoded.relaxed == ("imports",)
    assert type(decoded.record["count"]) is int


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SYMBOLS), st.integers(0, 999_999), st.booleans(), st.integers(0, 40))
def test_domains_agree_on_whatever_begins_a_record(vocabulary, domains, name, count, pure, cut):
    """After any beginning of a right record all domains allow the token that goes on, and types allow no other kind."""
    text = json.dumps({"import": name, "count": count, "pure": pure})
    tokens = vocabulary.spell(text)
    syntax, states = Syntax(vocabulary), {"types": State(), "imports": State()}
    automata = {domain.value: automaton for domain, automaton in domains.items()}  # remember what they allow
    for token in tokens[:cut]:
        for key, state in states.items():
            assert token in automata[key].allowed(state, vocabulary)
            states[key] = automata[key].take(state, vocabulary.texts[token])
            assert states[key] is not None
        assert token in ids_of(syntax.words(), vocabulary.size).tolist()
        syntax.take(token)
    if cut >= len(tokens):
        assert states["types"].part == 13
        assert vocabulary.end in automata["types"].allowed(states["types"], vocabulary)


@pytest.mark.parametrize(
    "text",
    [
        '{"import": 1',
        '{"count"',
        '{"import": "json", "count": "',
        '{"import": "json", "count": 1, "pure": n',
        '{"import": "json"}',
    ],
)
def test_types_refuse_what_the_grammar_or_the_fields_do_not_allow(text):
    assert types().take(State(), text) is None


def test_spelling_is_exact(vocabulary):
    text = ' {"import": "time machine", "count": 12'
    assert vocabulary.text(vocabulary.spell(text)) == text
    with pytest.raises(ValueError, match="no token begins"):
        vocabulary.spell("\x00")
