"""Reports as pages: what stands in them, that nothing of a source can run in them, and that a browser shows it."""

from __future__ import annotations

import base64
import html as html_module
import json
import random
import re
import shutil
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lz_compile
from lz_compile import ArgumentError, Report
from lz_compile.ground import events
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band, Reach
from lz_compile.report.changes import changes
from lz_compile.report.graph_text import statements
from lz_compile.report.html.page import MOST_BYTES, Op, page, tree
from lz_compile.report.mask_picture import picture
from lz_compile.tools.command_line import main

pytestmark = pytest.mark.usefixtures("sdpa_first")


class Attend(nn.Module):
    """Attention with a causal mask, which gives its weights where it is asked to."""

    def __init__(self, *, returns_weights: bool) -> None:
        super().__init__()
        self.project, self.returns_weights = nn.Linear(16, 48), returns_weights

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.project(x).view(2, 24, 3, 1, 16).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
        weights = (query @ key.mT).masked_fill(hidden, float("-inf")).softmax(-1)
        return x + (weights @ value).reshape(x.shape), weights if self.returns_weights else None


class Layered(nn.Module):
    """Layers of which the one numbered 3 gives its weights."""

    def __init__(self, odd: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attend(returns_weights=n == odd) for n in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        weights = []
        for layer in self.layers:
            x, given = layer(x)
            weights.append(given)
        return x, weights


def explained(**options: Any) -> Report:
    torch.manual_seed(0)
    return lz_compile.explain(Layered(), torch.randn(2, 24, 16), print_report=False, **options)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with lz_compile.lock("attention", "torch.sdpa"):
        return explained().to_dict()


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


# ---- what a report knows -------------------------------------------------------------------------------------------


def test_matches_and_near_misses_know_their_modules_and_the_calls_before_and_after(report):
    (graph,) = report["graphs"]
    assert [match["module"] for match in graph["matches"]] == [f"layers.{n}" for n in (0, 1, 2, 4)]
    assert {miss["module"] for miss in graph["near_misses"]} == {"layers.3"}
    assert {"path": "layers.0.project", "kind": "Linear", "calls": 1} in graph["modules"]
    told = [match for match in graph["matches"] if match["before"]]
    assert told
    assert "softmax" in "".join(told[0]["before"])
    assert "scaled_dot_product_attention" in "".join(told[0]["after"])


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        (AttentionAttrs(is_causal=True), ["#...", "##..", "###.", "####"]),
        (AttentionAttrs(band=Band(-1, 0)), ["#...", "##..", ".##.", "..##"]),
        (AttentionAttrs(has_mask=True), ["????"] * 4),
        (AttentionAttrs(has_mask=True, masks_keys=True, is_causal=True), ["|...", "||..", "|||.", "||||"]),
        (AttentionAttrs(reach=Reach(2, ((0, 1), (2, 4)))), ["#...", "#...", "..##", "..##"]),
        (AttentionAttrs(has_documents=True), ["????"] * 4),
        (AttentionAttrs(), []),
        (object(), []),
    ],
)
def test_a_mask_is_drawn_as_far_as_positions_decide(attributes, expected):
    assert picture(attributes, {"seq_len_q": 4, "seq_len_k": 4}) == expected


def test_a_large_mask_is_drawn_small_and_its_edge_is_kept_in_part():
    drawn = picture(AttentionAttrs(is_causal=True), {"seq_len_q": 1000, "seq_len_k": 1000})
    assert len(drawn) == len(drawn[0]) == 32
    assert [drawn[n][n] for n in range(32)] == ["+"] * 32
    assert drawn[31][:31] == "#" * 31


def test_alike_layers_stand_together_in_the_tree_and_another_one_among_them_is_seen():
    modules = [{"path": f"layers.{n}", "kind": "Layer", "calls": 1} for n in range(3)]
    op = Op("attention", "rewritten", "match-0")
    root = tree(modules, [("layers.0", op), ("layers.1", op), ("layers.2", Op("attention", "missed", "miss-0"))])
    (group,) = root.below["layers"].groups
    assert (len(group.members), group.forms) == (3, 2)
    assert {(each.name, each.state): count for each, count in root.counts} == {
        ("attention", "rewritten"): 2,
        ("attention", "missed"): 1,
    }


