"""Loops that Dynamo has unrolled, found and rolled again into ``torch.ops.higher_order.scan``.

:mod:`search` finds calls that repeat, :mod:`steps` compares the steps, :mod:`body` reads one of them as a
function of the state, of slices and of what stays the same, :mod:`outputs` finds what is read of them, :mod:`roll`
puts the scan in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.passes.editing.edit import Rewrite, Unproven, apply
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.expressions import is_constant
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import Failure, NearMiss, RefusedError, where_of
from lz_compile.passes.graph.view import known_tensor, needed, read, tensor_of
from lz_compile.passes.loops.roll import worthwhile
from lz_compile.passes.loops.roll.facts import Loop, read_loop
from lz_compile.passes.loops.roll.roll import SCAN, roll, trial_scan
from lz_compile.passes.loops.roll.search import Program, Run, phases, runs
from lz_compile.passes.loops.roll.slices import Versions
from lz_compile.passes.loops.roll.steps import Grid, Made, Steps, parameters_of
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS

_PHASES = 3
_MULTIPLES = 4
_MOST_TRIED = 64

#: Whether a scan under these modes is one that there are kernels for.
IsSpecial = Callable[[fx.Node, Ambient], bool]


@dataclass(frozen=True)
class RolledLoop:
    """A loop that was found, and whether it was rolled (``scan``) or why not (``kept``)."""

    where: str
    steps: int | str
    calls: int
    carried: tuple[str, ...]
    streams: tuple[str, ...]
    around: int
    outputs: tuple[str, ...]
    scan: fx.Node | None
    kept: Reason | None


def never(_scan: fx.Node, _ambient: Ambient) -> bool:
    """No scan is special."""
    return False


def reroll(
    module: fx.GraphModule,
    policy: str = "auto",
    is_special: IsSpecial = never,
    unproven: Unproven | None = None,
    confined: Reason | None = None,
) -> list[RolledLoop | NearMiss | Failure]:
    """Roll the loops of a graph, in place, each of them proven; recompiling is the caller's.

    Args:
        module: its graph is rewritten; the steps become submodules.
        policy: ``"auto"`` rolls what is special or long, ``"roll"`` every loop, ``"keep"`` what is special.
        is_special: asked with a scan in a graph of its own, with placeholders for all that the loop reads.
        unproven: gets the loops that were rolled and could not be proven, with the reason.
        confined: why only what is special may be rolled, where that is not for the policy.

    Returns:
        the loops, in order of size, what looks like one and is none, with the reason, and faults of ours; what they
        concern is as it was.
    """
    rolled: list[RolledLoop | NearMiss | Failure] = []
    failed: dict[str, Failure] = {}
    while True:
        loops, misses = _loops_of(module.graph)
        found: list[RolledLoop | NearMiss | Failure] = []
        replaced: set[fx.Node] = set()
        is_outdated, graph = False, module.graph
        for loop in sorted(loops, key=lambda loop: -loop.steps.start):
            if loop.name in failed:
                continue
            if graph is not module.graph or not replaced.isdisjoint(loop.readers):
                is_outdated = True  # a later loop, or its results, read this one, or an edit was taken back: look again
                continue
            result = _rolled(module, loop, policy, is_special, unproven, confined)
            if isinstance(result, Failure):
                failed[loop.name] = result
                continue
            found.append(result)
            if isinstance(result, RolledLoop) and result.scan is not None:
                replaced |= loop.replaced
        if not is_outdated:
            return [*rolled, *reversed(found), *misses, *failed.values()]
        rolled.extend(each for each in reversed(found) if isinstance(each, RolledLoop) and each.scan is not None)


def scans_of(module: fx.GraphModule) -> Iterator[RolledLoop]:
    """The scans that a graph has, as loops that were rolled before anybody saw them: by ``roll_loops``, or by hand."""
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        callee, initial, streams, around = node.args
        step = module.get_submodule(callee.target)
        graph = step.graph if isinstance(step, fx.GraphModule) else fx.Graph()
        results = next((list(each.args[0]) for each in graph.find_nodes(op="output")), [])
        size = known_tensor(streams[0]).shape[0]
        yield RolledLoop(
            where=where_of(node),
            steps=size if isinstance(size, int) else str(size),
            calls=sum(each.op in ("call_function", "call_method", "call_module") for each in graph.nodes),
            carried=tuple(map(_text, initial)),
            streams=("slices",) * len(streams),
            around=len(around),
            outputs=tuple(str(list(known_tensor(each).shape)) for each in results[len(initial) :]),
            scan=node,
            kept=None,
        )


def _loops_of(graph: fx.Graph) -> tuple[list[Loop], list[NearMiss]]:
    program = Program(graph)
    stretches = runs(program.kinds)
    return _Search(program).loops(stretches) if stretches else ([], [])


def _rolled(
    module: fx.GraphModule,
    loop: Loop,
    policy: str,
    is_special: IsSpecial,
    unproven: Unproven | None,
    confined: Reason | None,
) -> RolledLoop | NearMiss | Failure:
    kept = confined or (None if policy == "roll" else _too_short(loop, policy))
    scan = None
    try:
        if kept is not None and _may_be_special(loop, policy) and is_special(trial_scan(loop), loop.ambient):
            kept = None
        if kept is None:
            scan = apply(
                module, Rewrite(f"rolling the loop at {loop.steps.where}", partial(roll, loop, module)), unproven
            )
    except RefusedError as refusal:
        return NearMiss("scan", loop.steps.node(0, 0), refusal.reason, refusal.edit, loop.steps.where)
    except Exception as error:  # noqa: BLE001 one loop must not cost the others; the caller makes an event of it
        return Failure("scan", loop.steps.where, error)
    return _described(loop, scan, kept)


def _may_be_special(loop: Loop, policy: str) -> bool:
    """Whether a kernel may be worth it."""
    names = {call.name for call in map(read, loop.step.module.graph.nodes) if call is not None}
    multiplies, sums = names & (contraction.PRODUCTS | {"linear"}), names & {"sum", "mean"}
    if multiplies or sums:
        is_one_pass = policy != "keep" and not multiplies and not loop.has_gradient and _is_on_cpu(loop)
        least = worthwhile.LEAST_SUMS if is_one_pass else worthwhile.LEAST_CONTRACTIONS
        return loop.has_streams and loop.steps.count >= least
    return policy == "keep" and loop.has_streams and loop.steps.count >= worthwhile.LEAST_POINTWISE


def _is_on_cpu(loop: Loop) -> bool:
    found = [tensor_of(loop.body.slots[slot].like) for slot in loop.step.slots]
    return all(each is not None and each.device.type == "cpu" for each in found)


def _too_short(loop: Loop, policy: str) -> Reason | None:
    if policy == "keep":
        limits = worthwhile.LEAST_CONTRACTIONS, worthwhile.LEAST_POINTWISE
        few = "kernels are for loops over time, of {} steps or more ({} where none has a product)".format(*limits)
        why = "nothing is known of its step" if _may_be_special(loop, policy) else few
        return Reason("LOOPS_KEPT", f"layerzero.loops is 'keep', and {why}")
    steps = loop.steps.count
    graph = len(loop.steps.program.nodes) * (2 if loop.has_gradient else 1)
    least = worthwhile.WORTHWHILE_STEPS if loop.has_streams else worthwhile.WORTHWHILE_ITERATIONS
    if steps >= least and worthwhile.takes_long(steps * loop.step.calls, graph):
        return None
    text = f"{steps} steps of {loop.step.calls} calls, in a graph of {graph:,}, run as fast or faster one by one"
    return Reason("LOOP_SHORT", f"{text}, and do not take minutes to compile")


def _described(loop: Loop, scan: fx.Node | None, kept: Reason | None) -> RolledLoop:
    body, step, steps = loop.body, loop.step, loop.steps
    return RolledLoop(
        where=steps.where,
        steps=steps.count,
        calls=step.calls,
        carried=tuple(_text(body.slots[slot].like) for slot in step.slots),
        streams=tuple(type(body.streams[number]).__name__.lower() for number in step.streams),
        around=len(step.around),
        outputs=tuple(str(list(result.shape)) for result in step.results),
        scan=scan,
        kept=kept,
    )


def _text(node: fx.Node) -> str:
    tensor = tensor_of(node)
    return "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class _Search:
    """Reads stretches of repeated calls as loops, the largest first; what is part of a loop is not looked at again."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._versions: Versions | None = None
        self._taken = bytearray(len(program.nodes))

    def loops(self, stretches: list[Run]) -> tuple[list[Loop], list[NearMiss]]:
        """The loops among stretches, and near misses where no loop was found in a stretch that looks like one."""
        found: list[Loop] = []
        misses: dict[int, NearMiss] = {}
        pending = [free for stretch in stretches[_MOST_TRIED - 1 :: -1] for free in self._free(stretch)]
        while pending:
            run = pending.pop()
            if any(self._taken[run.start : run.stop]):
                pending.extend(self._free(run))
                continue
            loop, refusal = self._loop(run)
            if loop is not None:
                found.append(loop)
                self._taken[loop.steps.start : loop.steps.stop] = b"\1" * (loop.steps.stop - loop.steps.start)
                pending.extend(self._free(run))
            elif refusal is not None and self._is_over_time(run):
                node = self._program.nodes[run.start]
                pieces = frozenset(self._program.nodes[run.start : run.stop])
                misses[run.start] = NearMiss("scan", node, refusal.reason, refusal.edit, where_of(node), pieces)
        kept = [miss for start, miss in misses.items() if not self._taken[start]]
        return found, kept

    def _free(self, run: Run) -> Iterator[Run]:
        """The parts of a stretch that belong to no loop yet."""
        start = run.start
        while run.stop - start >= LEAST_STEPS * run.period:
            stop = self._taken.find(1, start, run.stop)
            stop = run.stop if stop < 0 else stop
            if stop - start >= LEAST_STEPS * run.period:
                yield Run(start, stop, run.period)
            after = self._taken.find(0, stop, run.stop)
            start = run.stop if after < 0 else after

    def _is_over_time(self, run: Run) -> bool:
        """Whether what repeats goes along a dimension of some data: each step reads, or overwrites, a piece of its own.

        Most of a stack of layers have parameters that no other layer reads.
        """
        readers: dict[fx.Node, set[int]] = {}
        pieces: dict[fx.Node, set[str]] = {}
        for position in range(run.start, run.stop):
            node, leaves = self._program.nodes[position], self._program.leaves[position]
            for parameter in parameters_of([leaves]):
                readers.setdefault(parameter, set()).add((position - run.start) // run.period)
            calls = (read(each) for each in (node, *leaves) if isinstance(each, fx.Node))
            for call in filter(None, calls):
                if call.name in _CUTTING and isinstance(call.input, fx.Node):
                    index = call.node.args[1:2] if call.name == "setitem" else call.node.args[1:]
                    pieces.setdefault(call.input, set()).add(f"{index}{call.node.kwargs}")
        own = {step for steps in readers.values() if len(steps) == 1 for step in steps}
        is_moving = any(len(found) >= LEAST_STEPS for found in pieces.values())
        return is_moving and 2 * len(own) <= run.steps and reads_data(self._program.nodes[run.start : run.stop])

    def _loop(self, run: Run) -> tuple[Loop | None, RefusedError | None]:
        refusal: RefusedError | None = None
        for multiple in range(1, _MULTIPLES + 1):
            longer = Run(run.start, run.stop, run.period * multiple)
            try:
                for steps in self._phases(longer):
                    try:
                        return self._untangled(self._read(steps)), None
                    except RefusedError as error:
                        refusal = refusal or error
                        if error.reason.code in _FINAL:
                            raise
            except RefusedError as error:
                refusal = refusal or error
                if error.reason.code in _FINAL:
                    break
        return None, refusal if refusal is not None and refusal.reason.code not in _SILENT else None

    def _untangled(self, loop: Loop) -> Loop:
        """Of a loop whose steps read only what was made two (or more) steps ago, the loop of twice as many calls.

        Its steps belong to two recurrences in turns, as those of a loop that walks a sequence in both directions do.
        """
        lags = {made.lag for row in loop.steps.wiring for made in row if isinstance(made, Made) and made.lag}
        apart = math.gcd(*lags)
        if apart < 2:
            return loop
        period = loop.steps.period * apart
        try:
            found = [self._read(steps) for steps in self._phases(Run(loop.steps.start, loop.steps.stop, period))[:1]]
        except RefusedError:
            return loop  # as it was read
        covered = [each for each in found if (each.steps.count + 2) * period > loop.steps.stop - loop.steps.start]
        return covered[0] if covered else loop

    def _phases(self, run: Run) -> list[Steps]:
        """The loops that the likeliest beginnings of a step give, the longest first.

        Raises:
            RefusedError: there is none.
        """
        if run.steps < LEAST_STEPS:
            return []
        if self._versions is None:
            self._versions = Versions(self._program)
        found: list[Steps] = []
        refusal: RefusedError | None = None
        for phase in phases(self._program, run)[:_PHASES]:
            try:
                found.append(Grid(self._program, self._versions, phase).steps())
                if found[-1].count == phase.steps:
                    break
            except RefusedError as error:
                refusal = refusal or error
                if error.reason.code in _FINAL:
                    break
        if refusal is not None and (not found or refusal.reason.code in _FINAL):
            raise refusal
        return sorted(found, key=lambda steps: -steps.count)

    def _read(self, steps: Steps) -> Loop:
        columns = (
            steps.column(index, leaf)
            for index, row in enumerate(steps.wiring)
            for leaf, made in enumerate(row)
            if made is None
        )
        if parameters_of([column for column in columns if column[0] is not column[-1]]):
            raise RefusedError("LAYERS", "every step has parameters of its own", "share them")
        return read_loop(steps, steps.versions.effects.ambient(steps.node(0, 0)))


#: Refusals that hold wherever a step is taken to begin.
_FINAL = frozenset(
    {"LAYERS", "NO_STATE", "RANDOM", "MODE_CHANGES_INSIDE", "DATA_DEPENDENT", "NESTED_GRAPH", "INPUT_OVERWRITTEN"}
    | {"STEPS_UNREAD"}
)
#: Calls that read a piece of a tensor, or of several, or overwrite it.
_CUTTING = frozenset({"getitem", "setitem", "select", "narrow"})
#: Refusals of what is no loop over anything: the same calls on different things.
_SILENT = frozenset({"LAYERS", "NO_STATE"})


# ---- loops that make constants ---------------------------------------------------------------------------------------


def reads_data(nodes: Iterable[fx.Node]) -> bool:
    """Whether anything of what these calls compute depends on values that the graph is given, and not on shapes alone."""

    def sources(node: fx.Node) -> Iterable[fx.Node]:
        call = read(node)
        return () if call is not None and is_constant(call) else node.all_input_nodes

    given = (node for node in needed(nodes, (), sources) if node.op in ("placeholder", "get_attr"))
    return any(tensor_of(node) is not None for node in given)
