"""`winnow check`: what a user can get wrong in data, model and machine, each as one sentence.

Not covered: the hub itself (no test goes to a network), and the log-probability check against the real engine at the start of a run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster import check, hub, launch, resources
from cluster.load import load
from rollout.errors import UserError
from rollout.tiny import build_tokenizer

ROOT = Path(launch.__file__).parent.parent
ROWS = [{"question": f"{i} + {i + 1} = ?", "answer": f"work #### {2 * i + 1}"} for i in range(40)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 2 CPUs without GPUs, off the network, and no run behind the command line."""
    monkeypatch.setattr(resources, "gpus_here", lambda: 0)
    monkeypatch.setattr(resources, "cpus_here", lambda: 2)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fake = types.ModuleType("cluster.train")
    fake.train = lambda cfg: pytest.fail("an actor would have been started")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.train", fake)


def table(folder: Path, rows: list, name: str = "set.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(r) + "\n" if not isinstance(r, str) else r + "\n" for r in rows))
    return file


def source(path: object, **keys: str) -> list[str]:
    fields = {"path": str(path), "prompt_field": "question", "answer_field": "answer", "verifier": "gsm8k", **keys}
    return ["--sources", json.dumps([fields])]


def model_folder(folder: Path, context: int = 4096, template: str | None = None) -> Path:
    """A checkpoint's folder as far as `check` reads it."""
    build_tokenizer(folder, template)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": context}))
    save_file({"weight": np.zeros(3, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def problems(*flags: str) -> list[str]:
    return [f.text for f in check.preflight(load("arithmetic", ["--max_prompt_tokens", "200", "--warmup_steps", "0", *flags]))]


def test_the_built_in_recipe_passes(capsys: pytest.CaptureFixture) -> None:
    assert launch.main(["check", "arithmetic"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert all(line.startswith("ok ") for line in lines[:-1]) and lines[-1] == "nothing stands against this recipe"
    parts = [line.split()[1] for line in lines[:-1]]
    assert parts == ["config", "model", "tokenizer", "verifier", "data", "data", "resources"]
    assert "'<eos>'" in lines[2] and "held out for evaluation: 512" in lines[5]


def test_the_gsm8k_recipe_is_accepted_in_all_but_the_resources(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "model_settings", lambda name, key="": (_ for _ in ()).throw(hub.Unseen("is not on this machine")))
    monkeypatch.setattr(check, "_open", lambda *a: (_ for _ in ()).throw(hub.Unseen("is not on this machine")))
    assert launch.main(["check", "gsm8k_qwen3"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "resources" in said.err and "needs 2 GPUs" in said.err and "this machine has 0" in said.err
    assert said.out.splitlines()[-1] == "the recipe is accepted in all but the resources, which this machine lacks"
    assert sum(line.startswith("unseen") for line in said.out.splitlines()) == 3


def test_gsm8k_with_its_data_in_a_file_passes_where_there_are_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "gpus_here", lambda: 2)
    model = model_folder(tmp_path / "m", template=TEMPLATE)
    flags = [*source(table(tmp_path, ROWS)), "--eval_sources", "[]", "--model", str(model)]
    assert check.preflight(load("gsm8k_qwen3", flags)) == []


# -- the list of mistakes, through the command line as a user meets them


BAD_DATA = {
    "missing": (lambda d: d / "none.jsonl", {}, ["path =", "none.jsonl", "does not exist", "give"]),
    "empty": (lambda d: table(d, []), {}, ["path =", "is empty", "give"]),
    "not JSON": (lambda d: table(d, [ROWS[0], ROWS[1], "{nonsense"]), {}, ["path =", "not JSON at line 3", "write"]),
    "cut off": (lambda d: table(d, [ROWS[0], '{"question": ']), {}, ["not JSON at line 2", "column 14"]),
    "an array": (lambda d: table(d, ["[", *ROWS[:2], "]"]), {}, ["path =", "JSON array", "JSONL"]),
    "not an object": (lambda d: table(d, [ROWS[0], "[1]"]), {}, ["path =", "line 2", "object"]),
    "no prompt": (lambda d: table(d, ROWS), {"prompt_field": "prompt"}, ["prompt_field = 'prompt'", "line 1", "question, answer"]),
    "no answer": (lambda d: table(d, [*ROWS, {"question": "?"}]), {"answer_field": "answer"}, ["answer_field = 'answer'", "line 41"]),
    "bad gold": (
        lambda d: table(d, [*ROWS, {"question": "1 + 1 = ?", "answer": "two, I think"}]),
        {},
        ["answer_field = 'answer'", "'two, I think'", "line 41", "'gsm8k'", "correct"],
    ),
    "no verifier": (lambda d: table(d, ROWS), {"verifier": "gms8k"}, ["data.sources[0].verifier", "'gms8k'", "'gsm8k'"]),
}


@pytest.mark.parametrize("case", BAD_DATA)
@pytest.mark.parametrize("command", ["check", "train"])
def test_bad_data_is_one_sentence(case: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make, keys, parts = BAD_DATA[case]
    assert launch.main([command, "arithmetic", "--max_prompt_tokens", "200", *source(make(tmp_path), **keys)]) == 2
    said = capsys.readouterr()
    first = said.err.splitlines()[0]
    assert "data.sources[0]" in first
    for part in parts:
        assert part in first
    if command == "train":
        assert said.err.count("\n") == 1 and said.out == ""


def test_chat_needs_a_template(tmp_path: Path) -> None:
    [said] = problems("--model", str(model_folder(tmp_path / "m")), "--prompt_format", "chat")
    assert f"model.model = {str(tmp_path / 'm')!r}" in said
    assert "data.prompt_format = 'chat'" in said and "chat template" in said and "prompt_format = 'raw'" in said
    assert problems("--model", str(model_folder(tmp_path / "n", template=TEMPLATE)), "--prompt_format", "chat") == []


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--max_tokens", "313"], ["data.max_prompt_tokens = 200", "rollout.max_tokens = 313", "513", "512", "'tiny'", "lower"]),
        (["--eval_max_tokens", "400"], ["eval.eval_max_tokens = 400", "600", "512"]),
        (["--max_model_len", "1000"], ["rollout.max_model_len = 1000", "512", "lower"]),
    ],
)
def test_prompt_and_budget_must_fit_the_context(flags: list[str], parts: list[str]) -> None:
    [said] = problems(*flags)
    for part in parts:
        assert part in said


def test_prompt_and_budget_that_just_fit() -> None:
    assert problems("--max_tokens", "312") == []


def test_context_of_a_local_folder(tmp_path: Path) -> None:
    [said] = problems("--model", str(model_folder(tmp_path / "m", context=220)))
    assert "224" in said and "220" in said


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--engine_gpus", "1"], ["needs 1 GPU (rollout.engines = 1", "has 0"]),
        (["--learner_gpus", "1", "--learner_ranks", "3"], ["3 GPUs", "model.learner_ranks = 3", "has 0"]),
        (["--engines", "9"], ["2.6 CPUs", "rollout.engines = 9", "has 2"]),
    ],
)
def test_more_than_the_machine_has(flags: list[str], parts: list[str]) -> None:
    [said] = problems(*flags)
    for part in parts:
        assert part in said


def test_enough_gpus_are_no_problem_and_evaluation_needs_no_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "gpus_here", lambda: 1)
    assert problems("--engine_gpus", "0.5", "--learner_gpus", "0.5") == []
    cfg = load("arithmetic", ["--engine_gpus", "1", "--learner_gpus", "1"])
    assert len(check.preflight(cfg)) == 1 and check.preflight(cfg, learner=False) == []
    [found] = check.preflight(load("arithmetic", ["--engine_gpus", "2", "--learner_gpus", "1"]), learner=False)
    assert "needs 2 GPUs" in found.text and "learner" not in found.text


def test_a_cluster_that_is_joined_is_not_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("--engine_gpus", "8", "--ray_address", "10.0.0.1:6379") == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert problems("--engine_gpus", "8") == []


def test_visible_devices_cut_the_gpus_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(resources, "_driver_gpus", lambda: 4)
    for value, count in ((None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert resources.gpus_here() == count


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("./nowhere", ["model.model = './nowhere'", "no folder"]),
        ("a/b/c", ["model.model = 'a/b/c'", "no folder"]),
        ("no such name!", ["model.model = 'no such name!'", "neither"]),
    ],
)
def test_a_model_that_cannot_be(model: str, parts: list[str]) -> None:
    [said] = problems("--model", model)
    for part in parts:
        assert part in said


def test_a_mistyped_path_below_a_folder_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "m")
    (tmp_path / "u").mkdir()
    [said] = problems("--model", "u/nope")
    assert "model.model = 'u/nope'" in said and "folder u" in said
    critic = ("--model", "m", "--baseline", "critic", "--adv_norm", "batch")
    for path in ("u/nope", "./nope", "/nope"):
        [said] = problems(*critic, "--value_model", path)
        assert f"critic.value_model = '{path}'" in said
    [said] = problems("--sources", '[{"hub": "u/nope", "verifier": "gsm8k"}]')
    assert "data.sources[0]: hub = 'u/nope'" in said and "folder u" in said
    assert problems(*critic, "--value_model", "m") == []
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 4}))
    assert problems("--baseline", "critic", "--adv_norm", "batch", "--value_model", "m") == []
    [said] = problems("--baseline", "critic", "--adv_norm", "batch", "--value_model", "m", "--tiny_layers", "7")
    assert said.startswith("value_model = 'm' has ") and "architecture" in said
    for key, value in (("intermediate_size", 7), ("num_attention_heads", 1), ("head_dim", 64)):
        (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "qwen3", key: value}))
        [said] = problems("--baseline", "critic", "--adv_norm", "batch", "--value_model", "m")
        assert said.startswith(f"value_model = 'm' has {key} = {value} and the policy ")
    [said] = problems("--baseline", "critic", "--adv_norm", "batch", "--value_model", "tiny")
    assert said.startswith("critic.value_model = 'tiny' is no checkpoint")