# ---- the page ------------------------------------------------------------------------------------------------------


def test_a_page_tells_reason_edit_kernels_proof_and_cost(report):
    html = page(report)
    text = text_of(html)
    miss, *_ = report["graphs"][0]["near_misses"]
    for each in (miss["edit"], "layers.3", "replaced by torch.sdpa", "against float64", "5 × Attend", "of 2 sorts"):
        assert each in text, each
    assert "returns_weights else None" in text, "the source around"
    assert "What compiling cost" in text


def test_a_page_asks_nothing_of_a_network(report):
    html = page(report)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)|@import|url\(|https?://""", html)


def test_nothing_of_a_source_or_a_report_runs_in_a_page(report):
    evil = '</script><script>alert(1)</script><img src=x onerror=alert(1)>" onmouseover="alert(1)'

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: poisoned(each) for name, each in value.items()}
        if isinstance(value, list):
            return [poisoned(each) for each in value]
        return value + evil if isinstance(value, str) else value

    told = json.loads(json.dumps(report))
    graph = told["graphs"][0]
    graph["matches"] = [
        {**poisoned(each), "context": each["context"], "candidates": poisoned(each["candidates"])}
        for each in graph["matches"]
    ]
    graph["near_misses"], graph["modules"] = poisoned(graph["near_misses"]), poisoned(graph["modules"])
    graph["events"] = [{"code": evil, "message": evil}]
    html = page(told, since=report, title=evil)
    assert html.count("<script") == html.count("</script") == 1
    assert "<img" not in html
    assert not re.search(r"<[^>]*\sonmouseover=", re.sub(r'"[^"]*"', '""', html))
    assert "script-src 'sha256-" in html


def of_many_kinds(report: dict[str, Any], count: int, length: int) -> dict[str, Any]:
    """A report of so many kinds of matches and near misses, each with letters of its own that do not compress."""
    letters = random.Random(0)
    told = json.loads(json.dumps(report))
    graph = told["graphs"][0]
    first = max(graph["matches"], key=lambda match: len(match["before"]))
    own = ["".join(letters.choices(string.ascii_letters, k=length)) for _ in range(count)]
    graph["matches"] = [{**first, "module": f"layers.{n}", "formula": text} for n, text in enumerate(own)]
    miss = graph["near_misses"][0]
    graph["near_misses"] = [{**miss, "module": f"layers.{n}", "edit": f"{miss['edit']} {own[n]}"} for n in range(20)]
    return told


def unpacked(html: str) -> tuple[str, list[str]]:
    """What the script makes of a packed page: the part behind the header, and what is put into items."""
    packed = re.search(r'<template id="packed">([^<]*)</template>', html)
    assert packed is not None
    told = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return told["main"], told["bodies"]


def test_a_report_of_four_hundred_kinds_is_packed_into_two_megabytes_and_nothing_is_left_out(report):
    told = of_many_kinds(report, 400, 500)
    html = page(told)
    assert len(html.encode()) <= MOST_BYTES
    assert "Left out" not in html
    main, bodies = unpacked(html)
    assert main.count('<details class="item') == len(bodies) == 420
    graph = told["graphs"][0]
    whole = text_of(" ".join(bodies))
    for match in graph["matches"]:
        assert match["formula"] in whole
    for each in (*graph["matches"][0]["before"], *graph["matches"][0]["after"]):
        assert each in html_module.unescape(bodies[-1]), each
    assert text_of(bodies[0]).count("what helps") == 1
    assert "packed" not in re.findall(r"id=.(\w+)", page(report)), "a small page is text"


