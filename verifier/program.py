r"""`code`: does a program pass its tests? It runs in the sandbox; what is expected never goes there, and every comparison is made here.

The gold answer is JSON, the tests or {"tests": …, "limits": …}; the row's meta may have `tests` and `limits` instead. Tests:
{"type": "call", "fn": …, "cases": [[arguments, expected], …], "cls"?: …}, {"type": "assert", "src": [statement, …]} or
{"type": "stdio", "cases": [[stdin, expected stdout], …]}. `limits`: time_s (CPU seconds of one run: all calls or asserts, or one stdin),
mem_mb, out_kb.

Options, the default first: `sandbox` = "auto" | a rung | "none"; `limits`; `tuples` = "lists" | "strict" (does a tuple pass for a list?);
`numbers` = "value" | "strict" (does 3.0 pass for 3?); `float_tolerance` = 1e-9 (relative, where a float is expected);
`fence` = "optional" | "required".
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from verifier import program_asserts, sandbox
from verifier.extract import after_thinking
from verifier.program_values import Rules, decode, matches
from verifier.verdict import Verdict, error, timeout, value

_FENCE = re.compile(r"^[ \t]*```[ \t]*([a-zA-Z0-9_+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = {"", "python", "py", "python3"}
MAX_PROGRAM = 256 << 10  # characters
MAX_CASES = 1000


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """1 when the program in `response` passes every test, else 0; an error without usable tests or without a sandbox."""
    tests, limits = _tests(gold, options, meta)
    if isinstance(tests, str):
        return error(tests)
    found = sandbox.probe(str(options.get("sandbox", "auto")))
    if not found.rung:
        return error(f"{found}: install bubblewrap, or set verifier_options.code.sandbox = 'none' to run untrusted programs without one")
    code = response if meta.get("program") else extract(response, str(options.get("fence", "optional")))
    if code is None or not code.strip():
        return value(0, "no program")
    if len(code) > MAX_PROGRAM:
        return value(0, "the program is too long")
    try:
        code.encode()
    except UnicodeEncodeError:
        return value(0, "the program is not text")
    rules = Rules(
        options.get("tuples", "lists") == "strict", options.get("numbers", "value") == "strict", float(options.get("float_tolerance", 1e-9))
    )
    try:
        if tests["type"] == "stdio":
            return _stdio(code, tests["cases"], limits, found.rung)
        if tests["type"] == "call":
            return _call(code, tests, limits, found.rung, rules)
        return _asserts(code, tests["src"], limits, found.rung, bool(options.get("trust_asserts", False)))
    except program_asserts.Opaque as e:
        return error(str(e))


def prepare(options: Mapping[str, Any]) -> str:
    """Find the sandbox that holds on this machine."""
    return str(sandbox.probe(str(options.get("sandbox", "auto"))))


def _tests(gold: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """The tests and the limits; a sentence instead of the tests when they cannot be used."""
    tests, given = meta.get("tests"), meta.get("limits")
    if tests is None:
        try:
            tests = json.loads(gold)
        except (ValueError, RecursionError):
            return "the gold answer of a program must be JSON with its tests", {}
    if isinstance(tests, dict) and "tests" in tests:
        tests, given = tests["tests"], given or tests.get("limits")
    limits = sandbox.limits_of({**(options.get("limits") or {}), **(given or {})})
    kind = tests.get("type") if isinstance(tests, dict) else None
    cases = tests.get({"call": "cases", "stdio": "cases", "assert": "src"}.get(str(kind), "")) if isinstance(tests, dict) else None
    if not isinstance(cases, list):
        return f"tests of type {kind!r} are none of call, assert, stdio", {}
    if not cases or len(cases) > MAX_CASES:
        return f"{len(cases)} tests: there must be 1 to {MAX_CASES}", {}
    if kind != "assert" and not all(isinstance(c, list | tuple) and len(c) == 2 for c in cases):
        return "every case must be a pair of what goes in and what is expected", {}
    if kind == "call" and not str(tests.get("fn", "")).isidentifier():
        return f"tests.fn = {tests.get('fn')!r} is not the name of a function", {}
    return tests, limits


def extract(response: str, fence: str = "optional") -> str | None:
    """The program of a response: the last fenced Python block after the thinking; without a fence all of it, unless one is required."""
    rest = after_thinking(response)
    if rest is None:
        return None
    blocks = [body for language, body in _FENCE.findall(rest if rest.endswith("\n") else rest + "\n") if language.lower() in _PYTHON]
    if blocks:
        return blocks[-1]
    return None if fence == "required" or "```" in rest else rest


def _bytes(text: Any) -> bytes:
    if isinstance(text, dict):
        text = "".join(str(t) * int(n) for t, n in text["rep"])
    return str(text).encode("utf-8", "surrogatepass")


def _lines(text: str) -> list[str]:
    """Output for comparison: trailing white space does not count. A carriage return is a character like any other."""
    return [line.rstrip(" \t") for line in text.rstrip().split("\n")]


def _stdio(code: str, cases: Sequence[Any], limits: Mapping[str, float], rung: str) -> Verdict:
    for i, (stdin, expected) in enumerate(cases):
        out = sandbox.run(sandbox.Job(code, "stdio", _bytes(stdin)), limits, rung)
        why = _unfinished(out, limits)
        if why:
            return timeout(f"case {i}: {why}") if _late(out) else value(0, f"case {i}: {why}")
        said, wanted = out.stdout.decode("utf-8", "replace"), _bytes(expected).decode("utf-8", "replace")
        if _lines(said.replace("\r\n", "\n")) != _lines(wanted.replace("\r\n", "\n")):
            return value(0, f"case {i}: other output")
    return value(1, f"{len(cases)} cases")


def _late(out: sandbox.Outcome) -> bool:
    return out.ended == "wall" or (out.ended == "signal" and out.code == signal.SIGXCPU)


def _unfinished(out: sandbox.Outcome, limits: Mapping[str, float]) -> str:
    """Why a run did not come to its end, or ''."""
    if _late(out):
        return "past its time"
    if out.ended == "output":
        return f"more than {limits['out_kb']:g} KiB of output"
    if out.ended == "signal":
        return f"ended by signal {out.code}"
    return f"exit code {out.code}" if out.code else ""


def _call(code: str, tests: Mapping[str, Any], limits: Mapping[str, float], rung: str, rules: Rules) -> Verdict:
    target = f"{tests['cls']}().{tests['fn']}" if tests.get("cls") else tests["fn"]
    steps = [("call", target, arguments) for arguments, _ in tests["cases"]]
    out = sandbox.run(sandbox.Job(code, "steps", steps=steps), limits, rung)
    for i, (_, expected) in enumerate(tests["cases"]):
        if i >= len(out.values):
            return _short(out, i, limits)
        if not matches(expected, decode(out.values[i]), rules):
            return value(0, f"case {i}: another value")
    return value(1, f"{len(steps)} cases")


def _short(out: sandbox.Outcome, at: int, limits: Mapping[str, float]) -> Verdict:
    """A run that did not reach step `at`."""
    why = out.raised and f"raised {out.raised}" or _unfinished(out, limits) or "ended early"
    return timeout(f"step {at}: {why}") if _late(out) else value(0, f"step {at}: {why}")


def _asserts(code: str, sources: Sequence[str], limits: Mapping[str, float], rung: str, trusting: bool) -> Verdict:
    plan = program_asserts.plan(sources, trusting)
    if not any(p.check for p in plan):
        return error("the tests assert nothing")
    steps = [step for p in plan for step in p.steps]
    out = sandbox.run(sandbox.Job(code, "steps", steps=steps), limits, rung)
    at = 0
    for i, part in enumerate(plan):
        end = at + len(part.steps)
        if end > len(out.values):
            return _short(out, len(out.values), limits)
        if part.check is not None and not part.check([decode(v) for v in out.values[at:end]]):
            return value(0, f"statement {i} does not hold")
        at = end
    return value(1, f"{len(plan)} statements")
