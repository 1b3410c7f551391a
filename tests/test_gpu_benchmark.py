"""The benchmark of kernels on a GPU, as far as it runs on a CPU: its rows are problems, and a second call goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.publish import Publication
from lz_compile.lowering.ops import names as ops_known
from lz_compile.runtime.measure.estimate import INDUCTOR

CPU = torch.device("cpu")


def test_rows_are_told_apart_and_every_op_has_one():
    titles = [json.dumps(row.title()) for row in gpu.rows()]
    assert len(titles) == len(set(titles))
    ops = {row.operation.partition(".")[0] for row in gpu.rows()}
    assert ops == {*ops_known()}


@pytest.mark.parametrize("row", {row.operation: row for row in gpu.rows()}.values(), ids=lambda row: row.operation)
def test_a_row_is_a_problem_that_more_than_inductor_can_run(row):
    prepared = gpu.Prepared.of(row.small(), CPU)
    assert INDUCTOR in {spec.kernel_id for spec in prepared.specs}
    assert len(prepared.specs) > 1
    result = prepared.form(None)(*prepared.sample.inputs)
    assert isinstance(result, (torch.Tensor, tuple))


def test_what_takes_a_minute_to_compile_is_left_out_beyond_its_size():
    row = next(row for row in gpu.rows() if row.operation == "scan.delta")
    sizes = {**row.small().sizes, "length": 65}
    ids = {spec.kernel_id for spec in gpu.Prepared.of(replace(row.small(), sizes=sizes), CPU).specs}
    assert not ids & {INDUCTOR, "torch.scan_sequential"}
    assert ids


@pytest.mark.parametrize("is_same", [True, False])
def test_a_second_call_goes_on_where_the_same_device_stopped(tmp_path, is_same):
    first, second = (Publication("gpu", CPU, is_quick=True) for _ in range(2))
    first.path = second.path = tmp_path / "gpu.json"
    first.record["profile"] = {"launch_us": 1.0}
    if not is_same:
        first.record["machine"] = {**first.record["machine"], "gpu": "another"}
    first.add({"case": {"operation": "norm"}})
    second.resume()
    assert (len(second.rows), "profile" in second.record) == ((1, True) if is_same else (0, False))