def test_what_has_no_room_even_so_is_said_with_where_it_stands(report, monkeypatch):
    """Of pages of a fifth of the size: packing one takes seconds."""
    most = MOST_BYTES // 5
    monkeypatch.setattr("lz_compile.report.html.page.MOST_BYTES", most)
    monkeypatch.setattr("lz_compile.report.html.page._MANY", 800)
    told = of_many_kinds(report, 40, 9_000)
    html = page(told)
    assert len(html.encode()) <= most
    assert "Left out: what texts have after 4,000 letters" in html
    assert "report.save(" in text_of(html)
    main, bodies = unpacked(html)
    assert "letters more in the JSON" in bodies[-1]
    assert main.count('<details class="item') == 60, "reasons, edits, masks and costs of all"
    enormous = page(of_many_kinds(report, 900, 60))
    assert len(enormous.encode()) <= most
    assert re.search(r"everything after the first [\d,]+ of each list", enormous)
    assert re.search(r"and [\d,]+ more kinds of operations, which stand in the JSON", unpacked(enormous)[0])


def test_a_report_without_anything_is_a_page(tmp_path):
    Report([]).save(tmp_path / "empty.html")
    assert "Nothing was recognised" in (tmp_path / "empty.html").read_text()


def test_sources_that_are_gone_are_said_to_be(report):
    told = json.loads(json.dumps(report))
    for match in told["graphs"][0]["matches"]:
        match["where"] = "/nowhere/model.py:7"
    assert "/nowhere/model.py:7 cannot be read on this machine" in page(told)


# ---- saving and comparing ------------------------------------------------------------------------------------------


def test_what_changed_since_an_earlier_report_is_told_with_its_places(tmp_path, capsys):
    with lz_compile.lock("attention", "inductor"):
        explained().save(tmp_path / "old.json")
    with lz_compile.lock("attention", "torch.sdpa"):
        explained().save(tmp_path / "new.json")
    old, new = (json.loads((tmp_path / name).read_text()) for name in ("old.json", "new.json"))
    assert new["environment"]["torch"] == torch.__version__
    (change,) = [each for each in changes(old, new) if each.kind == "match"]
    assert change.before == "inductor, LEFT_TO_INDUCTOR (locked by lz.lock())"
    assert (change.subject, change.after) == ("attention", "torch.sdpa, rewritten (locked by lz.lock())")
    unlocked = json.loads((tmp_path / "old.json").read_text())
    for match in unlocked["graphs"][0]["matches"]:
        match["why"] = "nothing is expected to be faster than Inductor's own code"
    (change,) = changes(old, unlocked)
    assert "(nothing is expected" in change.after, "a lock that is gone is a change, though nothing else is"
    assert change.places == tuple(f"layers.{n}" for n in (0, 1, 2, 4))
    names = [str(tmp_path / name) for name in ("old.json", "new.json")]
    assert main(["diff", *names, "--html", str(tmp_path / "diff.html"), "--exit-code"]) == 1
    assert re.search(r"torch\.sdpa,\s", capsys.readouterr().out)
    assert "What changed" in (tmp_path / "diff.html").read_text()
    assert main(["diff", names[0], names[0], "--exit-code"]) == 0
    assert "Nothing that the reports tell is different" in capsys.readouterr().out


def test_line_numbers_are_no_change_and_new_near_misses_layers_and_events_are(report):
    moved = json.loads(json.dumps(report))
    for each in (*moved["graphs"][0]["matches"], *moved["graphs"][0]["near_misses"]):
        path, _, line = each["where"].rpartition(":")
        each["where"] = f"{path}:{int(line) + 5}"
    assert changes(report, moved) == []
    gone, *moved["graphs"][0]["near_misses"] = moved["graphs"][0]["near_misses"]
    moved["graphs"][0]["events"].append({"code": "KERNEL_FAILED", "message": "x"})
    found = changes(report, moved)
    assert len(found) == 2, list(map(str, found))
    miss, event = found
    assert (miss.subject, miss.places) == (f"near miss {gone['op']} [{gone['reason']['code']}]", ("layers.3",))
    assert str(event) == "[KERNEL_FAILED] x: none -> 1 event"
    there = next(each for each in moved["graphs"][0]["matches"] if each["rewritten"])
    there["kernel"] += "2"
    assert str(next(each for each in changes(report, moved) if each.kind == "match")).count(there["kernel"]) == 1
    moved["graphs"][0]["modules"] = [each for each in moved["graphs"][0]["modules"] if each["path"] != "layers.3"]
    assert next(each for each in changes(report, moved) if each.kind == "near miss").after == "this module is not there"


