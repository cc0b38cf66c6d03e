"""Files, hub layouts and reasoning-gym: what is read, and the sentence for each thing that can be wrong with it.

Data sets are small local files laid out as GSM8K and DAPO-Math-17k. Not covered: the hub over a network, the real
reasoning-gym (a stand-in module takes its place).
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.config import SourceConfig
from rollout.errors import UserError
from rollout.sources import fingerprint, open_source, open_sources, rows_of

DAPO_FIELDS = {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def gsm8k(split: str, n: int) -> list[dict[str, str]]:
    return [
        {"question": f"Ann has {i} eggs and buys 2 ({split}). How many?", "answer": f"{i}+2=<<{i}+2={i + 2}>>\n#### {i + 2}"}
        for i in range(n)
    ]


def dapo(n: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"Solve: {i} squared.", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i * i), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{i}"},
        }
        for i in range(n)
    ]


def sentence(**config: Any) -> str:
    with pytest.raises(UserError) as error:
        open_source(SourceConfig(**config))
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- layouts


@pytest.mark.parametrize("card", [False, True])
def test_gsm8k_folder(tmp_path: Path, card: bool) -> None:
    folder = tmp_path / "gsm8k"
    (folder / "main").mkdir(parents=True)
    for split, n in (("train", 7), ("test", 3)):
        pq.write_table(pa.Table.from_pylist(gsm8k(split, n)), folder / "main" / f"{split}-00000-of-00001.parquet")
    if card:
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
            "  - split: test\n    path: main/test-*\n---\n"
        )
    config = SourceConfig(hub=str(folder), subset="main", split="test", prompt_field="question", verifier="gsm8k")
    source = open_source(config)
    assert (source.name, source.size) == ("gsm8k:main", 3)
    row = source.read(1)
    assert row.prompt == row.question == "Ann has 1 eggs and buys 2 (test). How many?"
    assert row.answer == "1+2=<<1+2=3>>\n#### 3"  # the verifier reads behind ####
    assert row.verifier == "gsm8k"
    assert open_source(config.model_copy(update={"split": "train"})).size == 7


def test_dapo_parquet_file(tmp_path: Path) -> None:
    file = tmp_path / "dapo-math-17k.parquet"
    pq.write_table(pa.Table.from_pylist(dapo(5)), file)
    source = open_source(SourceConfig(path=str(file), verifier_field="data_source", **DAPO_FIELDS))
    row = source.read(3)
    assert row.prompt == [{"role": "user", "content": "Solve: 3 squared."}]
    assert (row.question, row.answer, row.verifier) == ("Solve: 3 squared.", "9", "math_dapo")
    assert [r.answer for r in rows_of(source)] == ["0", "1", "4", "9", "16"]


def test_dapo_folder_on_disk_and_a_message_by_path(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(dapo(4))}).save_to_disk(str(tmp_path / "saved"))
    source = open_source(
        SourceConfig(hub=str(tmp_path / "saved"), prompt_field="prompt.0.content", answer_field="reward_model.ground_truth")
    )
    assert source.read(2).prompt == "Solve: 2 squared."
    assert "split = 'test'" in sentence(hub=str(tmp_path / "saved"), split="test", **DAPO_FIELDS)


def test_jsonl_rows_by_number_over_a_glob(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"q": "three", "a": 3.5}])
    write_jsonl(tmp_path / "a.jsonl", ["\ufeff" + json.dumps({"q": "öne", "a": 1}), "", {"q": "two", "a": [2]}])
    config = SourceConfig(path=str(tmp_path / "*.jsonl"), prompt_field="q", answer_field="a", meta_fields=["a"])
    source = open_source(config)
    assert [(r.question, r.answer) for r in rows_of(source)] == [("öne", "1"), ("two", "[2]"), ("three", "3.5")]
    assert [source.read(i) for i in (2, 0, 1)] == [list(rows_of(source))[i] for i in (2, 0, 1)]
    assert source.read(1).where.endswith("a.jsonl line 3")
    assert source.read(2).meta == {"a": 3.5}


def test_parquet_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    rows = dapo(6)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    write_jsonl(tmp_path / "x.jsonl", rows)
    one, two = (open_source(SourceConfig(path=str(tmp_path / f"x.{kind}"), **DAPO_FIELDS)) for kind in ("parquet", "jsonl"))
    assert [(r.prompt, r.answer) for r in rows_of(one)] == [(r.prompt, r.answer) for r in rows_of(two)]
    assert one.fingerprints().tolist() == two.fingerprints().tolist()  # type: ignore[union-attr]


def test_verifier_row_by_row(tmp_path: Path) -> None:
    file = write_jsonl(
        tmp_path / "m.jsonl", [{"prompt": "a", "answer": "1", "v": "numeric"}, {"prompt": "b", "answer": "#### 2", "v": "gsm8k"}]
    )
    source = open_source(SourceConfig(path=file, verifier="math", verifier_field="v"))
    assert [r.verifier for r in rows_of(source)] == ["numeric", "gsm8k"]


def test_names_are_unique() -> None:
    sources = open_sources([SourceConfig(task="addition"), SourceConfig(task="gcd"), SourceConfig(task="addition", options={"digits": 3})])
    assert [s.name for s in sources] == ["addition", "gcd", "addition#2"]


def test_fingerprint_is_stable_and_blind_to_white_space() -> None:
    assert fingerprint("47+38=") == 0xE05DFDB1C6F92A7B
    assert fingerprint("a  b\n") == fingerprint("a b") != fingerprint("ab")


# ---- errors


def test_missing_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    assert "nowhere.jsonl' does not exist" in sentence(path=str(tmp_path / "nowhere.jsonl"))
    assert "*.json' does not exist" in sentence(path=str(tmp_path / "*.json"))
    assert "empty.jsonl' is empty" in sentence(path=str(tmp_path / "empty.jsonl"))
    assert "empty.parquet' is empty" in sentence(path=str(tmp_path / "empty.parquet"))
    assert "is a folder" in sentence(path=str(tmp_path))


def test_not_json_at_line_n(tmp_path: Path) -> None:
    good = {"prompt": "a", "answer": "1"}
    text = sentence(path=write_jsonl(tmp_path / "bad.jsonl", [good, "", '{"prompt": "b", "answer"']))
    assert "bad.jsonl' is not JSON at line 3" in text
    text = sentence(path=write_jsonl(tmp_path / "list.jsonl", [good, [1, 2]]))
    assert "list.jsonl' has at line 2 a list" in text
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ö", "answer": "1"}'.encode("latin-1"))
    assert "not UTF-8 at line 1" in sentence(path=str(tmp_path / "latin.jsonl"))


def test_lacking_field_names_the_fields_there_are(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"question": "a", "answer": {"value": "1"}}])
    text = sentence(path=file, prompt_field="question", answer_field="answer.gold")
    assert "answer_field = 'answer.gold' is not in" in text and "d.jsonl line 1" in text and "question, answer.value" in text
    pq.write_table(pa.Table.from_pylist(dapo(2)), tmp_path / "d.parquet")
    text = sentence(path=str(tmp_path / "d.parquet"), answer_field="answer")
    assert "answer_field = 'answer'" in text and "reward_model.ground_truth" in text and "ability" in text
    text = sentence(path=str(tmp_path / "d.parquet"), verifier_field="kind", **DAPO_FIELDS)
    assert "verifier_field = 'kind'" in text


def test_one_bad_row_among_good_ones_is_found(tmp_path: Path) -> None:
    good = {"prompt": "a", "answer": "1"}
    assert "answer_field = 'answer' is not in" in sentence(path=write_jsonl(tmp_path / "a.jsonl", [good, {"prompt": "b"}]))
    assert "no value in" in sentence(path=write_jsonl(tmp_path / "b.jsonl", [good, {"prompt": "b", "answer": None}]))
    for bad in ("  ", [], [{"role": "user"}], 7):
        text = sentence(path=write_jsonl(tmp_path / "c.jsonl", [good, {"prompt": bad, "answer": "1"}]))
        assert "line 2" in text and "list of messages" in text


def test_unfit_files_and_hub_names(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n")
    (tmp_path / "x.parquet").write_text("not parquet")
    assert ".csv" in sentence(path=str(tmp_path / "x.csv"))
    assert "not a Parquet file" in sentence(path=str(tmp_path / "x.parquet"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"prompt": "a", "answer": "1"}])
    assert open_source(SourceConfig(hub=str(tmp_path / "set"))).size == 1
    assert "split = 'nope'" in sentence(hub=str(tmp_path / "set"), split="nope")
    assert "hub = " in sentence(hub=str(tmp_path / "void"))


def test_exactly_one_kind() -> None:
    assert "exactly one" in sentence() and "none" in sentence()
    assert "task and hub" in sentence(task="addition", hub="x")


# ---- reasoning-gym


def test_gym_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"gym = 'gcd' needs the extra `gym`"):
        open_source(SourceConfig(gym="gcd"), folder=tmp_path)


def test_gym_samples_are_stored_and_never_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def create_dataset(name: str, **options: Any) -> list[dict[str, Any]]:
        if name != "gcd":
            raise ValueError(f"Dataset '{name}' not registered")
        made.append(options)
        return [{"question": f"{len(made)}/{i}?", "answer": str(i), "metadata": {"i": i}} for i in range(options["size"])]

    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create_dataset))
    config = SourceConfig(gym="gcd", options={"size": 5, "max_value": 9})
    first = list(rows_of(open_source(config, seed=4, folder=tmp_path)))
    again = list(rows_of(open_source(config, seed=4, folder=tmp_path)))
    assert first == again and made == [{"size": 5, "seed": 4, "max_value": 9}]
    assert first[2].question == "1/2?" and first[2].meta["gym_entry"]["metadata"] == {"i": 2}
    open_source(config, seed=5, folder=tmp_path)
    assert len(made) == 2
    with pytest.raises(UserError, match="gym = 'gdc' .*not registered"):
        open_source(SourceConfig(gym="gdc"), folder=tmp_path)
