"""``lz.quantize_``: weights in few bits by torchao, with the error measured; compiled, their products are recognised."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lz_compile as lz
from lz_compile.api import quantising
from lz_compile.errors import ArgumentError, IntegrationError
from tests.backends import Rewriting

pytest.importorskip("torchao")
pytestmark = [pytest.mark.usefixtures("no_preference"), pytest.mark.filterwarnings("ignore")]
FORMATS = {"int8": 0.01, "int4": 0.1, "float8_e4m3": 0.04, "float8_e5m2": 0.08}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 100, bias=False), nn.LayerNorm(100)).eval()


@pytest.mark.sampled
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_recognised_and_right(format, dtype):
    plain = model_of().to(dtype)
    model = copy.deepcopy(plain)
    report = lz.quantize_(model, format)
    assert [each.name for each in report.layers] == ["0", "2"]
    assert 0 < report.worst_error < FORMATS[format]
    assert report.after_bytes < 0.6 * report.before_bytes
    x = torch.randn(3, 256, dtype=dtype)
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    with torch.no_grad():
        found, eager = torch.compile(model, backend=backend, fullgraph=True)(x), model(x)
    kernels = [match.kernel for match in backend.report.matches if match.op == "linear"]
    assert kernels == ["lz.cpp_linear"] * 2, backend.why_not()
    assert not backend.report.unproven
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found, eager, rtol=tolerance, atol=tolerance)


def test_what_was_quantised_becomes_plain_again():
    model, plain = model_of(), model_of()
    report = lz.quantize_(model, "int8")
    assert lz.dequantize_(model) == 2
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(one) is nn.Parameter
        assert float((one - other).norm() / other.norm().clamp(min=1)) <= report.worst_error + 1e-6
    assert lz.dequantize_(model) == 0


def test_layers_are_chosen_and_groups_must_fit():
    model = model_of()
    report = lz.quantize_(model, "int4", group_size=64, only=lambda _, name: name == "2")
    assert [each.name for each in report.layers] == ["2"]
    assert type(model[0].weight.data) is torch.Tensor
    report = lz.quantize_(nn.Sequential(nn.Linear(100, 8)), "int4")
    assert report.layers == ()
    assert report.worst_error == 0.0


def test_inductor_is_left_as_it_is():
    """Torchao's own call changes its configuration for the whole process."""
    from torch._inductor import config

    before = config.save_config_portable()
    lz.quantize_(model_of(), "int8")
    lz.quantize_(model_of(), "float8_e4m3")
    assert config.save_config_portable() == before


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"format": "int9"}, r"expected format as one of int8, int4, .* received 'int9' \(did you mean 'int8'"),
        ({"format": "mxfp4"}, "products in mxfp4 need an NVIDIA GPU of sm_100 or newer, received mxfp4 on cpu"),
        ({"format": "nvfp4"}, "products in nvfp4 need an NVIDIA GPU of sm_100 or newer"),
        ({"group_size": 32}, "expected group_size for formats with groups"),
        ({"format": "int4", "group_size": 1}, "expected group_size as a whole number, 2 or more"),
    ],
)
def test_what_cannot_be_is_refused(given, text):
    model = model_of()
    with pytest.raises(ArgumentError, match=text):
        lz.quantize_(model, **given)
    assert type(model[0].weight.data) is torch.Tensor


def test_what_is_no_module_is_refused():
    for call in (lz.quantize_, lz.dequantize_):
        with pytest.raises(ArgumentError, match=r"expected model as an nn\.Module, received Tensor"):
            call(torch.ones(2))


def test_a_missing_library_is_named(monkeypatch):
    import sys

    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(IntegrationError, match=r"expected torchao >=0\.17"):
        lz.quantize_(model_of())


def test_the_report_prints_itself():
    from rich.console import Console

    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(lz.quantize_(model_of()))
    text = console.export_text()
    assert "weights in int8" in text
    assert "3.9" in text
    assert quantising.FORMATS["int8"].bits == 8
