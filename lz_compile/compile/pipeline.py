"""A compile as a list of stages: what happens between a Dynamo graph and Inductor, for it and every graph nested in it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from lz_compile.compile import reading, replacing, row_bits
from lz_compile.compile.options import Options
from lz_compile.compile.stages import Scans, Stage, State, run
from lz_compile.ground.records import Reason
from lz_compile.lowering import dynamo
from lz_compile.lowering.checkpointed_scan import checkpointed_scan
from lz_compile.passes.editing.dead import drop_dead, drop_dead_of_loops
from lz_compile.passes.editing.edit import Edit, RefutedError
from lz_compile.passes.graph.modes import ambient_behind, grad_enabled
from lz_compile.passes.graph.snapshot import Snapshot
from lz_compile.passes.inlining.guarded_sums import drop_guards
from lz_compile.passes.inlining.index_notation import spell_out_notation
from lz_compile.passes.inlining.parts_of_products import cut_factors
from lz_compile.passes.inlining.softmax_of_parts import join_softmaxes
from lz_compile.passes.inlining.stacked_terms import add_terms
from lz_compile.passes.inlining.subclasses import spell_out_subclasses
from lz_compile.passes.inlining.values import with_values
from lz_compile.passes.loops.roll.filled_parts import join_parts
from lz_compile.passes.loops.roll.forward_stores import forward_stores
from lz_compile.passes.loops.roll.roll import SCAN
from lz_compile.passes.loops.roll.scan_outputs import is_graded, scans_of_ours
from lz_compile.passes.loops.roll.unbatch import unbatch
from lz_compile.report.report import GraphReport
from lz_compile.runtime.tables import loaded as loaded_tables


def _everywhere(does: str, code: str, edit: Edit, timed: str) -> Stage:
    """An edit of all places of a graph where it can be proven."""
    return Stage(does, code, partial(reading.edit_all, does, code, edit), timed)


#: Up to what was recognised in a graph.
READ = (
    Stage("writing out numbers that are known", "INLINE_FAILED", reading.write_out_numbers, "inline"),
    Stage("taking out dropout that drops nothing", "INLINE_FAILED", reading.pass_on_inputs, "inline"),
    Stage("spelling out calls", "INLINE_FAILED", reading.spell_out, "inline"),
    _everywhere("spelling out tensor subclasses", "INLINE_FAILED", spell_out_subclasses, "inline"),
    _everywhere("adding what is stacked and summed", "INLINE_FAILED", add_terms, "inline"),
    _everywhere("spelling out index notation", "INLINE_FAILED", spell_out_notation, "inline"),
    _everywhere("joining what is filled part by part", "INLINE_FAILED", join_parts, "inline"),
    _everywhere("giving values to what is written in place", "INLINE_FAILED", with_values, "inline"),
    _everywhere("taking one softmax of what is joined", "INLINE_FAILED", join_softmaxes, "inline"),
    _everywhere("cutting factors instead of their product", "INLINE_FAILED", cut_factors, "inline"),
    _everywhere("leaving out guards that cannot bite", "INLINE_FAILED", drop_guards, "inline"),
    _everywhere("spelling out torch.vmap", "INLINE_FAILED", unbatch, "inline"),
    Stage("dropping what nobody reads", "REWRITE_FAILED", partial(reading.drop, drop_dead_of_loops), "inline"),
    _everywhere("taking what is read back of a tensor for what was stored", "LOOPS_FAILED", forward_stores, "loops"),
    Stage("reading the loops of a graph", "LOOPS_FAILED", reading.roll, "loops"),
    Stage("taking the loops of a graph apart", "LOOPS_FAILED", reading.take_apart, "loops"),
    Stage("dropping what nobody reads", "REWRITE_FAILED", partial(reading.drop, drop_dead), "loops"),
    Stage("letting checkpoints make their masks", "INLINE_FAILED", reading.make_masks_again, "inline"),
    Stage("reading a graph", "RECOGNISER_FAILED", reading.recognise, "recognise"),
    Stage("telling what was nearly recognised", "RECOGNISER_FAILED", reading.tell_misses, "recognise"),
    Stage("entering what was recognised", "REWRITE_FAILED", replacing.enter, "recognise"),
    Stage("looking for what could be computed together", "FUSION_FAILED", replacing.find_fusions, "recognise"),
)
#: From there on.
REPLACE = (
    Stage("measuring what was recognised", "MEASUREMENT_FAILED", replacing.tune),
    Stage("replacing what was recognised", "REWRITE_FAILED", replacing.replace_all),
    Stage("keeping weights in the form of kernels", "REWRITE_FAILED", replacing.keep_weights, "rewrite"),
    Stage("tidying a rewritten graph", "REWRITE_FAILED", replacing.tidy, "rewrite"),
    Stage("computing linears in pieces of rows", "REWRITE_FAILED", row_bits.replace_linears, "rewrite"),
    Stage("telling what may depend on the batch", "REWRITE_FAILED", row_bits.tell_uncovered, "rewrite"),
    Stage("computing steps of loops again backwards", "LOOPS_FAILED", replacing.checkpoint, "rewrite"),
    Stage("trying the loops that stay", "LOOPS_FAILED", replacing.try_scans, "rewrite"),
)
#: When all graphs are as they will be: what is nested in the outermost one was rewritten by then.
FOLD = (Stage("computing layers by one region", "LAYERS_FAILED", replacing.fold, "layers"),)
#: Which loops become scans, in the first try and in those after it.
_SCANS: tuple[Scans, ...] = ("any", "replaced", "none")
#: Instead of that, for a dry run.
CHOOSE = (Stage("choosing kernels", "REWRITE_FAILED", replacing.choose),)


def rewrite(module: fx.GraphModule, options: Options, report: GraphReport) -> None:
    """Inline, roll loops, recognise, choose, prove and splice in place, in ``module`` and the graphs that it calls.

    Whatever fails leaves the subgraph that it concerns untouched and is an event in ``report``.

    Raises:
        RewriteFailedError: something failed and ``options.strict`` is set.
        DispatchTableError: the table of ``options`` is refused and ``options.strict`` is set.
    """
    tables = loaded_tables.of_compile(options.dispatch_table, strict=options.strict)
    for path, child, confined in graphs(module, confined=_confines_all()):
        report.note_modules(child.graph)
        _rewrite(State(child, path, options, report, tables, kept=confined))


def _rewrite(given: State) -> None:
    """One graph through all stages, again with fewer loops as scans where one that stays must not."""
    kept, trial = given.kept, GraphReport(given.report.graph_id)
    try:
        for scans in _SCANS[kept is not None :]:
            before, trial = Snapshot(given.module), GraphReport(given.report.graph_id, seconds=trial.seconds)
            state = replace(given, report=trial, scans=scans, kept=kept, before=before)
            run((*READ, *REPLACE), state)
            if not state.misfit and not (scans == "replaced" and scans_of_ours(state.module)):
                break
            kept = kept or Reason(
                "SCAN_GRADIENTS", f"PyTorch's operator for loops gives something else: {state.misfit}"
            )
            before.restore()
        else:
            raise RefutedError(f"a loop of the source's own is another one taken apart: {state.misfit}")
    finally:
        given.report.add(trial)
    _made_again(state)


def _made_again(state: State) -> None:
    if state.is_changed:  # one that is broken then is the caller's to put back
        state.module.graph.lint()
        state.module.recompile()


def fold(module: fx.GraphModule, options: Options, report: GraphReport) -> None:
    """Compute repeated layers of a rewritten graph by one region, in place.

    Raises:
        RewriteFailedError: it failed and ``options.strict`` is set.
    """
    state = State(module, "", options, report, ())
    run(FOLD, state)
    _made_again(state)


def choose(module: fx.GraphModule, options: Options, report: GraphReport) -> None:
    """The same up to the choice of kernels: nothing is measured, proven or spliced in. Calls are spelled out in place.

    Raises:
        RewriteFailedError: something failed and ``options.strict`` is set.
        DispatchTableError: the table of ``options`` is refused and ``options.strict`` is set.
    """
    tables = loaded_tables.of_compile(options.dispatch_table, strict=options.strict)
    for path, child, confined in graphs(module, confined=_confines_all()):
        report.note_modules(child.graph)
        scans = _SCANS[confined is not None]
        run((*READ, *CHOOSE), State(child, path, options, report, tables, scans=scans, kept=confined))


def graphs(
    module: fx.GraphModule, path: str = "", confined: Reason | None = None
) -> Iterator[tuple[str, fx.GraphModule, Reason | None]]:
    """The module and the graph modules that it uses then, at any depth, each once.

    With each goes why PyTorch compiles no scan in it, where it compiles none.
    """
    yield path, module, confined
    seen: set[str] = set()
    nodes = list(module.graph.nodes)
    for place, node in enumerate(nodes):
        name = str(node.target)
        if node.op not in ("get_attr", "call_module") or name in seen:
            continue
        seen.add(name)
        child = operator.attrgetter(name)(module)
        if isinstance(child, fx.GraphModule):
            yield from graphs(child, f"{path}.{name}" if path else name, confined or _confines(node, nodes[:place]))


def _confines(callee: fx.Node, ahead: Sequence[fx.Node]) -> Reason | None:
    """Why no scan may be in a graph that is run by a checkpoint or a scan: those record gradients (2.13)."""
    for user in callee.users:
        if user.target is torch.ops.higher_order.tag_activation_checkpoint and grad_enabled(ambient_behind(ahead)):
            return _confined("IN_CHECKPOINT", "torch.utils.checkpoint")
        if user.target in (SCAN, checkpointed_scan) and is_graded(user):
            return _confined("IN_LOOP", "the step of a scan")
    return None


def _confines_all() -> Reason | None:
    """Why no scan may be in any graph: compiled autograd reads backward passes, and no step of a scan in them (2.13)."""
    if torch.is_grad_enabled() and dynamo.compiles_backward():
        return _confined("COMPILED_AUTOGRAD", "what compiled autograd compiles")
    return None


def _confined(code: str, where: str) -> Reason:
    text = f"PyTorch compiles no scan inside of {where} with gradients, and no kernel takes the place of this loop"
    return Reason(code, text)
