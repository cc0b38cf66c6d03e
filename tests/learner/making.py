"""Groups and learners for the tests, and the program that a rank of the two-rank test runs.

    python tests/learner/making.py RANK RANKS STORE MODEL OUT [CHECKPOINT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

TINY = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
    initializer_range=0.2,  # wide enough that log-probabilities differ from token to token
)
MAX_TOKENS = 12


def make_group(uid: int, *, answers: int = 4, seed: int = 0, rewards: Any = None, lengths: Any = None, finish: Any = None) -> Any:
    """A ScoredGroup of random tokens, uneven lengths and 0/1 rewards, the first of which is 1 and the last 0."""
    from rollout.records import Completion, Group, Prompt, Span
    from verifier.records import ScoredGroup

    rng = np.random.default_rng([seed, uid])
    question = Prompt(uid, rng.integers(2, 40, rng.integers(2, 6)).astype(np.int32), "", "", "numeric", "made", str(uid))
    sizes = lengths if lengths is not None else rng.integers(1, MAX_TOKENS + 1, answers)
    done = []
    for i, size in enumerate(sizes):
        tokens = rng.integers(2, 40, size).astype(np.int32)
        logp = rng.normal(-3.5, 0.3, size).astype(np.float32)
        done.append(Completion(tokens, logp, finish[i] if finish else "stop", (Span(0, int(size), 0),), ""))
    scores = np.asarray(rewards if rewards is not None else [1, *rng.integers(0, 2, len(sizes) - 2), 0][: len(sizes)], dtype=np.float64)
    return ScoredGroup(Group(question, 0, tuple(done), 0, 0.0), (), scores, scores[None], ("numeric",))


def make_batch(groups: Any, index: int = 0, masked: tuple[int, ...] = ()) -> Any:
    """All tokens given, as a single rank needs them."""
    from learner.records import Batch, TrainGroup

    return Batch(index, tuple(TrainGroup.of_scored(g, g.uid in masked) for g in groups), ("numeric",), {g.uid: g for g in groups})


def make_learner(model: Any, *, objective: Any = None, optim: Any = None, config: Any = None, critic: Any = None, **settings: Any) -> Any:
    """A Learner on the CPU; keyword dictionaries override the configs' defaults."""
    import torch

    from learner.config import CriticConfig, ModelConfig, ObjectiveConfig, OptimConfig
    from learner.step import Learner, LearnerSettings

    return Learner(
        LearnerSettings(
            model=str(model),
            config=ModelConfig(**(config or {})),
            optim=OptimConfig(**{"lr": 1e-3, **(optim or {})}),
            objective=ObjectiveConfig(**(objective or {})),
            critic=CriticConfig(**(critic or {})),
            **{"temperature": 1.0, "max_tokens": MAX_TOKENS, "total_steps": 100, **settings},
        ),
        torch.device("cpu"),
    )


# Each is trained on two batches by one rank and by two; micro-batches differ between the two on purpose. `two`: config of two ranks alone.
CASES: dict[str, dict[str, Any]] = {
    "minibatches": dict(objective=dict(loss_agg="seq-mean-token-mean"), optim=dict(minibatches=2, epochs=2)),
    "gspo_kl_in_reward": dict(
        objective=dict(ratio_level="sequence", kl_coef=0.05, kl_estimator="k1", kl_in="reward", loss_agg="prompt-mean", entropy_coef=0.01),
        optim=dict(epochs=2),
        temperature=0.7,
    ),
    "critic": dict(  # the policy is frozen in the first batch
        objective=dict(baseline="critic", adv_norm="batch", kl_coef=0.05, kl_estimator="k1", kl_in="reward"),
        critic=dict(value_pretrain=1, value_lr=2e-3, gae_lambda=0.9, gae_lambda_value=0.95, positive_nll=0.1, value_clip=0.05),
        optim=dict(minibatches=2, epochs=2),
    ),
    "one_answer": dict(objective=dict(overlong="mask", kl_coef=0.1), one_answer=True),
    "replicas": dict(objective=dict(kl_coef=0.0), optim=dict(grad_clip=0.01), two=dict(learner_replicas=2, reshard_after_forward=False)),
    "offload": dict(objective=dict(kl_coef=0.0), two=dict(cpu_offload=True, activation_checkpointing=True)),
    "adapters": dict(objective=dict(kl_coef=0.1), optim=dict(lr=1e-2), config=dict(lora_rank=4)),
}


def case_batches(case: str) -> list[Any]:
    """Two batches of 5 groups of 3 uneven answers; in `one_answer` all but one are out of the loss, so a rank has none."""
    batches = []
    for index in range(2):
        finish = ["stop"] * 3
        groups = []
        for i in range(5):
            if CASES[case].get("one_answer"):
                finish = ["length"] * 3 if i else ["stop", "length", "length"]
            groups.append(make_group(10 * index + i, answers=3, seed=7, finish=finish))
        batches.append(make_batch(groups, index))
    return batches


def run_case(case: str, model: Any, micro_tokens: int) -> tuple[Any, list[Any]]:
    """The learner after both batches, and their stats. A rank is given only the tokens that it says it needs."""
    import torch.distributed as dist

    from learner.records import Batch

    settings = {k: v for k, v in CASES[case].items() if k not in ("one_answer", "two", "config")}
    config = CASES[case].get("config", {}) | (CASES[case].get("two", {}) if dist.get_world_size() > 1 else {})
    learner = make_learner(model, config=config | dict(micro_tokens=micro_tokens), **settings)
    stats = []
    for batch in case_batches(case):
        given = {uid: batch.tokens[uid] for uid in learner.needs(batch.groups)}
        stats.append(learner.train_batch(Batch(batch.index, batch.groups, batch.names, given)))
    return learner, stats


def report(stats: list[Any]) -> dict[str, Any]:
    """The numbers that must not depend on the number of ranks."""
    steps = [s for st in stats for s in st.steps]
    return {
        "loss": [s.loss for s in steps],
        "grad_norm": [s.grad_norm for s in steps],
        "tokens": [s.tokens for s in steps],
        "advantages": [[float(x) for uid in sorted(st.advantages) for x in st.advantages[uid]] for st in stats],
        "mismatch": [[st.mismatch.tokens, st.mismatch.mean_abs, st.mismatch.max_abs, st.mismatch.kl] for st in stats],
        "entropy": [s.stats["entropy"] for s in steps if s.stats],
        "critic": [[s.critic[name] for name in sorted(s.critic)] for s in steps if "nll" in s.critic],
        "values": [[st.critic[name] for name in sorted(st.critic)] for st in stats if st.critic],
    }


def main(rank: int, ranks: int, store: str, model: str, out: str, checkpoint: str | None = None) -> None:
    """Train every case, save the weights; then go on from a checkpoint of one rank, and write one of two ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    reports: dict[str, Any] = {}
    for case in CASES:
        learner, stats = run_case(case, model, micro_tokens=16)
        weights = {name: value.numpy() for name, value in learner.weights()}
        reports[case] = report(stats) | {"micro_batches": [s.micro_batches for st in stats for s in st.steps]}
        if rank == 0:
            np.savez(Path(out) / f"{case}.npz", **weights)
    if checkpoint is not None:
        learner = make_learner(model)
        learner.load(checkpoint)
        learner.train_batch(case_batches("minibatches")[1])
        learner.save(Path(out) / "checkpoint")
        learner.export(Path(out) / "export")
    if rank == 0:
        (Path(out) / "reports.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
