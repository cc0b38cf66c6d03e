"""The real engine: what it reports of its answers, and what a weight update does to it.

Does not cover: `nccl` and `ipc` transfers and tensor parallelism, which need GPUs.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.contract import TOLERANCE_16_BITS
from cluster.weights import WeightError, check_report
from learner.publish import Arena, write_manifest
from rollout.config import RolloutConfig
from rollout.engine import OWNER_VARIABLE, VllmEngine
from rollout.records import Completion, Prompt, Sampling
from rollout.weights import WeightManifest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(summary: dict[str, Any]) -> Any:
    """The export as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(summary["export"], dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt(summary: dict[str, Any]) -> Prompt:
    """`47+38=`."""
    from rollout.chat import load_tokenizer

    ids = load_tokenizer(summary["export"])("47+38=")["input_ids"]
    return Prompt(3, np.array(ids, dtype=np.int32), "47+38=", "85", "numeric", "addition", "0")


def by_transformers(model: Any, prompt: Prompt, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of an answer's tokens by transformers' own forward pass."""
    ids = torch.tensor(np.concatenate([prompt.tokens_P, completion.tokens_T]).astype(np.int64))[None]
    with torch.no_grad():
        logp = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    start = len(prompt.tokens_P)
    return logp[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0].numpy()


def test_the_core_is_forked_from_the_process_that_imported_beside_its_owner(served: Any) -> None:
    import psutil

    (core,) = [p for p in map(psutil.Process, served.engine.pids()) if "VLLM::EngineCore" in p.cmdline()[0]]
    server = core.parent()
    assert server is not None and "forkserver" in " ".join(server.cmdline()) and server.ppid() == os.getpid()
    assert core.environ()[OWNER_VARIABLE] == str(os.getpid()), "by this the reaper finds it"
    assert "libgomp" in core.environ()["LD_PRELOAD"] and any("/torch/lib/libgomp" in m.path for m in core.memory_maps())


def test_export_gives_the_learners_log_probabilities_in_vllm_and_transformers(
    served: Any, model: Any, prompt: Prompt, run_dir: Path
) -> None:
    from cluster import checkpoint, load
    from cluster.prepare import prepare
    from learner.actor import LearnerRank

    answers = served.do(served.engine.generate(prompt, Sampling(8, 24, 1.0, seed=5)))
    cfg = load.load(str(run_dir))
    rank = LearnerRank(0, 1, prepare(cfg, run_dir).settings, publish_dtype="float32", threads=1)
    rank.start("", 0)
    try:
        rank.load(checkpoint.read(checkpoint.folder_of(run_dir, 3)).learner)
        learner = rank.logprobs(prompt, answers)
    finally:
        rank.stop()
    for mine, answer in zip(learner, answers, strict=True):
        assert np.abs(mine - answer.logp_T).max() <= 1e-4
        assert np.abs(mine - by_transformers(model, prompt, answer)).max() <= 1e-4


def test_log_probabilities_are_taken_at_the_sampling_temperature(served: Any, model: Any, prompt: Prompt) -> None:
    (answer,) = served.do(served.engine.generate(prompt, Sampling(1, 24, 0.7, seed=1)))
    assert np.abs(answer.logp_T - by_transformers(model, prompt, answer, 0.7)).max() <= 1e-4
    assert np.abs(answer.logp_T - by_transformers(model, prompt, answer, 1.0)).max() > 1e-3


def test_answers_depend_on_seed_uid_and_place_alone(served: Any, prompt: Prompt) -> None:
    sampling = Sampling(4, 24, 1.0, seed=11)
    first = served.do(served.engine.generate(prompt, sampling))
    again = served.do(served.engine.generate(prompt, sampling))
    other = served.do(served.engine.generate(prompt, Sampling(4, 24, 1.0, seed=12)))
    assert [a.tokens_T.tolist() for a in first] == [a.tokens_T.tolist() for a in again]
    assert [a.tokens_T.tolist() for a in first] != [a.tokens_T.tolist() for a in other]
    assert len({tuple(a.tokens_T.tolist()) for a in first}) > 1


def test_answers_are_the_same_when_their_prompts_do_not_fit_into_one_step(served: Any) -> None:
    """A step of this engine takes a few thousand tokens; a prompt that is cut in two is sampled from twice, and draws once."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(uid, rng.integers(4, 14, 100).astype(np.int32), "", "", "", "", "") for uid in range(64)]
    sampling = Sampling(1, 8, 1.0, seed=5)

    async def together() -> list[tuple[Completion, ...]]:
        return list(await asyncio.gather(*(served.engine.generate(p, sampling) for p in prompts)))

    at_once = served.do(together())
    for prompt, answers in zip(prompts, at_once, strict=True):
        alone = served.do(served.engine.generate(prompt, sampling))
        assert [a.tokens_T.tolist() for a in alone] == [a.tokens_T.tolist() for a in answers]


def test_truncation_is_what_the_engine_says(served: Any, prompt: Prompt) -> None:
    answers = served.do(served.engine.generate(prompt, Sampling(32, 3, 1.0, seed=2)))
    for answer in answers:
        ended = answer.tokens_T[-1] == 1
        assert answer.finish == ("stop" if ended else "length") and len(answer.tokens_T) <= 3
        assert "<eos>" not in answer.text


def changed(model: Any, seed: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
    """The model's weights moved at random, in place; a tied head is not repeated."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return dict(model.named_parameters())


def publish(weights: dict[str, torch.Tensor], version: int, dtype: torch.dtype = torch.float32) -> WeightManifest:
    """A version in shared memory."""
    arena = Arena(Path(f"/dev/shm/winnow-weights-{os.getpid()}-9-{version}.bin"))
    return write_manifest(weights.items(), arena, attempt=9, version=version, dtype=dtype)


def test_an_update_replaces_every_weight_and_no_old_key_or_value_is_used(served: Any, model: Any, prompt: Prompt) -> None:
    """Three times: vLLM reloads the first time, and later versions are put in place from the file, which is free to change afterwards.

    A long shared prompt fills cache blocks.
    """
    long_prompt = Prompt(9, np.tile(prompt.tokens_P, 12), "", "", "", "", "")
    served.do(served.engine.generate(long_prompt, Sampling(2, 8, 1.0, seed=1)))
    for version in (1, 2, 3):
        manifest = publish(changed(model, version), version)
        try:
            report = served.do(served.engine.update(manifest))
        finally:
            np.memmap(manifest.path, dtype=np.uint8, mode="r+")[:] = 255
            os.unlink(manifest.path)
        check_report(0, manifest, report)
        assert report["placed"], "vLLM's own reload is used for every version"
        for answer in served.do(served.engine.generate(long_prompt, Sampling(4, 16, 1.0, seed=version))):
            assert np.abs(answer.logp_T - by_transformers(model, long_prompt, answer)).max() <= 1e-4
            assert {s.version for s in answer.spans} == {version}


def test_requests_in_flight_are_kept_and_their_tokens_carry_versions(served: Any, model: Any, prompt: Prompt) -> None:
    async def both() -> tuple[tuple[Completion, ...], dict[str, Any]]:
        running = [
            asyncio.ensure_future(
                served.engine.generate(Prompt(50 + i, prompt.tokens_P, "", "", "", "", ""), Sampling(8, 100, 1.0, seed=i))
            )
            for i in range(6)
        ]
        await asyncio.sleep(0.1)
        report = await served.engine.update(manifest)
        answers = [a for group in await asyncio.gather(*running) for a in group]
        return tuple(answers), report

    manifest = publish(changed(model, 4), 4)
    try:
        answers, report = served.do(both())
    finally:
        os.unlink(manifest.path)
    check_report(0, manifest, report)
    for answer in answers:
        assert answer.spans[0].start == 0 and answer.spans[-1].stop == len(answer.tokens_T)
        assert all(a.stop == b.start and a.version < b.version for a, b in zip(answer.spans, answer.spans[1:], strict=False))
    mixed = [a for a in answers if len(a.spans) == 2]
    assert mixed, "the update came after every answer had ended"
    for answer in mixed:  # under `recompute` what follows the update is the new weights' own
        new = by_transformers(model, prompt, answer)
        start = answer.spans[1].start
        assert np.abs(answer.logp_T[start:] - new[start:]).max() <= 1e-4


def test_under_keep_old_keys_and_values_serve_the_requests_in_flight_and_no_new_one(served: Any, model: Any, prompt: Prompt) -> None:
    """The long prompt's old keys and values are in the prefix cache when the new weights come."""
    long_prompt = Prompt(70, np.tile(prompt.tokens_P, 10), "", "", "", "", "")

    async def both() -> tuple[list[Completion], dict[str, Any], list[Completion]]:
        running = asyncio.ensure_future(served.engine.generate(long_prompt, Sampling(16, 60, 1.0, seed=1)))
        await asyncio.sleep(0.1)
        report = await served.engine.update(manifest)
        new = await served.engine.generate(Prompt(71, long_prompt.tokens_P, "", "", "", "", ""), Sampling(8, 16, 1.0, seed=2))
        return list(await running), report, list(new)

    before, served.engine.config = served.engine.config, served.engine.config.model_copy(update={"kv_on_update": "keep"})
    manifest = publish(changed(model, 13), 13)
    try:
        running, report, new = served.do(both())
    finally:
        served.engine.config = before
        os.unlink(manifest.path)
    check_report(0, manifest, report)
    for answer in new:
        assert {s.version for s in answer.spans} == {13}
        assert np.abs(answer.logp_T - by_transformers(model, long_prompt, answer)).max() <= 1e-4
    mixed = [a for a in running if len(a.spans) == 2]
    assert mixed, "the update came after every answer had ended"
    off = [np.abs(a.logp_T - by_transformers(model, long_prompt, a))[a.spans[1].start :].max() for a in mixed]
    assert max(off) > 1e-3, "control: answers in flight did go on with old keys and values"


@pytest.fixture(scope="module")
def served_16(served: Any, summary: dict[str, Any]) -> Any:
    """The same export in an engine whose weights have 16 bits."""
    engine = VllmEngine(
        RolloutConfig(kv_cache_gb=0.25, max_sequences=64, engine_dtype="bfloat16"),
        model=summary["export"],
        max_model_len=128,
        stop_token_ids=(1,),
        decode=str,
        transfer_backend="winnow_shm",
    )
    held = type(served)(engine)
    assert list(Path(engine.sockets).iterdir()), "vLLM's sockets lie where they are removed"
    yield held
    held.close()
    assert not Path(engine.sockets).exists()


def test_a_16_bit_engine_has_the_weights_of_a_32_bit_learner_after_every_update(served_16: Any, model: Any, prompt: Prompt) -> None:
    """Fingerprints are of what travels, the learner's weights in the engine's 16 bits; the embedding is tied to the head."""
    assert model.config.tie_word_embeddings
    for version in (21, 22, 23):
        weights = changed(model, version)
        manifest = publish(weights, version, torch.bfloat16)
        try:
            report = served_16.do(served_16.engine.update(manifest))
        finally:
            os.unlink(manifest.path)
        check_report(0, manifest, report)
        for answer in served_16.do(served_16.engine.generate(prompt, Sampling(4, 16, 1.0, seed=version))):
            off = np.abs(answer.logp_T - by_transformers(model, prompt, answer))
            assert {s.version for s in answer.spans} == {version} and off.mean() < TOLERANCE_16_BITS


def test_an_engine_that_sleeps_wakes_with_the_new_weights(served: Any, model: Any, prompt: Prompt) -> None:
    """A request that comes meanwhile waits for them."""

    async def turns() -> tuple[tuple[Completion, ...], dict[str, Any]]:
        await served.engine.sleep()
        waiting = asyncio.ensure_future(served.engine.generate(prompt, Sampling(4, 24, 1.0, seed=8)))
        await asyncio.sleep(0.3)
        assert not waiting.done() and served.engine.asleep
        report = await served.engine.update(manifest)
        return await waiting, report

    manifest = publish(changed(model, 5), 5)
    try:
        answers, report = served.do(turns())
    finally:
        os.unlink(manifest.path)
    check_report(0, manifest, report)
    assert not served.engine.asleep
    for answer in answers:
        assert {s.version for s in answer.spans} == {5}
        assert np.abs(answer.logp_T - by_transformers(model, prompt, answer)).max() <= 1e-4


def test_a_tensor_that_is_corrupted_on_its_way_is_caught(served: Any, model: Any) -> None:
    manifest = publish(changed(model, 6), 6)
    victim = manifest.tensors[7]
    try:
        with open(manifest.path, "r+b") as file:
            file.seek(victim.offset + 5)
            byte = file.read(1)
            file.seek(victim.offset + 5)
            file.write(bytes([byte[0] ^ 1]))
        report = served.do(served.engine.update(manifest))
    finally:
        os.unlink(manifest.path)
    with pytest.raises(WeightError, match=victim.name):
        check_report(0, manifest, report)


def test_a_transfer_that_lacks_a_tensor_is_caught(served: Any, model: Any) -> None:
    weights = changed(model, 7)
    dropped = next(name for name in weights if "down_proj" in name)
    manifest = publish({k: v for k, v in weights.items() if k != dropped}, 7)
    try:
        report = served.do(served.engine.update(manifest))
    finally:
        os.unlink(manifest.path)
    with pytest.raises(WeightError, match="older version"):
        check_report(0, manifest, report)
