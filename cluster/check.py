"""`winnow check RECIPE`, and what `train` asks before any actor starts: all that can be known without an engine or a learner.

Looked at, in this order: the model's folder, context, tokenizer, chat template and stop ids; the names of verifiers; every data set,
its gold answers through their own verifier, its prompts' lengths; the machine. What cannot be looked at here (a hub that is out of
reach) is said to be so, and is no problem of the recipe.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import hub, resources
from cluster.config import RunConfig
from cluster.resources import Finding
from rollout.config import SourceConfig
from rollout.errors import UserError

GOLD_SECONDS = 5.0
"""Time for the gold answers of one source, all of whose rows are looked at if they can be in that time."""
GOLD_ROWS, TASK_ROWS, LENGTH_ROWS = 100_000, 256, 256
STREAM_ROWS = 200_000
"""Sources of no more rows in all are split into training and held-out questions here; of larger ones the run says it."""


def report(cfg: RunConfig) -> int:
    """Print every finding, problems on stderr; 0 when all is well, 2 when something is not."""
    bad, unseen = [], 0
    print("ok       config     every key is known, every value fits and they fit together", flush=True)
    for found in look(cfg):
        out = sys.stderr if found.state == "problem" else sys.stdout
        print(f"{found.state:<8} {found.part:<10} {found.text}", file=out, flush=True)
        bad += [found.part] if found.state == "problem" else []
        unseen += found.state == "unseen"
    if not bad and unseen:
        print(f"nothing stands against this recipe, but {unseen} thing{'s' if unseen > 1 else ''} could not be looked at here")
    elif not bad:
        print("nothing stands against this recipe")
    elif set(bad) == {"resources"}:
        print("the recipe is accepted in all but the resources, which this machine lacks")
    else:
        print(f"{len(bad)} problem{'s' if len(bad) > 1 else ''} to solve before this recipe can run")
    return 2 if bad else 0


def preflight(cfg: RunConfig, *, learner: bool = True) -> list[Finding]:
    """The problems alone; without `learner` only what evaluation needs of the machine."""
    return [found for found in look(cfg, learner=learner) if found.state == "problem"]


def raise_first(cfg: RunConfig, *, learner: bool = True) -> None:
    """Raises UserError with the first problem, if there is any; one of the data comes before a context that is too short."""
    context: Finding | None = None
    for found in look(cfg, learner=learner):
        if found.part == "context":
            context = found
        elif found.state == "problem":
            raise UserError(context.text if context and found.part == "resources" else found.text)
    if context is not None:
        raise UserError(context.text)


def look(cfg: RunConfig, *, learner: bool = True) -> Iterator[Finding]:
    """All findings, as they are made."""
    tokenizer = None
    for found, tokens in _model(cfg):
        tokenizer = tokens or tokenizer
        yield found
    if cfg.objective.baseline == "critic" and cfg.critic.value_model is not None:
        yield _value_model(cfg, cfg.critic.value_model)
    yield from _verifiers(cfg)
    yield from _data(cfg, tokenizer)
    yield from resources.look(cfg, learner=learner)


# -- the model ----------------------------------------------------------------------------------------------------


def _model(cfg: RunConfig) -> Iterator[tuple[Finding, Any]]:
    """Findings on the model; the tokenizer comes with one of them if it loads."""
    name = cfg.model.model
    try:
        settings, place = hub.model_settings(name)
    except hub.Unseen as reason:
        yield Finding("unseen", "model", f"model.model = {name!r} {reason}; it is looked at when the run starts"), None
        return
    except UserError as error:
        yield Finding("problem", "model", str(error)), None
        return
    context = hub.context_length(settings)
    need = cfg.data.max_prompt_tokens + max(cfg.rollout.max_tokens, cfg.eval.eval_max_tokens)
    key = "rollout.max_tokens" if cfg.rollout.max_tokens >= cfg.eval.eval_max_tokens else "eval.eval_max_tokens"
    if context and need > context:
        budget = need - cfg.data.max_prompt_tokens
        yield Finding("problem", "context", (
            f"data.max_prompt_tokens = {cfg.data.max_prompt_tokens} plus {key} = {budget} is {need}, more than the {context} tokens of "
            f"context that model.model = {name!r} has: lower one of the two"
        )), None  # fmt: skip
    elif context and (cfg.rollout.max_model_len or 0) > context:
        yield Finding("problem", "context", (
            f"rollout.max_model_len = {cfg.rollout.max_model_len} is more than the {context} tokens of context that "
            f"model.model = {name!r} has: lower it to at most {context}"
        )), None  # fmt: skip
    else:
        room = f"of {context} tokens of context" if context else "tokens; its config.json does not say how many it can hold"
        yield Finding("ok", "model", f"{name} ({place}): a prompt and its answer take up to {need} {room}"), None
    yield from _tokenizer(cfg)


def _value_model(cfg: RunConfig, name: str) -> Finding:
    from learner.settings import other_shape

    if name == "tiny":
        return Finding("problem", "model", (
            "critic.value_model = 'tiny' is no checkpoint: leave it out, and the value model starts from what the policy starts from"
        ))  # fmt: skip
    try:
        settings, place = hub.model_settings(name, "critic.value_model")
    except hub.Unseen as reason:
        return Finding("unseen", "model", f"critic.value_model = {name!r} {reason}; it is looked at when the run starts")
    except UserError as error:
        return Finding("problem", "model", str(error))
    try:
        policy = _tiny_settings(cfg) if cfg.model.model == "tiny" else hub.model_settings(cfg.model.model)[0]
    except (hub.Unseen, UserError):
        policy = {}  # told of the model itself
    wrong = other_shape(name, settings, policy)
    return Finding("problem", "model", wrong) if wrong else Finding("ok", "model", f"{name} ({place}): the value model starts from it")


def _tiny_settings(cfg: RunConfig) -> dict[str, Any]:
    from rollout.chat import TINY_MODEL_TYPE
    from rollout.tiny import build_tokenizer, tiny_model_config

    return {"model_type": TINY_MODEL_TYPE, **tiny_model_config(build_tokenizer(), cfg.model.tiny_hidden, cfg.model.tiny_layers)}


def _tokenizer(cfg: RunConfig) -> Iterator[tuple[Finding, Any]]:
    from rollout import chat

    name, chat_format = cfg.model.model, cfg.data.prompt_format == "chat"
    try:
        if name == "tiny":
            from rollout.tiny import build_tokenizer, tiny_model_config

            tokenizer, eos = build_tokenizer(), None
            tiny_model_config(tokenizer, cfg.model.tiny_hidden, cfg.model.tiny_layers)
        else:
            tokenizer, eos = chat.load_tokenizer(name, cfg.model.trust_remote_code), chat.generation_eos(name)
    except UserError as error:
        if hub.is_local(name) or hub.reachable():
            yield Finding("problem", "tokenizer", str(error)), None
        else:
            yield Finding("unseen", "tokenizer", f"that of {name!r} is not on this machine and the hub is out of reach"), None
        return
    try:
        chat.require_template(tokenizer, cfg.data, name)
        stops = chat.stop_token_ids(tokenizer, eos, chat=chat_format)
    except UserError as error:
        yield Finding("problem", "tokenizer", str(error)), None
        return
    names = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in stops)
    template = ", chat template found" if chat_format else ""
    yield Finding("ok", "tokenizer", f"answers end at {names}{_strings(cfg.rollout.stop)}{template}"), tokenizer


def _strings(stop: list[str]) -> str:
    return "".join(f", at the text {s!r}" for s in stop)


# -- verifiers and data -------------------------------------------------------------------------------------------


def _verifiers(cfg: RunConfig) -> Iterator[Finding]:
    import verifier

    options = cfg.verify.verifier_options
    named = {f"verify.verifier_options.{n}": n for n in options} | {f"verify.reward_weights.{n}": n for n in cfg.verify.reward_weights}
    for key, sources in (("data.sources", cfg.data.sources), ("data.eval_sources", cfg.data.eval_sources)):
        named |= {f"{key}[{i}].verifier": s.verifier for i, s in enumerate(sources) if s.verifier_field is None}
    wrong = False
    for key, name in named.items():
        try:
            verifier.load(name, options.get(name))
        except UserError as error:
            wrong = True
            yield Finding("problem", "verifier", f"{key}: {error}" if key.endswith(".verifier") else f"{key} is set, but {error}")
    if not wrong:
        yield Finding("ok", "verifier", ", ".join(dict.fromkeys(named.values())) or "by row")


def _data(cfg: RunConfig, tokenizer: Any) -> Iterator[Finding]:
    rows, whole = 0, True
    with tempfile.TemporaryDirectory() as folder:
        for key, sources in (("data.sources", cfg.data.sources), ("data.eval_sources", cfg.data.eval_sources)):
            for i, config in enumerate(sources):
                try:
                    source = _open(config, Path(folder))
                except hub.Unseen as reason:
                    whole = False
                    yield Finding("unseen", "data", f"{key}[{i}]: hub = {config.hub!r} {reason}; it is looked at when the run starts")
                    continue
                except UserError as error:
                    whole = False
                    yield Finding("problem", "data", f"{key}[{i}]: {error}")
                    continue
                rows += source.size if config.task is None else 0
                for found in _source(cfg, f"{key}[{i}]", source, tokenizer):
                    whole = whole and found.state == "ok"
                    yield found
        if whole and tokenizer is not None and rows <= STREAM_ROWS:
            yield _split(cfg, tokenizer, Path(folder))


def _open(config: SourceConfig, folder: Path) -> Any:
    from rollout.sources import open_source

    if config.hub is None or hub.is_local(config.hub):
        return open_source(config, folder=folder)
    if hub.like_a_path(config.hub):
        raise UserError(f"hub = {config.hub!r} is no folder: give a folder laid out as a data set, or a hub name such as openai/gsm8k")
    online = hub.reachable()
    try:
        return open_source(config, folder=folder)
    except UserError:
        if online:
            raise
        hub.raise_unseen("hub", config.hub)


def _source(cfg: RunConfig, key: str, source: Any, tokenizer: Any) -> Iterator[Finding]:
    """Gold answers and prompt lengths of one open source."""
    from rollout.chat import encode_prompt
    from rollout.sources import rows_of
    from rollout.tiny import terms_of

    gold, lengths, texts = 0, [], []
    limit = TASK_ROWS if source.config.task else GOLD_ROWS
    every = max(1, min(limit, source.size) // LENGTH_ROWS)
    start = time.monotonic()
    try:
        for i, row in enumerate(rows_of(source, limit)):
            _check_gold(cfg, source.config, row)
            gold += 1
            if tokenizer is not None and i % every == 0:
                tokens_P, text = encode_prompt(tokenizer, row.prompt, cfg.data)
                lengths.append(len(tokens_P))
                texts.append(text)
                if lengths[-1] > cfg.data.max_prompt_tokens and cfg.data.overlong_prompts == "error":
                    raise UserError(
                        f"the prompt of {row.where} has {lengths[-1]} tokens, more than data.max_prompt_tokens = "
                        f"{cfg.data.max_prompt_tokens}: raise it, or set data.overlong_prompts = 'drop'"
                    )
            if time.monotonic() - start > GOLD_SECONDS:
                break
    except UserError as error:
        yield Finding("problem", "data", f"{key}: {error}")
        return
    said = f"{key}: {source.name}, {source.size:,} questions, {gold:,} gold answers accepted by their verifier"
    if lengths:
        over = sum(n > cfg.data.max_prompt_tokens for n in lengths)
        if over == len(lengths):
            yield Finding("problem", "data", (
                f"{key}: data.max_prompt_tokens = {cfg.data.max_prompt_tokens} is less than the shortest of {over} prompts, "
                f"which has {min(lengths)} tokens: raise it"
            ))  # fmt: skip
            return
        said += f", longest of {len(lengths)} prompts {max(lengths)} tokens" + (f" ({over} are dropped as too long)" if over else "")
    yield Finding("ok", "data", said)
    if cfg.warmup.warmup_steps and key.startswith("data.sources"):
        try:
            for text in texts:
                terms_of(text)
        except UserError as error:
            yield Finding("problem", "warmup", f"{key} with warmup.warmup_steps = {cfg.warmup.warmup_steps}: {error}, or warmup_steps to 0")


def _check_gold(cfg: RunConfig, config: SourceConfig, row: Any) -> None:
    """Raises UserError when the verifiers that will score this row refuse its own gold answer."""
    import verifier

    for name in cfg.verify.reward_weights or [row.verifier]:
        why = verifier.check_gold(name, row.answer, cfg.verify.verifier_options.get(name, {}), row.meta)
        if why is not None:
            field = f"answer_field = {config.answer_field!r} holds" if config.task is None else "the answer is"
            raise UserError(
                f"{field} {_short(row.answer)} in {row.where}, which its own verifier {name!r} refuses ({why.rstrip('.')}): "
                "correct that row, or choose another verifier"
            )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _split(cfg: RunConfig, tokenizer: Any, folder: Path) -> Finding:
    """How many questions are trained on and how many held out."""
    from rollout.prompts import PromptStream

    try:
        stream = PromptStream(cfg.data, tokenizer, cfg.seed, folder)
        held = len(stream.heldout(cfg.eval.eval_prompts))
    except UserError as error:
        return Finding("problem", "data", str(error))
    counts = ", ".join(f"{s.train:,} of {s.name}" if s.train is not None else f"{s.name} without end" for s in stream.stats())
    asked = f" of the {cfg.eval.eval_prompts} asked for" if held < cfg.eval.eval_prompts else ""
    return Finding("ok", "data", f"to train on: {counts}; held out for evaluation: {held}{asked}")
