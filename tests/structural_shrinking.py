"""A failing program made smaller: statements taken out, expressions replaced by what they are made of, sizes reduced."""

from __future__ import annotations

import ast
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from structural_oracle import Finding, Verdict, check
from structural_programs import Program


def shrink(finding: Finding, seconds: float = 120.0, check: Callable[[Program], Verdict] = check) -> Finding:
    """The smallest program found in a time that still differs in one of the same kinds."""
    deadline = time.monotonic() + seconds
    kinds = finding.kinds
    is_smaller = True
    while is_smaller and time.monotonic() < deadline:
        is_smaller = False
        for candidate in _smaller(finding.program):
            if time.monotonic() > deadline:
                break
            found = check(candidate).finding
            if found is not None and kinds & found.kinds:
                finding, is_smaller = found, True
                break
    return finding


def _smaller(program: Program) -> Iterator[Program]:
    tree = ast.parse(program.source)
    for smaller in (*_without_statements(tree), *_simpler_expressions(tree)):
        source = ast.unparse(ast.fix_missing_locations(smaller))
        if len(source) < len(program.source):
            yield replace(program, source=source)
    if len(program.sizes) > 1:
        yield replace(program, sizes=program.sizes[:1])
    for name in program.options:
        yield replace(program, options={key: value for key, value in program.options.items() if key != name})
    for op in program.options.get("lock", {}):
        lock = {key: value for key, value in program.options["lock"].items() if key != op}
        yield replace(program, options={**program.options, "lock": lock})
    for name, role in program.roles.items():
        if role != "constant":
            yield replace(program, roles={**program.roles, name: "constant"})
        plain = program.inputs[name].replace(".round()", "").replace(".rand(", ".randn(")
        plain = plain.replace("special(", "torch.randn(")
        for word in ("transposed", "strided", "expanded"):
            plain = plain.replace(f"{word}(", "(")
        if plain != program.inputs[name]:
            yield replace(program, inputs={**program.inputs, name: plain})
    if program.is_inference:
        yield replace(program, is_inference=False)
    if program.is_dynamic is not None:
        yield replace(program, is_dynamic=None)


def _without_statements(tree: ast.Module) -> Iterator[ast.Module]:
    """Bodies with a statement fewer, and blocks replaced by what is in them; the last statements first."""
    count = sum(isinstance(getattr(node, "body", None), list) for node in ast.walk(tree))
    for block in range(1, count):  # the first is the module
        for at in reversed(range(len(_body(tree, block)))):
            for keeps_inside in (False, True):
                smaller = copy.deepcopy(tree)
                body = _body(smaller, block)
                inside = getattr(body[at], "body", None)
                if keeps_inside and (inside is None or isinstance(body[at], ast.For)):
                    continue
                body[at : at + 1] = inside if keeps_inside and inside else []
                if body:
                    yield smaller


def _body(tree: ast.Module, number: int) -> list[ast.stmt]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]  # type: ignore[attr-defined]
    return bodies[number]  # type: ignore[no-any-return]


def _parts(node: ast.AST) -> list[ast.expr]:
    """The expressions that may stand in the place of one."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Call):
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [
            each
            for each in (*receiver, *node.args)
            if not (isinstance(each, ast.Name) and each.id in ("torch", "F", "m"))
        ]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return [node.value]
    return list(node.elts) if isinstance(node, ast.Tuple) else []


def _simpler_expressions(tree: ast.Module) -> Iterator[ast.Module]:
    count = len(list(ast.walk(tree)))
    for number in range(count):
        node = _nth(tree, number)
        for part in range(len(_parts(node))):
            smaller = copy.deepcopy(tree)
            old = _nth(smaller, number)
            if _put(smaller, old, _parts(old)[part]):
                yield smaller
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
            for part in range(len(node.elts)):
                smaller = copy.deepcopy(tree)
                del _nth(smaller, number).elts[part]  # type: ignore[attr-defined]
                yield smaller


def _nth(tree: ast.AST, number: int) -> ast.AST:
    return list(ast.walk(tree))[number]


def _put(tree: ast.AST, old: ast.AST, new: ast.expr) -> bool:
    """Replace an expression by another; whether it stands where one is computed."""
    if not isinstance(getattr(old, "ctx", ast.Load()), ast.Load):
        return False
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
                return True
            if isinstance(value, list) and any(each is old for each in value):
                value[next(at for at, each in enumerate(value) if each is old)] = new
                return True
    return False
