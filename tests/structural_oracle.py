"""Random programs, compiled by our passes and AOTAutograd without code generation, against the same programs run eagerly.

What is compared of every call: results (values, dtypes, shapes, strides, whether they require gradients, whose memory they
are), inputs and buffers afterwards, and the gradient of every leaf. What AOTAutograd alone does otherwise is PyTorch's.

Numbers of bfloat16 may err from those of the same program in float64 by a few times what eager's do. Two limits that are
documented are none of our faults: numbers where eager has NaN from a key that an additive mask hides (``docs/masks.md``), and
PyTorch's own error for memory that a backward pass needs and that is overwritten between two graphs (``ARCHITECTURE.md``).
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from structural_comparison import Open, difference, tolerance_of
from structural_programs import Program
from torch import nn
from torch._dynamo.utils import counters

from lz_compile.compile import pipeline, reading
from lz_compile.compile.compiler import process
from lz_compile.compile.options import split
from lz_compile.lowering import configured, inductor
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.loops.recurrence.distribute import Distributed
from lz_compile.passes.loops.roll import worthwhile
from lz_compile.passes.loops.roll.scan_outputs import scans_of_ours
from lz_compile.passes.proof.running import run_steps
from lz_compile.report.report import GraphReport

#: By name of what is compared: a tensor, or anything with ``==``.
Observation = dict[str, Any]

#: What PyTorch raises where a backward pass needs what was overwritten.
_OVERWRITTEN = "modified by an inplace operation"
_NOTHING = Open()
#: What changes a graph and counts its changes itself, as :mod:`lz_compile.compile.reading` knows it.
STAGES = ("inline", "distribute")
#: Events that are faults of ours; an edit that its proof refuted is none.
FAULTS = ("REWRITE_FAILED", "RECOGNISER_FAILED", "INLINE_FAILED", "LOOPS_FAILED", "COMPILE_FAILED", "FUSION_FAILED")
#: What a long loop is: with its parts short ones, as of loops of thousands of calls.
_LONG = {"WORTHWHILE_CALLS": 20, "MANY_CALLS": 40, "WORTHWHILE_STEPS": 4, "WORTHWHILE_ITERATIONS": 4}
_COMPARES = re.compile(r"[<>]|where|maximum|amax|clamp|sign")
#: Larger values than this have left what a comparison can tell.
_WILD = 1e15
_runs = itertools.count()


@dataclass
class Finding:
    """How a compiled program differs from the eager one: what is compared, and both sides of it."""

    program: Program
    differs: dict[str, str]
    events: list[str]
    edits: Counter[str]

    @property
    def kinds(self) -> set[str]:
        """What kind of thing differs: ``value``, ``strides``, ``gradient``, ``raised``, ..."""
        return {name.split(":")[0] for name in self.differs}

    def text(self) -> str:
        """For people."""
        lines = [self.program.text(), "", *(f"{name}: {text}" for name, text in self.differs.items())]
        return "\n".join([*lines, f"edits: {dict(self.edits)}", *(f"event {each[:300]}" for each in self.events)])


@dataclass
class Verdict:
    """What became of a program; ``finding`` is None where nothing of ours differs."""

    is_run: bool
    finding: Finding | None = None
    is_torchs: bool = False
    edits: Counter[str] = field(default_factory=Counter)


class Fixture(nn.Module):
    """What programs call ``m``."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(0.4 * torch.randn(width, width, dtype=dtype))
        self.g = nn.Parameter(torch.randn(width, dtype=dtype))
        self.register_buffer("scale", torch.rand(width, dtype=dtype))
        heads = 2 if width % 2 == 0 else 1
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, dtype=dtype)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, dtype=dtype)
        self.layer = layer


def _special(*shape: int) -> torch.Tensor:
    """Noise with infinities and NaN."""
    found = torch.randn(shape)
    found.view(-1)[torch.randint(found.numel(), (2,))] = torch.tensor([torch.nan, torch.inf])
    return found