def test_what_is_no_report_and_what_is_no_page_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"path ending in \.html or \.json, received .*report\.txt"):
        Report([]).save(tmp_path / "report.txt")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ArgumentError, match="a report with graphs that have matches"):
        Report([]).save(tmp_path / "report.html", since=tmp_path / "other.json")
    with pytest.raises(ArgumentError, match="FileNotFoundError"):
        Report([]).save(tmp_path / "report.html", since=tmp_path / "missing.json")


def test_explain_writes_a_page(tmp_path, monkeypatch, capsys):
    (tmp_path / "shown_model.py").write_text(
        "import torch\n\n\ndef made():\n    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "report.html"
    assert main(["explain", "shown_model:made", "--html", str(path), "--json"]) == 0
    assert "<!doctype html>" in path.read_text()
    assert json.loads(capsys.readouterr().out)["graphs"]


# ---- what somebody has edited ---------------------------------------------------------------------------------------


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in JSON."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inside:
        yield from paths_of(each, (*path, name))


ODD: list[Any] = [
    None, True, -1, 10**400, 1 << 20_000, float("nan"), float("inf"), 1e308, "", "\ud800", "/x\0y.py:3", "x.py:" + "9" * 5_000,
    "a." * 3_000, "</script>", [], [None], {}, {"": None}, [[[]]] * 3, "measured", "estimated",
]  # fmt: skip


def changed(told: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The report with one to three places removed, replaced, doubled, or given another place's value."""
    told = json.loads(json.dumps(told))
    for _ in range(draw.randint(1, 3)):
        found = list(paths_of(told))
        path, other = draw.choice(found), draw.choice(found)
        if not path:
            continue
        holder, name = _at(told, path[:-1]), path[-1]
        act = draw.choice(("remove", "replace", "replace", "swap", "deepen"))
        if act == "remove":
            del holder[name]
        elif act == "replace":
            holder[name] = draw.choice(ODD)
        elif act == "swap":
            holder[name] = json.loads(json.dumps(_at(told, other)))
        else:
            for _ in range(draw.choice((1, 100))):
                holder[name] = [holder[name]]
    return told


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def test_whatever_is_done_to_a_report_it_is_shown_or_refused_by_one_error_that_names_the_field(report):
    whole = json.loads(json.dumps(report))
    graph = whole["graphs"][0]
    graph["events"] = [{"code": "A", "message": "b"}]
    graph["loops"] = [
        {"where": "x.py:1", "graph": "", "steps": 3, "calls": 2, "carried": ["f32[2]"], "streams": ["x"], "around": 1,
         "outputs": [], "rolled": False, "reason": {"code": "A", "message": "b"}}
    ]  # fmt: skip
    graph["layers"] = [{"where": "x.py:1", "graph": "", "count": 3, "calls": 2, "folded": True, "reason": None}]
    graph["unproven"] = [{"code": "A", "message": "b"}]
    graph["matches"] = graph["matches"][:2]
    for match in graph["matches"]:
        match["candidates"] = match["candidates"][:4]
    shown, refused = 0, []
    for seed in range(600):
        try:
            page(changed(whole, random.Random(seed)), since=whole).encode()
            shown += 1
        except ArgumentError as error:
            refused.append(str(error))
    for text in refused:
        assert re.search(
            r"received (told|before|after): .* - at `.*\$|received told: .*(missing|lacks|Expected)", text
        ), text
        assert len(text) < 1_000
    assert shown > 50, "most places are free text"
    assert len(refused) > 100


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ("\xff", "UnicodeDecodeError"),
        ("null", "Expected `object`, got `null`"),
        ('{"graphs": [{}]}', "missing required field `matches` - at `$.graphs[0]`"),
        ('{"graphs": 3}', "Expected `array`, got `int` - at `$.graphs`"),
    ],
)
def test_diff_and_explain_say_in_one_line_what_is_wrong_with_a_file(tmp_path, capsys, text, said):
    path, good = tmp_path / "edited.json", tmp_path / "good.json"
    path.write_bytes(text.encode("latin-1"))
    Report([]).save(good)
    assert main(["diff", str(good), str(path)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert str(path) in told


# ---- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which drives the browser")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


def test_a_browser_leads_from_a_layer_to_its_reason_without_errors(browser, report, tmp_path):
    from selenium import webdriver

    path = Path(tmp_path) / "report.html"
    path.write_text(page(report, since=report))
    browser.get(path.as_uri())
    find = lambda selector: browser.find_elements("css selector", selector)  # noqa: E731 three uses, all here
    (search,) = find("#search")
    search.send_keys("layers.3 attention")
    assert not find("#changes")[0].is_displayed(), "nothing that fits is in there"
    link = next(each for each in find("aside a.op") if each.is_displayed() and each.text == "attention")
    assert link.get_attribute("data-place") == "layers.3"
    link.click()
    (shown,) = find(".selected")
    assert report["graphs"][0]["near_misses"][0]["edit"] in shown.text
    assert find(".here")[0].text.startswith("layers.3")
    escape = "\ue00c"
    webdriver.ActionChains(browser).click(search).send_keys(escape).send_keys("jjkt").perform()
    assert search.get_attribute("value") == ""
    assert find("html")[0].get_attribute("class") == "dark"
    find("#match-0 > summary")[0].click()
    assert find("#match-0 canvas"), "the mask is drawn"
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_a_browser_unpacks_a_large_page_and_fills_what_is_opened(browser, report, tmp_path):
    told = of_many_kinds(report, 400, 500)
    path = Path(tmp_path) / "large.html"
    path.write_text(page(told))
    browser.get(path.as_uri())
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(browser, 60)
    wait.until(lambda _: browser.find_elements("css selector", "html[data-ready]"))
    find = lambda selector: browser.find_elements("css selector", selector)  # noqa: E731 four uses, all here
    assert len(find("details.item")) == 420
    find("#search")[0].send_keys("layers.273 attention")
    next(each for each in find("aside a.op") if each.is_displayed()).click()
    (shown,) = find(".selected")
    assert told["graphs"][0]["matches"][273]["formula"] in shown.text
    assert shown.find_elements("css selector", "canvas"), "the mask is drawn"
    assert len(find(".later")) == 419, "the others wait"
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_commands_that_would_write_no_page_are_refused(capsys):
    assert main(["explain", "attention", "--shape", "1,2,8,16", "--html", "report.html"]) == 2
    assert "pages are of models" in capsys.readouterr().err
    assert not Path("report.html").exists()


def test_a_report_of_somebody_else_shows_no_file_of_this_machine_but_code(report, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("do not tell\n")
    told = json.loads(json.dumps(report))
    for each in (*told["graphs"][0]["matches"], *told["graphs"][0]["near_misses"]):
        each["where"] = f"{secret}:1"
    assert "do not tell" not in page(told)


def test_what_cannot_be_printed_costs_no_match():
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    graph = torch.fx.Graph()
    node = graph.call_function(torch.add, (graph.placeholder("x"), 1))
    node.args = (node.args[0], 1)
    node._args = (node.args[0], Odd())
    with events.collect() as happened:
        assert statements([node]) == []
        assert picture(_Unspanned(), {"seq_len_q": 4, "seq_len_k": 4}) == []
    assert [event.code for event in happened] == ["REPORT_INCOMPLETE"] * 2


class _Unspanned:
    has_mask = True

    def span(self, *_: int) -> tuple[int, int]:
        raise ValueError("no span")
