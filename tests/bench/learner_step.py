"""Tokens/s of a learner step (forward, loss, backward, optimiser) on recorded rollouts, against TRL's GRPOTrainer on the same ones.

SmolLM2-135M-Instruct in float32 on all cores; 16 answers in two groups of 8 (TRL's default), prompts of 60 to 200 tokens, one optimiser
step a batch, no reference model, token-mean loss. TRL gets the recorded ids through its own `rollout_func`; its gradient checkpointing is
off, which is faster, and its micro-batches hold 4 answers: it pads all 16 to the longest either way, and more would only need more memory.
Both start from the same weights, and the gradient norms of the first step are compared: it is the same work.

The limit is the work that the step needs at the rate of a large matrix product in this run: 6 FLOP per token and weight of the layers
(prompts once a group) and of the head (answers only), and the attention's products.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from learner.allocator import keep_freed_memory
from learner.config import ModelConfig, ObjectiveConfig, OptimConfig
from learner.step import Learner, LearnerSettings
from tests.bench.measure import gemm_rate
from tests.bench.models import smollm2
from tests.bench.rollouts import Rollouts, record
from tests.bench.rows import Row, compare

PAIRS = 3
LR, LONGEST = 1e-6, 512
NO_CLIP = 1e9  # the norm is computed on both sides, and nothing is scaled, so that it can be compared
CASES = {"uneven": record(0, longest=LONGEST), "equal": record(1, equal=True)}
BARS = {"uneven": {"least_ratio": 2.0, "least_share": 0.6}, "equal": {"least_ratio": 1.0}}
WARM = record(2, mean=8, longest=16)


def work(rollouts: Rollouts, model: nn.Module) -> float:
    """FLOP of one step, with each group's prompt once."""
    config: Any = model.config
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    prompts = [len(p) for p in rollouts.prompts_A[:: rollouts.group_size]]
    answers = [(len(p), len(a)) for p, a in zip(rollouts.prompts_A, rollouts.answers_A, strict=True)]
    attended = sum(p * p / 2 for p in prompts) + sum(t * (p + t / 2) for p, t in answers)
    tokens = sum(prompts) + rollouts.answer_tokens
    width = config.num_attention_heads * config.head_dim
    return 6.0 * layers * tokens + 6.0 * config.vocab_size * config.hidden_size * rollouts.answer_tokens + (
        12.0 * config.num_hidden_layers * width * attended
    )


def our_learner(model: Path) -> Learner:
    """One rank."""
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    objective = ObjectiveConfig(kl_coef=0.0, adv_norm="none")
    settings = LearnerSettings(str(model), ModelConfig(), OptimConfig(lr=LR, beta2=0.999, grad_clip=NO_CLIP), objective, 1.0, LONGEST, 1000)
    return Learner(settings, torch.device("cpu"))


class Interleaved:
    """Drives our learner from the callbacks of TRL's trainer, so that each runs its own loop and the order is T O O T T O O T …"""

    def __init__(self, learner: Learner, batches: list[Rollouts]) -> None:
        self.learner, self.batches = learner, batches
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.gemm: list[float] = []
        self.norms: list[tuple[float, float]] = []
        self.step, self.started = 0, 0.0

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's hook: the recorded ids in place of a generation."""
        now = self.batches[self.step]
        return {"prompt_ids": now.prompts_A, "completion_ids": now.answers_A, "logprobs": None}

    def reward(self, completions: list[str], **_: Any) -> list[float]:
        """TRL's hook."""
        return self.batches[self.step].rewards_A

    def our_step(self, index: int) -> None:
        """One batch through the learner; the machine's rate beside it."""
        self.gemm.append(gemm_rate())
        batch = self.batches[index].batch(index)
        start = time.perf_counter()
        stats = self.learner.train_batch(batch)
        self.ours.append(time.perf_counter() - start)
        if index == 0:
            self.norms[0] = (stats.steps[0].grad_norm, self.norms[0][1])

    def ended(self, grad_norm: float) -> None:
        """After a step of TRL's: our turn, at every second one for two batches."""
        self.theirs.append(time.perf_counter() - self.started)
        if self.step == 0:
            self.norms.append((0.0, grad_norm))
        self.step += 1
        while len(self.ours) < min(2 * (self.step // 2) + 1, len(self.batches)) or (self.step == len(self.batches) > len(self.ours)):
            self.our_step(len(self.ours))


def train_theirs(model: Path, both: Interleaved) -> None:
    """TRL's own training loop over all batches."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import import_utils

    import_utils.is_vllm_available = lambda *args, **kwargs: False  # its import would load all of vLLM
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        norm = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            both.started = time.perf_counter()

        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            grads = [p.grad for p in given["model"].parameters() if p.grad is not None]
            self.norm = torch.stack([g.double().norm() for g in grads]).norm().item() if both.step == 0 else 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            both.ended(self.norm)

    size = both.batches[0].group_size
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=len(WARM.answers_A) // 4, num_generations=size,
            max_completion_length=LONGEST, max_steps=len(both.batches), learning_rate=LR, lr_scheduler_type="constant", beta=0.0,
            loss_type="dapo", scale_rewards="none", gradient_checkpointing=False, bf16=False, use_cpu=True, report_to=[], adam_beta2=0.999,
            logging_strategy="no", save_strategy="no", max_grad_norm=NO_CLIP, weight_decay=0.0, optim="adamw_torch_fused",
            disable_tqdm=True,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": [f"{i}" for i in range(len(both.batches) * len(WARM.answers_A))]})
        trainer = GRPOTrainer(
            str(model), reward_funcs=both.reward, args=args, train_dataset=data, rollout_func=both.rollout, callbacks=[Clock()]
        )
        trainer.train()


def run() -> list[Row]:
    """Both cases through one trainer, after a small step that warms both up."""
    keep_freed_memory()  # as the learner's actor does; it serves both
    model = smollm2()
    order = list(CASES) * PAIRS
    both = Interleaved(our_learner(model), [WARM, *(CASES[name] for name in order)])
    flop = {name: work(CASES[name], both.learner.policy.hf) for name in CASES}
    train_theirs(model, both)
    ours, theirs = both.norms[0]
    assert abs(ours - theirs) < 1e-3 * theirs, f"the first step's gradient norms differ: {ours} here, {theirs} in TRL: not the same work"
    rate, rows = median(both.gemm), []
    for name, rollouts in CASES.items():
        at = [i + 1 for i, case in enumerate(order) if case == name]
        mine, other = ([rollouts.answer_tokens / times[i] for i in at] for times in (both.ours, both.theirs))
        alone, once = rollouts.prompt_tokens
        note = (
            f"answer tokens/s of a step; {rollouts.answer_tokens} answer tokens, {alone} prompt tokens ({once} once a group); "
            f"limit: {flop[name] / 1e12:.2f} TFLOP at {rate / 1e9:.0f} GFLOP/s; gradient norm {ours:.4f}, TRL {theirs:.4f}"
        )
        limit = rollouts.answer_tokens * rate / flop[name]
        rows.append(compare(f"learner_step/{name}", "tokens/s", mine, other, limit=limit, note=note, **BARS[name]))
    return rows