def test_a_folder_without_tokenizer_files_blames_the_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    for file in folder.glob("*token*"):
        file.unlink()
    [said] = problems("--model", str(folder))
    assert f"model.model = {str(folder)!r}" in said and "tokenizer files" in said


def test_wrong_data_comes_before_a_context_that_is_too_short() -> None:
    for flags, part in ((["--sources", '[{"task": "addishun"}]'], "addishun"), (["--engines", "9"], "512"), ([], "512")):
        with pytest.raises(UserError, match=part):
            check.raise_first(load("arithmetic", ["--max_tokens", "500", *flags]))


def test_a_data_set_that_can_only_be_a_folder_and_is_none() -> None:
    [said] = problems("--sources", '[{"hub": "./nowhere", "verifier": "gsm8k"}]')
    assert "data.sources[0]: hub = './nowhere'" in said and "no folder" in said


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "config.json").write_text("{")
    assert "config.json that cannot be read" in problems("--model", str(folder))[0]
    (folder / "config.json").unlink()
    assert "has no config.json" in problems("--model", str(folder))[0]
    config = json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096})
    (folder / "config.json").write_text(config)
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", whole[:-1], whole[:4]):
        (folder / "model.safetensors").write_bytes(damaged)
        [said] = problems("--model", str(folder))
        assert "model.safetensors that cannot be read" in said and f"model.model = {str(folder)!r}" in said
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "model-00002.safetensors"}}))
    assert "model-00002.safetensors that cannot be read" in problems("--model", str(folder))[0]
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    assert "without weights" in problems("--model", str(folder))[0]


