"""Placements that can and cannot be: small ones against every assignment tried out, and the sentences.

Does not cover: whether Ray finds a placement that there is.
"""

from __future__ import annotations

import random
import time
from itertools import product

import pytest

from cluster.packing import fits, why_not

EACH = {"engine": {"CPU": 1.0, "GPU": 1.0}, "rank": {"CPU": 1.0, "GPU": 1.0}, "verifier": {"CPU": 1.0}}


def node(gpus: float, cpus: float) -> dict[str, float]:
    return {"GPU": gpus, "CPU": cpus}


def tried_out(each: dict, number: dict, nodes: list) -> bool:
    """Every actor on every node, all combinations."""
    actors = [each[kind] for kind in number for _ in range(number[kind])]
    for places in product(range(len(nodes)), repeat=len(actors)):
        used = [{"GPU": 0.0, "CPU": 0.0} for _ in nodes]
        for place, actor in zip(places, actors, strict=True):
            for name, amount in actor.items():
                used[place][name] += amount
        if all(u[name] <= n[name] + 1e-6 for u, n in zip(used, nodes, strict=True) for name in u):
            return True
    return False


def test_it_agrees_with_every_assignment_tried_out() -> None:
    draw, seen = random.Random(0), {True: 0, False: 0}
    for _ in range(300):
        each = {
            "engine": {"CPU": draw.choice([1.0, 2.0]), "GPU": draw.choice([0.5, 1.0, 2.0, 3.0])},
            "rank": {"CPU": draw.choice([1.0, 3.0]), "GPU": draw.choice([0.3, 1.0])},
            "verifier": {"CPU": draw.choice([0.5, 1.0])},
        }
        number = {"engine": draw.randint(1, 3), "rank": draw.randint(0, 2), "verifier": draw.randint(1, 2)}
        nodes = [node(draw.randint(0, 4), draw.randint(1, 6)) for _ in range(draw.randint(1, 3))]
        found = fits(each, number, nodes)
        assert found == tried_out(each, number, nodes), (each, number, nodes)
        seen[found] += 1
    assert min(seen.values()) > 50


@pytest.mark.parametrize(
    ("gpus", "number", "nodes", "said"),
    [
        (1, {"engine": 5, "rank": 4, "verifier": 1}, [node(4, 16)] * 2, [
            "needs 9 GPUs (rollout.engines = 5 with engine_gpus = 1, model.learner_ranks = 4 with learner_gpus = 1)",
            "the cluster has 8 on 2 nodes",
        ]),
        (1, {"engine": 2, "rank": 2, "verifier": 9}, [node(4, 8)], ["needs 13 CPUs", "verify.verifier_actors = 9", "has 8 on 1 node"]),
        (8, {"engine": 1, "rank": 4, "verifier": 1}, [node(4, 16)] * 3, ["engine_gpus = 8", "on one node", "4 GPUs and 16 CPUs each"]),
        (2, {"engine": 3, "rank": 0, "verifier": 1}, [node(3, 16)] * 2, ["3 engines of 1 CPUs and 2 GPUs", "3 GPUs and 16 CPUs each"]),
        (2, {"engine": 3, "rank": 0, "verifier": 1}, [node(3, 16), node(4, 16)], None),
    ],
)  # fmt: skip
def test_why_not_is_one_sentence_with_the_numbers(gpus: int, number: dict, nodes: list, said: list[str] | None) -> None:
    each = {**EACH, "engine": {"CPU": 1.0, "GPU": float(gpus)}}
    why = why_not(each, number, nodes)
    if said is None:
        assert why is None
    else:
        assert why is not None and "\n" not in why and all(part in why for part in said), why


def test_a_large_cluster_takes_no_time() -> None:
    each = {**EACH, "engine": {"CPU": 8.0, "GPU": 2.0}}
    started = time.monotonic()
    assert fits(each, {"engine": 96, "rank": 64, "verifier": 64}, [node(8, 96)] * 32)
    assert not fits(each, {"engine": 97, "rank": 63, "verifier": 64}, [node(7, 96)] * 32)
    assert time.monotonic() - started < 5.0
