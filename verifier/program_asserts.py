"""Assert statements taken apart: calls of the program's own are made in the sandbox, the rest of the statement is worked out here.

`assert abs(f(2) - 0.5) < 1e-6` sends `f(2)` into the sandbox and keeps 0.5: an object that claims to be near everything gains nothing.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import UserError
from verifier.program_values import Strange

Step = tuple[str, str, tuple[()]]

_BUILTINS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "dict": dict, "float": float, "frozenset": frozenset, "int": int, "len": len,
    "list": list, "max": max, "min": min, "round": round, "set": frozenset, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple,
    "reversed": reversed, "isinstance": isinstance, "type": type, "range": range, "zip": zip, "repr": repr,
}  # fmt: skip
_MATH = {"isclose": math.isclose, "pi": math.pi, "inf": math.inf, "isnan": math.isnan, "sqrt": math.sqrt, "e": math.e, "nan": math.nan}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Is: lambda a, b: type(a) is type(b) and (a is b or (a is None or isinstance(a, bool)) and a == b),
    ast.IsNot: lambda a, b: not (type(a) is type(b) and (a is b or (a is None or isinstance(a, bool)) and a == b)),
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: (
        a * b if not (isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > 10**6) else Strange()
    ),
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b if isinstance(b, int | float) and abs(b) <= 64 else Strange(),
}
_STRINGS = {"lower", "upper", "strip", "split", "startswith", "endswith", "replace", "count", "join", "items", "keys", "values"}


class Opaque(UserError):
    """A test that cannot be judged outside the sandbox."""


@dataclass(frozen=True)
class Part:
    """One statement: what to do in the sandbox, and how to judge the values that come back (None: a statement that asserts nothing)."""

    steps: list[Step]
    check: Callable[[list[Any]], bool] | None


def plan(sources: Sequence[str], trusting: bool = False) -> list[Part]:
    """The statements of a test, in order. Raises Opaque for an assert that cannot be taken apart, unless `trusting`."""
    parts: list[Part] = []
    for source in sources:
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError) as e:
            raise Opaque(f"the test {source[:60]!r} is not Python") from e
        for node in body:
            parts.append(_part(node, trusting))
    return parts


def _part(node: ast.stmt, trusting: bool) -> Part:
    source = ast.unparse(node)
    whole: list[Step] = [("exec", source, ())]
    if not isinstance(node, ast.Assert):
        holds = any(isinstance(n, ast.Assert) for n in ast.walk(node))
        if holds and not trusting:
            raise Opaque(f"the assert within {source[:60]!r} cannot be judged outside the sandbox: write the cases one by one")
        return Part(whole, _claimed if holds else None)
    calls: list[ast.expr] = []
    try:
        rest = _Cut(calls).visit(node.test)
        _check_readable(rest)
        if not calls:
            raise Opaque(f"the test {source[:60]!r} does not ask the program anything")
    except Opaque:
        if not trusting:
            raise
        return Part(whole, _claimed)

    def check(values: list[Any]) -> bool:
        try:
            return bool(_value(rest, values)) and not isinstance(_value(rest, values), Strange)
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
            return False

    return Part([("eval", ast.unparse(c), ()) for c in calls], check)


def _claimed(values: list[Any]) -> bool:
    """A statement run whole in the sandbox: that it did not raise is all that is known, and the program may have seen to that."""
    return True


class _Cut(ast.NodeTransformer):
    """Takes out the largest expressions that only the program can answer, in order, and leaves their numbers."""

    def __init__(self, calls: list[ast.expr]) -> None:
        self.calls = calls

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and self._is_ours(node):
            self.calls.append(node)
            return ast.copy_location(ast.Name(id=f"${len(self.calls) - 1}", ctx=ast.Load()), node)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp | ast.Lambda):
            raise Opaque(f"the test {ast.unparse(node)[:60]!r} cannot be judged outside the sandbox: write the cases one by one")
        return self.generic_visit(node)

    @staticmethod
    def _is_ours(node: ast.expr) -> bool:
        """A name that is no builtin, and calls, attributes and items of such."""
        while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id not in _BUILTINS and node.id not in ("math", "True", "False", "None")


def _check_readable(node: ast.AST) -> None:
    for n in ast.walk(node):
        if isinstance(n, ast.Call):
            ok = (isinstance(n.func, ast.Name) and n.func.id in _BUILTINS) or (
                isinstance(n.func, ast.Attribute)
                and (n.func.attr in _STRINGS or (isinstance(n.func.value, ast.Name) and n.func.attr in _MATH))
            )
            if not ok:
                raise Opaque(f"{ast.unparse(n)[:60]!r} cannot be judged outside the sandbox")
        elif not isinstance(n, _READABLE):
            raise Opaque(f"{ast.unparse(n)[:60]!r} cannot be judged outside the sandbox")


_READABLE = (
    ast.expr_context, ast.cmpop, ast.operator, ast.boolop, ast.unaryop, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict,
    ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Attribute, ast.Subscript, ast.Slice, ast.keyword, ast.Call,
)  # fmt: skip


def _value(node: Any, values: list[Any]) -> Any:
    """The value of what is left of a test, from plain values only."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[int(node.id[1:])] if node.id.startswith("$") else _BUILTINS[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = [_value(e, values) for e in node.elts]
        return items if isinstance(node, ast.List) else tuple(items) if isinstance(node, ast.Tuple) else frozenset(items)
    if isinstance(node, ast.Dict):
        return {_value(k, values): _value(v, values) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Compare):
        left = _value(node.left, values)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = _value(right_node, values)
            if isinstance(left, Strange) or isinstance(right, Strange) or not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True
    if isinstance(node, ast.BoolOp):
        parts = [bool(_value(v, values)) for v in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp):
        x = _value(node.operand, values)
        if isinstance(x, Strange):
            return Strange()
        return (
            not x if isinstance(node.op, ast.Not) else -x if isinstance(node.op, ast.USub) else +x if isinstance(node.op, ast.UAdd) else ~x
        )
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.Subscript):
        return _value(node.value, values)[_value(node.slice, values)]
    if isinstance(node, ast.Slice):
        return slice(*(None if p is None else _value(p, values) for p in (node.lower, node.upper, node.step)))
    if isinstance(node, ast.Attribute):
        return _MATH[node.attr]
    assert isinstance(node, ast.Call)
    return _called(node, values)


def _called(node: ast.Call, values: list[Any]) -> Any:
    arguments = [_value(a, values) for a in node.args]
    if any(isinstance(a, Strange) for a in arguments):
        return Strange()
    keywords = {k.arg: _value(k.value, values) for k in node.keywords if k.arg}
    if isinstance(node.func, ast.Attribute) and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "math"):
        return getattr(_value(node.func.value, values), node.func.attr)(*arguments, **keywords)
    return _value(node.func, values)(*arguments, **keywords)