def test_a_model_on_a_hub_out_of_reach_is_no_problem(capsys: pytest.CaptureFixture) -> None:
    found = list(check.look(load("arithmetic", ["--model", "someone/model-that-is-not-here"])))
    assert [f.state for f in found if f.part == "model"] == ["unseen"]
    assert [f for f in found if f.state == "problem"] == []
    assert check.report(load("arithmetic", ["--model", "someone/model-that-is-not-here"])) == 0
    unseen = sum(f.state == "unseen" for f in found)
    assert f"but {unseen} thing" in capsys.readouterr().out.splitlines()[-1]


def test_the_sizes_of_the_tiny_model() -> None:
    [said] = problems("--tiny_hidden", "100")
    assert "tiny_hidden = 100" in said and "multiple of 32" in said


def test_prompts_that_are_too_long(tmp_path: Path) -> None:
    long = [{"question": "9" * 300, "answer": "#### 1"}]
    [said] = problems(*source(table(tmp_path, ROWS + long)), "--overlong_prompts", "error")
    assert "line 41" in said and "300 tokens" in said and "overlong_prompts = 'drop'" in said
    assert problems(*source(table(tmp_path, ROWS + long))) == []
    [said] = problems(*source(table(tmp_path, ROWS)), "--max_prompt_tokens", "5")
    assert "data.max_prompt_tokens = 5" in said and "raise it" in said


def test_the_arithmetic_warm_up_wants_sums() -> None:
    [said] = problems("--sources", '[{"task": "gcd"}]', "--warmup_steps", "9")
    assert "warmup.warmup_steps = 9" in said and "addition" in said
    assert problems("--sources", '[{"task": "gcd"}]') == []


def test_verifiers_that_the_settings_name() -> None:
    said = problems("--reward_weights", '{"numbers": 1}')[0]
    assert "verify.reward_weights.numbers" in said and "'numbers'" in said
    [said] = problems("--verifier_options", '{"numbers": {}}')
    assert "verify.verifier_options.numbers" in said


def test_gold_is_held_against_the_verifiers_that_will_score(tmp_path: Path) -> None:
    rows = [{"question": "?", "answer": "#### 4"}] * 3
    for i, row in enumerate(rows):
        rows[i] = {**row, "question": f"{i}?"}
    file = table(tmp_path, rows)
    assert problems(*source(file)) == []
    wrong = table(tmp_path, [{"question": f"{i}?", "answer": "four"} for i in range(3)], "wrong.jsonl")
    assert "refuses" in problems(*source(wrong))[0]
    assert problems(*source(wrong), "--reward_weights", '{"random": 1}') == []


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"text_config": {"max_position_embeddings": 8}}, 8),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4096),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"n_positions": 1024}, 1024),
        ({}, None),
    ],
)
def test_context_length(settings: dict, length: int | None) -> None:
    assert hub.context_length(settings) == length


def test_in_a_real_process_a_bad_gold_answer_starts_no_actor(tmp_path: Path) -> None:
    file = table(tmp_path, [*ROWS, {"question": "1 + 1 = ?", "answer": "two"}])
    code = (
        "import sys; from cluster.launch import main; rc = main(sys.argv[1:]);"
        "print([m for m in ('ray', 'vllm') if m in sys.modules]); sys.exit(rc)"
    )
    argv = ["check", "arithmetic", "--max_prompt_tokens", "200", *source(file)]
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("problem  data") and "'two'" in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout.splitlines()[-1] == "[]"
