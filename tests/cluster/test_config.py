"""The tree and its cross-checks.

Not covered: whether a setting has its effect (each stage's own tests), and what needs a look at files (test_check).
"""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from cluster.config import RunConfig, cross_checks, fields, flag_names


def bare(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def test_every_leaf_has_a_name_of_its_own_and_a_description() -> None:
    twice = [name for name, n in Counter(bare(key) for key in fields()).items() if n > 1]
    assert twice == []
    assert [key for key, info in fields().items() if not info.description] == []


def test_a_flag_is_known_by_its_dotted_and_by_its_bare_name() -> None:
    assert flag_names()["lr"] == flag_names()["optim.lr"] == "optim.lr"
    assert flag_names()["model"] == "model.model"
    assert flag_names()["seed"] == "seed"
    assert len(flag_names()) == len(fields()) + sum("." in key for key in fields())


def test_help_and_version_are_no_keys() -> None:
    assert not {"help", "version", "print_config", "print-config"} & set(flag_names())


def test_no_number_may_be_endless() -> None:
    """`gt=0` lets inf through, and every section has to say that it is no number."""
    for key, info in fields().items():
        if info.annotation is float:
            tree: dict = {}
            *sections, leaf = key.split(".")
            at = tree
            for name in sections:
                at = at.setdefault(name, {})
            at[leaf] = float("inf")
            with pytest.raises(ValidationError, match="finite"):
                RunConfig.model_validate(tree)


def test_defaults_fit_together() -> None:
    assert list(cross_checks(RunConfig())) == []


WRONG = [
    ({"resume": True}, ["resume = true", "--run_dir"]),
    ({"optim": {"lr": 1e-6, "lr_min": 1e-5}}, ["optim.lr_min = 1e-05", "optim.lr = 1e-06", "lower it"]),
    ({"data": {"sources": []}}, ["data.sources = []", "give at least one"]),
    ({"data": {"sources": [{}]}}, ["data.sources[0] gives none of", "exactly one"]),
    ({"data": {"sources": [{"task": "addition", "path": "a.jsonl"}]}}, ["task = 'addition' and path = 'a.jsonl'", "exactly one"]),
    ({"data": {"eval_sources": [{"path": "a.jsonl", "options": {"digits": 2}}]}}, ["data.eval_sources[0].options", "remove them"]),
    ({"data": {"system_prompt": "Think."}}, ["data.system_prompt = 'Think.'", "chat"]),
    ({"data": {"template": {"enable_thinking": False}}}, ["data.template", "chat"]),
    ({"rollout": {"top_p": 0.9}}, ["rollout.top_p = 0.9", "set it to 1.0"]),
    ({"rollout": {"top_k": 50}}, ["rollout.top_k = 50", "set it to 0"]),
    ({"rollout": {"min_p": 0.1}}, ["rollout.min_p = 0.1", "set it to 0.0"]),
    ({"rollout": {"repetition_penalty": 1.1}}, ["rollout.repetition_penalty = 1.1", "set it to 1.0"]),
    (
        {"rollout": {"max_model_len": 100, "max_tokens": 60}, "data": {"max_prompt_tokens": 41}},
        ["rollout.max_model_len = 100", "data.max_prompt_tokens = 41", "rollout.max_tokens = 60", "raise it to 101"],
    ),
    (
        {"rollout": {"max_model_len": 100, "max_tokens": 30}, "data": {"max_prompt_tokens": 41}, "eval": {"eval_max_tokens": 60}},
        ["eval.eval_max_tokens = 60", "rollout.max_model_len = 100", "to 101"],
    ),
    ({"rollout": {"max_staleness": 1}, "buffer": {"overprovision": 0.5}}, ["buffer.overprovision = 0.5", "rollout.max_staleness = 1"]),
    ({"optim": {"minibatches": 5}}, ["optim.minibatches = 5", "buffer.batch_size = 32", "take 4"]),
    ({"rollout": {"group_size": 1}}, ["group_size = 1", "baseline = group"]),
    (
        {"model": {"learner_ranks": 9}, "buffer": {"batch_size": 8}, "optim": {"minibatches": 4}, "rollout": {"group_size": 4}},
        ["model.learner_ranks = 9", "8 answers of a mini-batch"],
    ),
    ({"objective": {"kl_estimator": "k1"}}, ["kl_estimator = k1", "kl_in to reward"]),
    ({"rollout": {"engine_gpus": 1.5}}, ["rollout.engine_gpus = 1.5", "whole number"]),
    ({"model": {"learner_gpus": 2}}, ["model.learner_gpus = 2", "learner_ranks"]),
    ({"rollout": {"weight_transfer": "nccl"}}, ["rollout.weight_transfer = 'nccl'", "rollout.engine_gpus is 0", "auto or shm"]),
    ({"rollout": {"weight_transfer": "ipc", "engine_gpus": 1}}, ["'ipc'", "model.learner_gpus is 0"]),
    (
        {"rollout": {"weight_delta": True, "engine_gpus": 1}, "model": {"learner_gpus": 1}},
        ["rollout.weight_delta = true", "set that to shm"],
    ),
    ({"rollout": {"colocate": True, "max_staleness": 1}}, ["rollout.colocate = true", "rollout.max_staleness = 1", "set it to 0"]),
    ({"rollout": {"colocate": True, "engine_gpus": 0.5}}, ["rollout.colocate = true", "model.learner_gpus = 0", "0.5, or none"]),
    (
        {"rollout": {"colocate": True, "engine_gpus": 0.5, "engines": 2}, "model": {"learner_gpus": 0.5}},
        ["rollout.colocate = true", "2 engines", "come to 1.5"],
    ),
    (
        {"rollout": {"colocate": True, "engine_gpus": 0.5, "weight_transfer": "ipc"}, "model": {"learner_gpus": 0.5}},
        ["rollout.colocate = true", "'ipc'", "set that to auto"],
    ),
    ({"model": {"attention": "flash_attention_2"}}, ["model.attention = 'flash_attention_2'", "sdpa"]),
    ({"model": {"attention": "flash_attention_2", "learner_gpus": 1}}, ["model.attention = 'flash_attention_2'", "bfloat16"]),
    ({"model": {"attention": "segments", "learner_gpus": 1}}, ["model.attention = 'segments'", "bfloat16"]),
    ({"model": {"learner_ranks": 4, "learner_replicas": 3}}, ["model.learner_replicas = 3", "learner_ranks = 4", "divisor"]),
    ({"model": {"lora_alpha": 8}}, ["model.lora_alpha = 8", "model.lora_rank is 0", "drop lora_alpha"]),
    (
        {"objective": {"baseline": "critic", "adv_norm": "none"}, "critic": {"value_epochs": 2}, "optim": {"epochs": 4}},
        ["value_epochs = 2", "epochs = 4", "raise it to 4"],
    ),
    ({"model": {"cpu_offload": True}}, ["model.cpu_offload = true", "learner_gpus = 0"]),
    ({"eval": {"eval_prompts": 0, "eval_every": 5}}, ["eval.eval_every = 5", "eval.eval_prompts is 0"]),
    ({"eval": {"keep_best": True}}, ["eval.keep_best = true", "eval.eval_every = 0"]),
]


@pytest.mark.parametrize(("tree", "parts"), WRONG, ids=[" ".join(parts)[:40] for _, parts in WRONG])
def test_cross_check_is_one_sentence_with_key_value_and_remedy(tree: dict, parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(tree)
    errors = caught.value.errors()
    assert len(errors) == 1
    said = str(errors[0]["ctx"]["error"])
    for part in parts:
        assert part in said
    assert "\n" not in said and ". " not in said.rstrip()


RIGHT = [
    {"resume": True, "run_dir": "runs/a"},
    {"rollout": {"group_size": 1}, "objective": {"baseline": "batch", "adv_norm": "batch"}},
    {"rollout": {"top_k": -1}},
    {"rollout": {"max_model_len": 101, "max_tokens": 60}, "data": {"max_prompt_tokens": 41}},
    {"optim": {"minibatches": 4}},
    {"model": {"learner_ranks": 8}, "buffer": {"batch_size": 8}, "optim": {"minibatches": 4}, "rollout": {"group_size": 4}},
    {"rollout": {"engine_gpus": 0.5, "weight_transfer": "ipc"}, "model": {"learner_gpus": 0.5}},
    {"rollout": {"engine_gpus": 0.5, "colocate": True}, "model": {"learner_gpus": 0.5}},
    {"rollout": {"colocate": True}},
    {"rollout": {"engine_gpus": 1, "weight_delta": True, "weight_transfer": "shm"}, "model": {"learner_gpus": 1}},
    {"eval": {"keep_best": True, "eval_every": 5}},
]


@pytest.mark.parametrize("tree", RIGHT, ids=str)
def test_what_fits_is_accepted(tree: dict) -> None:
    RunConfig.model_validate(tree)