def _transposed(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(0, -1).contiguous().transpose(0, -1)


def _strided(value: torch.Tensor) -> torch.Tensor:
    return value.repeat_interleave(2, -1)[..., ::2]


def _expanded(value: torch.Tensor) -> torch.Tensor:
    """The first of a batch for all of it."""
    return value[:1].expand_as(value)


def _laid_out_as(value: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """What is made of a leaf, with the strides of a value."""
    whole = leaf[tuple(slice(None, None if stride else 1) for stride in value.stride())]
    made = torch.empty_strided(whole.shape, value.stride(), dtype=value.dtype).copy_(whole)
    return made if made.shape == value.shape else made.expand_as(value)


def _arguments(program: Program, call: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The inputs of a call, and the leaves that they are or are made of."""
    torch.manual_seed(program.seed + 1000 * call)
    names: dict[str, Any] = dict(zip("BTD", program.sizes[call], strict=True))
    names |= {
        "torch": torch,
        "special": _special,
        "transposed": _transposed,
        "strided": _strided,
        "expanded": _expanded,
    }
    leaves: dict[str, torch.Tensor] = {}
    arguments: dict[str, torch.Tensor] = {}
    for name, text in program.inputs.items():
        value = eval(text, {**names, **arguments})
        if ".to(" in text and program.roles[name] != "constant" and program.is_graded:
            leaves[name] = leaf = value.detach().clone().requires_grad_()
            value = _laid_out_as(value, leaf) if program.roles[name] == "made" else leaf
        arguments[name] = value
    return arguments, leaves


def _function(program: Program) -> Callable[..., Any]:
    name = (
        f"<program {program.seed}, run {next(_runs)}>"  # what Dynamo remembers of sizes, it remembers by file and line
    )
    linecache.cache[name] = (len(program.source), None, [line + "\n" for line in program.source.split("\n")], name)
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(program.source, name, "exec"), names)
    return names["f"]  # type: ignore[no-any-return]


def observe(program: Program, backend: Any) -> list[Observation]:
    """Run every call of a program, eagerly where ``backend`` is None."""
    torch._dynamo.reset()
    function = _function(program)
    if backend is not None:
        function = torch.compile(function, backend=backend, dynamic=program.is_dynamic)
    torch.manual_seed(program.seed)
    dtype = next((each for each in (torch.float32, torch.bfloat16) if str(each) in program.inputs["w"]), torch.float64)
    fixture = Fixture(program.sizes[0][2], dtype).train(program.seed % 2 == 0)
    fixture = fixture.double() if program.inputs["w"].endswith(".double()") else fixture
    found: list[Observation] = []
    for call in range(len(program.sizes)):
        found.append(_call(program, function, fixture, call))
        with torch.no_grad():
            fixture.scale.add_(0.25)
    return found


def _call(program: Program, function: Callable[..., Any], fixture: Fixture, call: int) -> Observation:
    arguments, leaves = _arguments(program, call)
    leaves |= dict(fixture.named_parameters()) if program.is_graded else {}
    with torch.inference_mode() if program.is_inference else torch.set_grad_enabled(program.is_graded):
        results = list(_flat(function(fixture, *arguments.values())))
    found: Observation = {"structure:": [type(each).__name__ for each in results]}
    memory: dict[int, str] = {each.untyped_storage()._cdata: name for name, each in arguments.items()}
    memory |= {each.untyped_storage()._cdata: name for name, each in fixture.state_dict(keep_vars=True).items()}
    for at, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            found[f"value:result {at}"] = result
            continue
        found[f"dtype:result {at}"], found[f"shape:result {at}"] = result.dtype, tuple(result.shape)
        found[f"strides:result {at}"] = _strides(result)
        found[f"requires_grad:result {at}"] = result.requires_grad
        found[f"memory:result {at}"] = memory.setdefault(result.untyped_storage()._cdata, f"result {at}")
        found[f"value:result {at}"] = result.detach().clone()
    for name, each in (*arguments.items(), ("scale", fixture.scale)):
        found[f"input:{name}"] = each.detach().clone()
        found[f"requires_grad:{name}"] = each.requires_grad
    found |= _gradients([*results, *arguments.values()], leaves)
    return found


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of dimensions that have more than one element."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _gradients(outputs: Sequence[Any], leaves: dict[str, torch.Tensor]) -> Observation:
    terms = [
        (
            each.double() * torch.randn(each.shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
        ).sum()
        for at, each in enumerate(outputs)
        if isinstance(each, torch.Tensor) and each.requires_grad and not each.is_leaf
    ]
    if not terms or not leaves:
        return {}
    found = torch.autograd.grad(torch.stack(terms).sum(), list(leaves.values()), allow_unused=True)
    return {f"gradient:{name}": each for name, each in zip(leaves, found, strict=True)}


class Structural:
    """The backend: our reading and rewriting, and then ``run``."""

    def __init__(self, program: Program, run: Callable[..., Any]) -> None:
        self._run = run
        self._options = {f"layerzero.{name}": value for name, value in program.options.items()}
        self.reports: list[GraphReport] = []
        #: Whether states that depend on each other became one: NaN in one of them is NaN in all, and conditions see it.
        self.couples = False
        #: Whether nobody reads the last value of a loop's state: steps get gradients of zeros that eager code never makes.
        self.leaves_states = False

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(graph: torch.fx.GraphModule, given: Sequence[Any], report: GraphReport) -> Callable[..., Any]:
            self.reports.append(report)
            self.couples |= any(node.name.startswith("unit_") for node in graph.graph.nodes)
            self.leaves_states |= any(map(_leaves_states, scans_of_ours(graph)))
            return self._run(graph, given)

        return process(module, inputs, split(self._options)[0], run)

    def events(self) -> list[str]:
        """The faults of ours that were caught.

        A rolled loop hands gradients of zeros to where eager code has none: a backward pass that finds memory overwritten
        there has PyTorch's own error, and the original graph is compiled.
        """
        found = (each for report in self.reports for each in report.events if each.code in FAULTS)
        return [f"{each.code}: {each.message}" for each in found if _OVERWRITTEN not in each.message]

    def hides_nan(self) -> bool:
        """Whether an attention was rewritten whose masks are added: a kernel need not look at what they hide."""
        matches = [match for report in self.reports for match in report.matches if match.op == "attention"]
        return any(match.rewritten and match.mask and "selects_masked" not in match.attributes for match in matches)

    def edits(self) -> Counter[str]:
        """What was rewritten, by name."""
        found: Counter[str] = Counter()
        for report in self.reports:
            found["rolled"] += sum(loop.rolled for loop in report.loops)
            found["loops kept"] += sum(not loop.rolled for loop in report.loops)
            refuted = [event.message for event in report.events if event.code == "EDIT_REFUTED"]
            found.update(f"refuted: {message.split(':')[0]}" for message in refuted)
            found["near misses"] += len(report.near_misses)
            found.update(f"kernel {match.op}" for match in report.matches if match.rewritten)
        return +found


def _eager(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
    """Run a graph as it is, scans as plain loops."""
    for _, child, _ in pipeline.graphs(module):
        for node in child.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
            node.target = run_steps
        child.recompile()
    return module.forward


def _aot(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return torch._dynamo.lookup_backend("aot_eager")(module, inputs)


def _inductor(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return inductor.compile_graph(module, inputs, configured.config_of(None, {}), "")


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts what the stages of reading change."""
    found: Counter[str] = Counter()

    def counted(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = stage(*args, **kwargs)
            if isinstance(result, Iterator):
                result = list(result)
            is_list = isinstance(result, (list, tuple))
            found[name] += sum(not isinstance(each, NearMiss) for each in result) if is_list else int(result or 0)
            found["unrolled"] += (
                sum(each.unrolled for each in result if isinstance(each, Distributed)) if is_list else 0
            )
            return result

        return run

    apply_places = reading.apply_places

    def counted_places(module: torch.fx.GraphModule, does: str, edit: Callable[..., int], *given: Any) -> Any:
        made, faults = apply_places(module, does, edit, *given)
        found[edit.__name__] += made
        return made, faults

    with ExitStack() as stack:
        stack.enter_context(patch.object(reading, "apply_places", counted_places))
        for name, number in _LONG.items():
            stack.enter_context(patch.object(worthwhile, name, number))
        for name in STAGES:
            stack.enter_context(patch.object(reading, name, counted(name, getattr(reading, name))))
        yield found


@dataclass(frozen=True)
class _Expected:
    """What eager gives, and of what is computed in bfloat16 the same in float64, if it runs in that."""

    eager: list[Observation]
    exact: list[Observation] | None = None

    @classmethod
    def of(cls, program: Program) -> _Expected:
        eager = observe(program, None)
        if "bfloat16" not in f"{program.source} {program.inputs}":
            return cls(eager)
        try:
            return cls(eager, observe(_in_float64(program), None))
        except Exception:  # noqa: BLE001 a dtype is spelled out somewhere
            return cls(eager)


def _in_float64(program: Program) -> Program:
    """The same on the same numbers."""
    source = re.sub(r"(autocast\(.cpu.), dtype=torch.bfloat16\)", r"\1, enabled=False)", program.source)
    source = re.sub("torch.(bfloat16|float32)", "torch.float64", source)
    inputs = {name: f"({text}).double()" if ".to(" in text else text for name, text in program.inputs.items()}
    return replace(program, source=source, inputs=inputs)


def check(program: Program) -> Verdict:
    """Compare a program, compiled, with itself.

    Most programs are compared without AOTAutograd, which takes most of the time; what differs then must differ with it.
    """
    try:
        expected = _Expected.of(program)
    except Exception:  # noqa: BLE001 most random programs are programs, and the others are left out
        return Verdict(False)
    if any(_is_wild(value) for each in expected.eager for value in each.values()):
        return Verdict(False)
    verdict = Verdict(True)
    for run in (_aot,) if program.seed % 10 == 0 else (_eager, _aot):
        verdict = _compare(program, run, expected)
        if verdict.finding is None:
            break
    return verdict


def _compare(program: Program, run: Callable[..., Any], expected: _Expected) -> Verdict:
    backend = Structural(program, run)
    breaks = counters["graph_break"].total()
    with counting() as stages:
        found = _observed(program, backend)
    is_broken = counters["graph_break"].total() > breaks
    edits, events = backend.edits() + +stages, backend.events()
    # States that depend on each other become the product with a matrix, zeros of which make NaN of infinities.
    # Of a factor that a condition leaves out, eager multiplies a gradient of zero by what it is (docs/recurrences.md).
    has_special = bool(re.search(r"special\(|log|sqrt|pow", f"{program.source} {program.inputs}"))
    has_factors = has_special and bool(edits["kernel scan"])
    # An infinite factor of a sum meets every summand by itself there.
    has_sums = has_factors or bool(edits["distribute"])
    has_attention = has_special and bool(edits["kernel attention"])
    # PyTorch's own kernels differ in rows of minus infinity that nothing masks, and drop NaN in rows of few keys (docs/masks.md).
    is_undefined = has_attention and "scaled_dot_product_attention" in program.source
    hides_nan = backend.hides_nan() or (has_attention and (program.is_dynamic or len(set(program.sizes)) > 1))
    # What is stored and never read gets a gradient of zeros from eager code, and none where stores are forwarded.
    has_unread = has_special and bool(edits["forward_stores"])
    may_differ = Open(
        has_sums, bool(hides_nan), has_factors or has_unread, is_undefined or (has_special and backend.couples)
    )
    differs = _against(program, found, expected, may_differ)
    is_torchs = _OVERWRITTEN in differs.get("raised:", "") and is_broken
    differs = {} if is_torchs else differs
    if run is _aot and "raised:" in differs:  # as of views among results, which Inductor's are not, and inside of scans
        return _compare(program, _inductor, expected)
    differs |= {f"event:{event.split(':')[0]}": event for event in events}
    # Of what infinities add up to, a comparison makes finite numbers; gradients of zeros make NaN of them (docs/recurrences.md).
    is_compared = may_differ.sums and _COMPARES.search(program.source)
    is_left = backend.leaves_states and all(name.startswith("gradient:") for name in differs)
    if differs and "special(" in f"{program.inputs}" and (is_compared or is_left):  # other numbers tell
        inputs = {name: text.replace("special(", "torch.randn(") for name, text in program.inputs.items()}
        return _compare(ordinary := replace(program, inputs=inputs), run, _Expected.of(ordinary))
    if differs:
        without = _against(program, _observed(program, run), expected)
        if {name.split(":")[0] for name in differs} == {"strides"}:
            # Strides that PyTorch itself tells wrongly are an error of Inductor's: it compares them.
            without |= _against(program, _observed(program, "inductor"), expected)
        is_torchs = bool(without)
        differs = {} if "raised:" in without else {name: text for name, text in differs.items() if name not in without}
    return Verdict(True, Finding(program, differs, events, edits) if differs else None, is_torchs, edits)


def _leaves_states(scan: torch.fx.Node) -> bool:
    return not set(range(len(scan.args[1]))) <= {user.args[1] for user in scan.users}


def _observed(program: Program, backend: Any) -> list[Observation] | dict[str, str]:
    try:
        return observe(program, backend)
    except Exception as error:  # noqa: BLE001 what compiles to something that raises is a finding
        return {"raised:": f"{type(error).__name__}: {str(error)[:600]}"}


def _against(
    program: Program,
    found: list[Observation] | dict[str, str],
    expected: _Expected,
    may_differ: Open = _NOTHING,
) -> dict[str, str]:
    if isinstance(found, dict):
        return found
    tolerance = tolerance_of(f"{program.source} {program.inputs}")
    differs: dict[str, str] = {}
    exact = expected.exact or [{} for _ in expected.eager]
    for call, (one, other, truth) in enumerate(zip(found, expected.eager, exact, strict=True)):
        for name in one.keys() | other.keys():
            is_open = may_differ.in_gradients() if name.startswith("gradient:") else may_differ
            text = difference(one.get(name), other.get(name), truth.get(name), tolerance, is_open)
            if text:
                differs.setdefault(name, f"call {call}: {text}")
    return dict(sorted(differs.items()))


def _is_wild(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    finite = value[value.isfinite()] if value.is_floating_point() else value
    return bool(finite.abs().max() > _WILD) if finite.numel() else False
