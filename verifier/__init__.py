"""Verifiers score answers; the pool runs them in processes that can be killed.

A verifier is a module with

    verify(gold: str, response: str, options: Mapping, meta: Mapping) -> Verdict      required, pure
    prepare(options: Mapping) -> str | None        optional: what takes time at first use, done ahead; returns what the log should say
    canonical(gold: str, options: Mapping, meta: Mapping) -> str | None               optional: a response that must earn 1

and one line in `VERIFIERS`. `options` are the recipe's (`verifier_options.NAME`), `meta` is the row's (`Prompt.meta`).
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

from rollout.errors import UserError
from verifier.verdict import Verdict


class Entry(NamedTuple):
    """Where a verifier lives, and whether the same answer may be given the same verdict without asking again."""

    module: str
    cached: bool = True


VERIFIERS: dict[str, Entry] = {
    "numeric": Entry("verifier.numeric"),
    "gsm8k": Entry("verifier.gsm8k"),
    "math": Entry("verifier.mathematics"),
    "code": Entry("verifier.program", cached=False),
    "format": Entry("verifier.shape"),
    "function": Entry("verifier.custom", cached=False),
    "gym": Entry("verifier.gym"),
    "random": Entry("verifier.chance"),
}


class Verifier(Protocol):
    """What `load` returns: a module, seen as its two functions."""

    def verify(self, gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
        """The verdict on one response. Whatever it raises is an error of ours."""
        ...


def entry(name: str, options: Mapping[str, Any] | None = None) -> Entry:
    """The registry's entry for `name`; `options["verifier"]` lets a second name stand for a verifier with other settings.

    Raises UserError when there is no such verifier.
    """
    kind = str((options or {}).get("verifier", name))
    if kind not in VERIFIERS:
        near = difflib.get_close_matches(kind, VERIFIERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(VERIFIERS)}."
        raise UserError(f"verifier = {kind!r} is not a verifier: {hint}")
    return VERIFIERS[kind]


def load(name: str, options: Mapping[str, Any] | None = None) -> Verifier:
    """The verifier of that name, imported on first use. Raises UserError when it does not exist or its extra is missing."""
    return cast(Verifier, importlib.import_module(entry(name, options).module))


def prepare(name: str, options: Mapping[str, Any]) -> str | None:
    """Import a verifier and do ahead what it does at first use; what it has to say about this machine, if anything."""
    ahead = getattr(load(name, options), "prepare", None)
    return None if ahead is None else ahead(options)


def canonical(name: str, gold: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
    """A response that says `gold` and nothing else, or None for a verifier that has no such thing."""
    make = getattr(load(name, options), "canonical", None)
    return None if make is None else make(gold, options, meta)


def check_gold(name: str, gold: str, options: Mapping[str, Any] | None = None, meta: Mapping[str, Any] | None = None) -> str | None:
    """Why `gold` can never be matched, in words, or None when its own verifier accepts it.

    Runs in this process and without a deadline; `VerifierPool.verify` with `response=None` does the same in a killable one.
    """
    options, meta = options or {}, meta or {}
    response = canonical(name, gold, options, meta)
    if response is None:
        return None
    verdict = load(name, options).verify(gold, response, options, meta)
    if verdict.status == "value" and verdict.reward == 1:
        return None
    return verdict.detail or "its own verifier does not accept it"
