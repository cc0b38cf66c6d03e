"""TRL's GRPOTrainer on a warmed-up tiny model, until held-out accuracy is reached: `python -m tests.bench.trl_run JOB.json OUT.jsonl`.

One line for every evaluation, whose own time is left out of `seconds`. The settings that make it fast here: no gradient checkpointing,
no pass for old log-probabilities, one forward pass for the whole batch, all cores.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.monotonic()


def main(job_file: str, out: str) -> None:
    """Train as the job says."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from verifier import load

    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    verifier = load("numeric")

    def right(answer: str, text: str) -> float:
        return float(verifier.verify(answer, text, {}, {}).reward)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [right(a, c) for a, c in zip(answer, completions, strict=True)]

    def accuracy() -> float:
        """Greedy, on all held-out prompts at once."""
        model.eval()
        inputs = tokenizer([p for p, _ in job["heldout"]], return_tensors="pt", padding=True)
        with torch.no_grad():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=job["max_tokens"])
        texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        model.train()
        return sum(right(a, t) for (_, a), t in zip(job["heldout"], texts, strict=True)) / len(texts)

    class Clock(TrainerCallback):
        """Seconds of training alone."""

        def __init__(self) -> None:
            self.begun, self.off = 0.0, 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            paused = time.monotonic()
            seconds = paused - self.begun - self.off
            if state.global_step % job["eval_every"] == 0:
                found = accuracy()
                line = {"step": state.global_step, "seconds": seconds, "accuracy": found, "start": self.begun - STARTED}
                with open(out, "a") as lines:
                    lines.write(json.dumps(line) + "\n")
                control.should_training_stop = found >= job["accuracy"]
            self.off += time.monotonic() - paused

    settings = GRPOConfig(
        output_dir=f"{out}.trl",
        use_cpu=True,
        bf16=False,
        seed=job["seed"],
        per_device_train_batch_size=job["batch_size"] * job["group_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["lr_warmup_steps"],
        adam_beta2=0.95,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to=[],
        logging_steps=1000,
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": p, "answer": a} for p, a in job["prompts"]])
    parts = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [Clock()]}
    GRPOTrainer(model=model, reward_funcs=reward, args=settings, **parts).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
