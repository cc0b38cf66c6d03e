"""Recipes and flags become one config, and a config becomes TOML again.

Not covered: what the settings do; the sentences about data and models (test_check).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import RunConfig, fields, resolved_objective
from cluster.load import RECIPES, builtin_recipes, load, merge, parse_flags, preset_keys, to_toml
from learner.variants import PRESETS
from rollout.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path):
    def write(text: str) -> str:
        file = tmp_path / "r.toml"
        file.write_text(text)
        return str(file)

    return write


def complaint(recipe: str | None, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        load(recipe, flags)
    said = str(caught.value)
    assert "\n" not in said
    return said


# -- flags


def test_a_flag_works_by_dotted_and_bare_name_with_space_or_equals() -> None:
    for flags in (["--optim.lr", "1e-4"], ["--lr", "1e-4"], ["--lr=1e-4"], ["--optim.lr=1e-4"]):
        assert load(None, flags).optim.lr == 1e-4


def test_model_as_a_flag_is_the_model_and_not_its_section() -> None:
    assert load(None, ["--model", "some/model"]).model.model == "some/model"


def test_dashes_within_a_name_are_read_as_underscores() -> None:
    assert load(None, ["--batch-size", "4"]).buffer.batch_size == 4


@pytest.mark.parametrize(
    ("flags", "value"),
    [(["--resume"], True), (["--resume", "true"], True), (["--resume=false"], False), (["--resume", "--run_dir", "x"], True)],
)
def test_a_boolean_needs_no_value(flags: list[str], value: bool) -> None:
    assert load(None, ["--run_dir", "x", *flags]).resume is value


def test_a_bare_boolean_does_not_swallow_what_follows() -> None:
    assert parse_flags(["--resume", "arithmetic"]) == ({"resume": "true"}, ["arithmetic"])


def test_flags_before_and_after_other_arguments() -> None:
    assert parse_flags(["--lr", "1", "arithmetic", "--steps", "3"]) == ({"optim.lr": "1", "steps": "3"}, ["arithmetic"])


def test_negative_numbers_are_values() -> None:
    assert load(None, ["--seed", "-3"]).seed == -3
    assert parse_flags(["--lr", "-1e-4"])[0] == {"optim.lr": "-1e-4"}


def test_lists_and_tables_are_json_and_escapes_mean_what_they_say() -> None:
    cfg = load(None, ["--stop", '["\\n", "END"]', "--verifier_options", '{"numeric": {"a": [1]}}'])
    assert cfg.rollout.stop == ["\n", "END"]
    assert cfg.verify.verifier_options == {"numeric": {"a": [1]}}


def test_short_forms_of_a_list_of_one_text_and_of_a_table_of_one_key() -> None:
    cfg = load(None, ["--stop", "###", "--template", "enable_thinking=false", "--prompt_format", "chat"])
    assert cfg.rollout.stop == ["###"]
    assert cfg.data.template == {"enable_thinking": False}


def test_a_choice_of_numbers_is_read_from_text() -> None:
    assert load(None, ["--std_ddof", "1"]).objective.std_ddof == 1


def test_null_takes_a_setting_back(recipe) -> None:
    assert load(recipe('run_dir = "a"'), ["--run_dir", "null"]).run_dir is None


def test_the_last_of_two_equal_flags_counts() -> None:
    assert load(None, ["--lr", "1e-4", "--optim.lr", "1e-5"]).optim.lr == 1e-5


# -- precedence


def test_a_flag_goes_over_the_recipe_and_leaves_the_rest_of_its_section(recipe) -> None:
    cfg = load(recipe("steps = 7\n[optim]\nlr = 1e-3\nepochs = 2"), ["--lr", "1e-4"])
    assert (cfg.steps, cfg.optim.lr, cfg.optim.epochs, cfg.optim.eps) == (7, 1e-4, 2, 1e-8)


def test_the_recipe_goes_over_its_variant(recipe) -> None:
    cfg = load(recipe('variant = "dapo"\n[objective]\nclip_high = 0.5'))
    assert (cfg.objective.clip_high, cfg.objective.filter_groups, cfg.objective.kl_coef) == (0.5, True, 0)


def test_a_variant_flag_takes_the_place_of_the_recipes_and_goes_over_its_keys(recipe) -> None:
    text = 'variant = "dapo"\n[objective]\nloss_agg = "token-sum"\nentropy_coef = 0.01'
    cfg = load(recipe(text), ["--variant", "dr_grpo"])
    assert cfg.variant == "dr_grpo"
    assert (cfg.objective.adv_norm, cfg.objective.loss_agg) == ("none", "seq-mean-token-sum-norm")
    assert (cfg.objective.filter_groups, cfg.objective.clip_high) == (False, None)  # nothing of dapo is left
    assert cfg.objective.entropy_coef == 0.01


def test_a_variant_sets_keys_of_objective_and_critic(recipe) -> None:
    cfg = load(recipe('variant = "vapo"\n[critic]\nvalue_pretrain = 7'), ["--positive_nll", "0"])
    assert (cfg.objective.baseline, cfg.objective.clip_high, cfg.critic.gae_length_alpha) == ("critic", 0.28, 0.05)
    assert (cfg.critic.value_pretrain, cfg.critic.positive_nll, cfg.batches) == (7, 0.0, cfg.steps + 7)
    cfg = load(recipe('variant = "vapo"'), ["--variant", "dapo"])
    assert cfg.critic.value_pretrain == 0 and cfg.batches == cfg.steps


def test_a_flag_goes_over_the_variant_wherever_it_stands() -> None:
    for flags in (["--variant", "dapo", "--clip_high", "0.3"], ["--clip_high", "0.3", "--variant", "dapo"]):
        assert load(None, flags).objective.clip_high == 0.3


def test_what_was_given_is_told_from_defaults(recipe) -> None:
    cfg = load(recipe("[objective]\nclip = 0.1"), ["--std_eps", "1e-4"])
    assert cfg.objective.model_fields_set == {"clip", "std_eps"}


def test_tables_and_lists_are_replaced_whole(recipe) -> None:
    cfg = load(recipe("[verify]\nreward_weights = { numeric = 1.0, format = 0.5 }"), ["--reward_weights", "numeric=2"])
    assert cfg.verify.reward_weights == {"numeric": 2.0}


def test_merge_does_not_change_what_it_is_given() -> None:
    tree = {"optim": {"lr": 1.0}}
    assert merge(tree, {"optim.lr": "2"}) == {"optim": {"lr": "2"}}
    assert tree == {"optim": {"lr": 1.0}}


# -- recipes


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_built_in_recipe_loads_and_is_short(name: str) -> None:
    load(name)
    assert len((RECIPES / f"{name}.toml").read_text().splitlines()) <= 40


def test_the_recipes_that_the_documents_name_are_there() -> None:
    assert {"arithmetic", "gsm8k_qwen3"} <= set(builtin_recipes())


def test_a_run_folder_is_a_recipe_whose_run_dir_is_the_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(load("arithmetic", ["--run_dir", "elsewhere", "--steps", "3"])))
    cfg = load(str(run))
    assert (cfg.steps, cfg.run_dir) == (3, str(run))


# -- what a user gets wrong


def test_unknown_key_in_a_recipe_names_the_nearest(recipe) -> None:
    said = complaint(recipe("[optim]\nlearning_rate_min = 1\nlrr = 1e-4"))
    assert "(and 1 more problem)" in said
    said = complaint(recipe("[optim]\nlrr = 1e-4"))
    assert "unknown key optim.lrr = 0.0001" in said and "did you mean optim.lr?" in said and "r.toml" in said
    assert "did you mean optim.lr?" in complaint(recipe("[optim]\nlearning_rate = 1e-4"))


def test_a_key_in_the_wrong_section_is_shown_its_place(recipe) -> None:
    assert "did you mean optim.lr?" in complaint(recipe("lr = 1e-4"))
    assert "did you mean rollout.max_tokens?" in complaint(recipe("[data]\nmax_tokens = 5"))


def test_unknown_key_within_a_source(recipe) -> None:
    said = complaint(recipe('[[data.sources]]\ntask = "addition"\nverifer = "numeric"'))
    assert "data.sources[0].verifer" in said and "verifier" in said.split("did you mean")[1]


def test_unknown_flag_names_the_nearest() -> None:
    assert complaint(None, "--learning_rat", "1").startswith("unknown flag --learning_rat")
    assert "did you mean --temperature?" in complaint(None, "--temprature", "1")
    assert "did you mean --optim.lr?" in complaint(None, "--optim.lrr", "1")
    assert "did you mean --optim.lr?" in complaint(None, "--learning-rate", "1")
    assert complaint(None, "--qqqqqqq", "1").endswith("see --help for all there are")
    assert complaint(None, "--no-resume").endswith("write --resume false")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--lr", "fast"], ["optim.lr", '"fast"', "--lr", "give a number"]),
        (["--steps", "2.5"], ["steps", '"2.5"', "whole number"]),
        (["--resume", "--resume=maybe"], ["resume", '"maybe"', "true or false"]),
        (["--lr", "-1"], ["optim.lr", '"-1"', "greater than 0"]),
        (["--engine", "vlm"], ["rollout.engine", '"vlm"', "vllm, fake", "nearest is 'vllm'"]),
        (["--stop", '["a"'], ["--stop", "is not JSON", '["a", "b"]']),
        (["--sources", "addition"], ["--sources", "is not JSON", '[{"task": "addition"}]']),
        (["--template", "nothing"], ["--template", "is not JSON", "key=1"]),
        (["--stop", "[1]"], ["rollout.stop[0]", "text in quotes"]),
        (["--steps"], ["--steps has no value"]),
        (["--steps", "--lr", "1"], ["--steps has no value"]),
        (["--top_p", "0.9"], ["rollout.top_p = 0.9", "set it to 1.0"]),
        (["stray"], ["'stray'"]),
        (["--lr", "inf"], ["optim.lr", '"inf"', "finite"]),
        (["--temperature", "nan"], ["rollout.temperature", '"nan"', "finite"]),
        (["--verify_timeout", "inf"], ["verify.verify_timeout", "finite"]),
        (["arithmetic", "--keep_best", "maybe"], ["keep_best = 'maybe' is not true or false", "--keep_best true"]),
    ],
)
def test_wrong_values_of_flags(flags: list[str], parts: list[str]) -> None:
    said = complaint(None, *flags)
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[optim]\nlr = "fast"', ["optim.lr", '"fast"', "r.toml", "give a number"]),
        ("optim = 3", ["optim", "3", "section"]),
        ("[optim]\nlr = inf", ["optim.lr = inf", "r.toml", "finite"]),
        ("[eval]\neval_top_p = nan", ["eval.eval_top_p = nan", "finite"]),
        ("steps = true", ["steps = true", "r.toml", "give a number"]),
        ("[data]\nsources = 3", ["data.sources", "3", "list"]),
        ("steps = ", ["r.toml is not TOML", "line 1"]),
        ("steps = 1\nsteps = 2", ["r.toml is not TOML", "line 2"]),
    ],
)
def test_wrong_values_of_recipes(recipe, text: str, parts: list[str]) -> None:
    said = complaint(recipe(text))
    for part in parts:
        assert part in said


def test_a_section_that_is_a_value_under_a_flag(recipe) -> None:
    assert "[optim]" in complaint(recipe("optim = 3"), "--lr", "1")


def test_a_variant_that_does_not_exist_names_the_nearest(recipe) -> None:
    for said in (complaint(None, "--variant", "dapoo"), complaint(recipe('variant = "dapoo"'))):
        assert "variant = dapoo" in said and "nearest is dapo;" in said
    for name, close in (("dpao", "dapo"), ("GRPO", "grpo"), ("dr-grpo", "dr_grpo"), ("ppo", "vc-ppo"), ("olmo", "olmo3")):
        assert f"nearest is {close};" in complaint(None, "--variant", name)
    said = complaint(None, "--variant", "xyzzy")
    assert "nearest" not in said and "choose one of grpo, grpo-paper" in said


def test_missing_recipe_names_the_built_in_ones(tmp_path: Path) -> None:
    said = complaint("arithmetics")
    assert "'arithmetics'" in said and "nearest is 'arithmetic'" in said
    assert "config.toml" in complaint(str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--value_clip", "0.2"], ["value_clip = 0.2", "baseline = critic", "drop"]),
        (["--variant", "vapo", "--gae_length_alpha", "0"], ["critic.gae_length_alpha = \"0\"", "greater than 0"]),
        (["--variant", "vapo", "--gae_length_alpha", "-1"], ["critic.gae_length_alpha = \"-1\"", "greater than 0"]),
        (["--variant", "vapo", "--gae_lambda", "0.9"], ["gae_lambda = 0.9", "gae_length_alpha = 0.05"]),
        (["--variant", "vapo", "--adv_norm", "std"], ["adv_norm = std", "batch or none"]),
    ],
)
def test_wrong_flags_of_the_critic(flags: list[str], parts: list[str]) -> None:
    said = complaint(None, *flags)
    for part in parts:
        assert part in said


# -- back to TOML


ODD = '{"a b": [1, null, {"c": 1e-30}]}'
SCALARS = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text(max_size=8))


@pytest.mark.parametrize("name", builtin_recipes())
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--variant", "rloo"],
        ["--variant", "grpo", "--kl_in", "reward"],
        ["--variant", "vapo", "--value_model", "a/b"],
        ["--variant", "vapo", "--gae_length_alpha", "null", "--gae_lambda", "0.9"],
        ["--variant", "olmo3", "--stop", '["\\n\\"x\\u007f"]', "--engine_options", ODD],
    ],
)
def test_to_toml_reads_back_the_same(name: str, flags: list[str], tmp_path: Path) -> None:
    cfg = load(name, flags)
    file = tmp_path / "again.toml"
    file.write_text(to_toml(cfg))
    again = load(str(file))
    resolved = resolved_objective(cfg)
    assert again.model_dump() == _without_null(cfg.model_dump()) | {"objective": resolved.model_dump()}
    assert resolved_objective(again) == resolved
    assert to_toml(again) == to_toml(cfg)


def _without_null(tree):
    """null within a free table has no spelling in TOML and is left out."""
    tree["rollout"]["engine_options"] = {k: [x for x in v if x is not None] for k, v in tree["rollout"]["engine_options"].items()}
    return tree


def test_to_toml_has_every_key_that_has_a_value() -> None:
    import tomllib

    tree = tomllib.loads(to_toml(load("arithmetic", ["--variant", "grpo"])))
    there = {f"{s}.{k}" for s, v in tree.items() if isinstance(v, dict) for k in v} | {k for k in tree}
    missing = {key for key in fields() if key not in there}
    default = RunConfig()
    for key in missing:
        value = default
        for part in key.split("."):
            value = getattr(value, part)
        assert value is None, key


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20), st.dictionaries(st.text(max_size=5), SCALARS, max_size=3))
def test_any_text_and_table_survives(text: str, table: dict) -> None:
    import tomllib

    cfg = RunConfig.model_validate({"name": text, "rollout": {"engine_options": table, "stop": [text]}})
    tree = tomllib.loads(to_toml(cfg))
    assert (tree["name"], tree["rollout"]["stop"], tree["rollout"]["engine_options"]) == (text, [text], table)


def test_preset_keys_are_keys_of_the_tree() -> None:
    for name in PRESETS:
        assert set(preset_keys(name)) <= set(fields())
    assert preset_keys(None) == {}
