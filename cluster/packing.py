"""Whether actors can ever find their places on the nodes of a cluster: arithmetic on numbers, exact, without Ray.

Kinds of actors are few and nodes are often alike, so all ways to fill the nodes one after another can be looked at: after each
node only those sets of actors left are kept that no other way improves on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import floor

SLACK = 1e-6  # Ray counts resources in ten-thousandths; sums of shares round
Resources = Mapping[str, float]


def most(each: Resources, node: Resources) -> float:
    """How many actors of one kind a node holds."""
    return min((floor(node.get(name, 0.0) / amount + SLACK) for name, amount in each.items() if amount > 0), default=float("inf"))


def fits(each: Mapping[str, Resources], number: Mapping[str, int], nodes: Sequence[Resources]) -> bool:
    """Whether `number[kind]` actors that take `each[kind]` fit on the nodes, every actor whole on one node."""
    kinds = [kind for kind in number if number[kind] > 0]
    left = {tuple(number[kind] for kind in kinds)}
    known: dict[tuple[object, ...], set[tuple[int, ...]]] = {}  # nodes are often alike
    for node in sorted(nodes, key=lambda n: (-n.get("GPU", 0.0), -n.get("CPU", 0.0))):
        if any(not any(rest) for rest in left):
            return True
        after = set()
        for rest in left:
            room = tuple(int(min(r, most(each[kind], node))) for kind, r in zip(kinds, rest, strict=True))
            key = (room, *sorted(node.items()))
            if key not in known:
                known[key] = _fillings([each[kind] for kind in kinds], room, node)
            after |= {tuple(r - t for r, t in zip(rest, taken, strict=True)) for taken in known[key]}
        left = _best(after)
    return any(not any(rest) for rest in left)


def _fillings(each: Sequence[Resources], room: Sequence[int], node: Resources) -> set[tuple[int, ...]]:
    """Sets of actors, at most `room` of each kind, that the node holds and to which nothing more can be added."""
    if not each:
        return {()}
    found = set()
    for counts in product(*(range(n + 1) for n in room[:-1])):
        used = list(zip(counts, each[:-1], strict=True))
        free = {name: there - sum(n * one.get(name, 0.0) for n, one in used) for name, there in node.items()}
        if all(amount >= -SLACK for amount in free.values()):
            found.add((*counts, int(min(room[-1], most(each[-1], free)))))
    return _most_of(found)


def _best(left: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Those that no other is at most in everything."""
    return {a for a in left if not any(b != a and all(y <= x for x, y in zip(a, b, strict=True)) for b in left)}


def _most_of(found: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Those that no other is at least in everything."""
    return {tuple(-x for x in a) for a in _best({tuple(-x for x in a) for a in found})}


def why_not(each: Mapping[str, Resources], number: Mapping[str, int], nodes: Sequence[Resources]) -> str | None:
    """Why the actors can never be placed on these nodes, with the numbers; None when they can.

    `each` has an entry for each of engine, rank and verifier.
    """
    keys = {"engine": "rollout.engines", "rank": "model.learner_ranks", "verifier": "verify.verifier_actors"}
    sizes = {"engine": "engine_{}s", "rank": "learner_{}s", "verifier": "verifier_{}s"}
    for resource in ("GPU", "CPU"):
        there = sum(node.get(resource, 0.0) for node in nodes)
        need = sum(number[kind] * each[kind].get(resource, 0.0) for kind in number)
        asked = ", ".join(
            f"{keys[kind]} = {number[kind]} with {sizes[kind].format(resource.lower())} = {each[kind][resource]:g}"
            for kind in number if number[kind] and each[kind].get(resource)
        )  # fmt: skip
        if need > there + SLACK:
            return f"the run needs {need:g} {resource}s ({asked}) and the cluster has {there:g} on {_nodes(nodes)}"
    has = "has" if len(nodes) == 1 else "have"
    for kind in number:
        if number[kind] and not any(most(each[kind], node) for node in nodes):
            asked = " and ".join(f"{sizes[kind].format(name.lower())} = {amount:g}" for name, amount in each[kind].items())
            return f"{asked} is to be on one node, and no node has that: the {_nodes(nodes)} {has} {_amounts(nodes)}"
    if fits(each, number, nodes):
        return None
    asked = ", ".join(
        f"{number[kind]} {kind}{'s' if number[kind] > 1 else ''} of " + " and ".join(f"{a:g} {n}s" for n, a in each[kind].items())
        for kind in number if number[kind]
    )  # fmt: skip
    return f"{asked} cannot be laid out on the {_nodes(nodes)}, which {has} {_amounts(nodes)}: each of them is to be whole on one node"


def _nodes(nodes: Sequence[Resources]) -> str:
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def _amounts(nodes: Sequence[Resources]) -> str:
    """Resources of the nodes; alike ones once."""
    texts = [f"{node.get('GPU', 0):g} GPUs and {node.get('CPU', 0):g} CPUs" for node in nodes]
    alike = {text: texts.count(text) for text in texts}
    if len(alike) == 1:
        return texts[0] + (" each" if len(nodes) > 1 else "")
    return ", ".join(text if n == 1 else f"{n} times {text}" for text, n in alike.items())
