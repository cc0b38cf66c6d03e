"""The stream of prompts: seeded order, exact resume, mixing, retirement, and no question on both sides.

Not covered: chat rendering (test_chat), file layouts (test_sources), memory of sets too large to be made here.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import DataConfig, SourceConfig
from rollout.errors import UserError
from rollout.prompts import PromptStream, permute
from rollout.records import Prompt, PromptResult
from rollout.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
SMALL = SourceConfig(task="addition", options={"digits": 1})  # 100 questions


def stream(*sources: SourceConfig, seed: int = 0, **config: Any) -> PromptStream:
    return PromptStream(DataConfig(sources=list(sources) or [SourceConfig(task="addition")], **config), TOKENIZER, seed)


def take(s: PromptStream, n: int) -> list[Prompt]:
    found = [s.next() for _ in range(n)]
    assert all(p is not None for p in found)
    return found  # type: ignore[return-value]


def names(prompts: list[Prompt]) -> list[tuple[int, str, str, int]]:
    return [(p.uid, p.source, p.row, p.epoch) for p in prompts]


def questions(path: Path, texts: list[str]) -> SourceConfig:
    path.write_text("".join(json.dumps({"prompt": t, "answer": str(len(t))}) + "\n" for t in texts))
    return SourceConfig(path=str(path))


# ---- order


@given(st.integers(1, 700), st.text(max_size=8))
@settings(max_examples=40, deadline=None)
def test_permute_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permute_needs_no_memory_and_depends_on_its_key() -> None:
    huge = 26**40
    assert len({permute(i, huge, "k") for i in range(50)}) == 50
    assert any(permute(i, huge, "k") > huge // 2 for i in range(50))
    assert [permute(i, 100, "a") for i in range(100)] != [permute(i, 100, "b") for i in range(100)]


def test_permute_is_near_to_uniform() -> None:
    """Over many keys, each of 5 places receives each of 5 numbers about equally often (chi-square, 16 degrees, p = 1e-4)."""
    n = 2000
    counts = Counter((i, permute(i, 5, str(key))) for key in range(n) for i in range(5))
    chi = sum((counts[i, j] - n / 5) ** 2 / (n / 5) for i in range(5) for j in range(5))
    assert chi < 45


def test_an_epoch_has_every_training_question_once_and_the_next_is_shuffled_anew() -> None:
    s = stream(SMALL)
    train = s.stats()[0].train
    assert train is not None and 80 < train < 100
    first, second = take(s, train), take(s, train)
    assert {p.epoch for p in first} == {0} and {p.epoch for p in second} == {1}
    assert len({p.row for p in first}) == train
    assert {p.row for p in first} == {p.row for p in second}
    assert [p.row for p in first] != [p.row for p in second]
    assert [p.uid for p in first + second] == list(range(2 * train))


def test_the_seed_decides_the_order_and_shuffle_can_be_off() -> None:
    assert names(take(stream(seed=1), 50)) == names(take(stream(seed=1), 50)) != names(take(stream(seed=2), 50))
    rows = [int(p.row) for p in take(stream(SMALL, shuffle=False), 60)]
    assert rows == sorted(rows) and rows[0] < 10


def test_prompts_are_whole_records() -> None:
    prompt = take(stream(), 1)[0]
    a, b = prompt.text.rstrip("=").split("+")
    assert prompt.answer == str(int(a) + int(b))
    assert TOKENIZER.decode(prompt.tokens_P) == prompt.text
    assert (prompt.uid, prompt.source, prompt.verifier, prompt.epoch) == (0, "addition", "numeric", 0)


# ---- mixing


def test_weights_hold_exactly_and_evenly() -> None:
    s = stream(SourceConfig(task="addition", weight=3), SourceConfig(task="gcd", weight=1), SourceConfig(task="products", weight=0.5))
    found = [p.source for p in take(s, 900)]
    assert Counter(found) == {"addition": 600, "gcd": 200, "products": 100}
    for start in range(0, 900, 90):  # and in every stretch of it
        assert Counter(found[start : start + 90]) == {"addition": 60, "gcd": 20, "products": 10}


def test_a_source_that_is_used_up_leaves_the_others_their_shares(tmp_path: Path) -> None:
    s = stream(questions(tmp_path / "few.jsonl", ["a", "b", "c", "d"]), SMALL, heldout_share=0.0)
    for row in "0123":
        s.retire("few", row)
    assert {p.source for p in take(s, 20)} == {"addition"}


# ---- resume

OPS = st.lists(st.sampled_from(["next", "next", "next", "retire", "solved", "half"]), max_size=60)


@given(OPS, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_resume_goes_on_at_the_exact_prompt(ops: list[str], seed: int) -> None:
    sources = (SourceConfig(task="products", weight=0.4), SMALL, SourceConfig(task="gcd", options={"maximum": 500}))
    options: dict[str, Any] = {"seed": seed, "max_prompt_tokens": 12, "retire_after": 2, "curriculum": True}
    s = stream(*sources, **options)
    last = None
    for op in ops:
        if op == "next":
            last = s.next()
        elif last is not None and op == "retire":
            s.retire(last.source, last.row)
        elif last is not None:
            s.note([PromptResult(last.source, last.row, 4 if op == "solved" else 2, 4)])
    again = stream(*sources, **options)
    again.load(json.loads(json.dumps(s.state())))
    assert again.state() == s.state() and again.stats() == s.stats()
    assert names(take(again, 150)) == names(take(s, 150))


def test_recall_gives_the_same_prompt_again() -> None:
    prompt = take(stream(), 7)[-1]
    again = stream().recall(prompt.uid, prompt.source, prompt.row, prompt.epoch)
    assert again.tokens_P.tolist() == prompt.tokens_P.tolist()
    assert names([again]) == names([prompt]) and (again.text, again.answer) == (prompt.text, prompt.answer)


def test_resume_refuses_another_seed_or_other_data(tmp_path: Path) -> None:
    first = stream(questions(tmp_path / "x.jsonl", ["a", "b", "c"]))
    state = first.state()
    with pytest.raises(UserError, match="seed = 1 is not the seed = 0"):
        stream(SourceConfig(path=str(tmp_path / "x.jsonl")), seed=1).load(state)
    with pytest.raises(UserError, match="source 'x' has other rows"):
        stream(questions(tmp_path / "x.jsonl", ["a", "b", "d"])).load(state)
    with pytest.raises(UserError, match="sources = addition are not those of the checkpoint"):
        stream().load(state)
    large, other = (SourceConfig(task="chain_sum", options={"terms": n, "digits": 2}) for n in (4, 5))
    with pytest.raises(UserError, match="source 'chain_sum' has other rows"):
        stream(other).load(stream(large).state())


# ---- retirement


def test_retired_rows_never_come_again_and_then_the_stream_ends(tmp_path: Path) -> None:
    s = stream(questions(tmp_path / "x.jsonl", [f"q{i}" for i in range(12)]), heldout_share=0.0)
    gone: set[str] = set()
    for _ in range(12):
        prompt = s.next()
        assert prompt is not None and prompt.row not in gone
        s.retire(prompt.source, prompt.row)
        gone.add(prompt.row)
    uid = s.uid
    assert s.next() is None and s.next() is None and s.uid == uid
    again = stream(SourceConfig(path=str(tmp_path / "x.jsonl")), heldout_share=0.0)
    again.load(s.state())
    assert again.next() is None


def test_prompts_that_stay_solved_are_retired_until_none_is_left(tmp_path: Path) -> None:
    s = stream(questions(tmp_path / "x.jsonl", [f"q{i}" for i in range(6)]), heldout_share=0.0, retire_after=2)
    solved = [(p.source, p.row) for p in take(s, 6)]
    s.note(PromptResult(*prompt, 3 if i == 4 else 4, 4) for i, prompt in enumerate(solved))
    s.note(PromptResult(*prompt, 4, 4) for prompt in solved)
    assert s.stats()[0].retired == 5 and {p.row for p in take(s, 4)} == {solved[4][1]}
    s.note([PromptResult(*solved[4], 4, 4), PromptResult(*solved[0], 4, 4)])
    assert s.next() is None and s.stats()[0].retired == 6


def test_a_curriculum_prefers_prompts_of_a_middling_pass_rate(tmp_path: Path) -> None:
    s = stream(questions(tmp_path / "x.jsonl", [f"q{i}" for i in range(30)]), heldout_share=0.0, curriculum=True)
    rows = [p.row for p in take(s, 30)]
    kinds = {row: ("never", "half", "always")[i % 3] for i, row in enumerate(rows)}
    s.note(PromptResult("x", row, {"never": 0, "half": 8, "always": 16}[kind], 16) for row, kind in kinds.items())
    found = Counter(kinds[p.row] for p in take(s, 1000))
    chance = 4 * (0.5 / 17) * (16.5 / 17)
    assert found["half"] / 1000 == pytest.approx(1 / (1 + 2 * chance), abs=0.04)
    assert found["never"] / found["half"] == pytest.approx(chance, abs=0.04) == found["always"] / found["half"]


# ---- overlong


def test_overlong_prompts_are_dropped_and_counted_once(tmp_path: Path) -> None:
    source = questions(tmp_path / "x.jsonl", ["short", "x" * 21, "x" * 20, "y" * 30])
    s = stream(source, max_prompt_tokens=20, heldout_share=0.0)
    assert {p.text for p in take(s, 20)} == {"short", "x" * 20}
    assert s.stats()[0].overlong == 2
    strict = stream(source, max_prompt_tokens=20, heldout_share=0.0, overlong_prompts="error")
    with pytest.raises(UserError, match=r"x.jsonl line [24] has (21|30) tokens, more than max_prompt_tokens = 20"):
        take(strict, 4)


@pytest.mark.parametrize("task", [SMALL, SourceConfig(task="letter_counting", options={"length": 30})])
def test_all_prompts_overlong_is_an_error_and_no_endless_search(task: SourceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.prompts.OVERLONG_IN_A_ROW", 200)
    with pytest.raises(UserError, match=f"every prompt of source '{task.task}' has more than max_prompt_tokens = 3"):
        stream(task, max_prompt_tokens=3).next()


def test_overlong_and_retired_together_end_the_stream(tmp_path: Path) -> None:
    s = stream(questions(tmp_path / "x.jsonl", ["a", "b", "x" * 30]), max_prompt_tokens=20, heldout_share=0.0)
    seen = {p.row for p in take(s, 6)}
    assert seen == {"0", "1"}
    for row in seen:
        s.retire("x", row)
    assert s.next() is None


# ---- held out


@pytest.mark.parametrize("task", [SMALL, SourceConfig(task="addition"), SourceConfig(task="chain_sum", options={"terms": 4, "digits": 2})])
def test_held_out_and_training_questions_never_meet(task: SourceConfig) -> None:
    held = stream(task, seed=5).heldout(300)
    texts = {p.text for p in held}
    assert [p.uid for p in held] == [-1 - i for i in range(len(held))]
    assert len(texts) == len(held) > 5
    for seed in (0, 1):
        s = stream(task, seed=seed)
        assert not texts & {p.text for p in take(s, 1500)}
        assert all(s.is_heldout(t) for t in texts)


def test_held_out_is_the_same_for_every_seed_and_smaller_ones_come_first() -> None:
    sources = (SMALL, SourceConfig(task="number_sequence", weight=2), SourceConfig(task="chain_sum", options={"terms": 5, "digits": 2}))
    many = names(stream(*sources, seed=1).heldout(60))
    assert names(stream(*sources, seed=2).heldout(60)) == many
    assert names(stream(*sources, seed=3).heldout(17)) == many[:17]
    assert Counter(source for _, source, _, _ in many[:20]) == {"addition": 5, "number_sequence": 10, "chain_sum": 5}


def test_held_out_does_not_move_the_training_stream() -> None:
    one, two = stream(), stream()
    one.heldout(50)
    assert names(take(one, 30)) == names(take(two, 30))


def test_the_same_question_twice_lands_on_one_side(tmp_path: Path) -> None:
    texts = [f"question {i % 100}" + " " * (i // 100) for i in range(300)]
    s = stream(questions(tmp_path / "x.jsonl", texts))
    held = [" ".join(p.text.split()) for p in s.heldout(1000)]
    train = {" ".join(p.text.split()) for p in take(s, 400)}
    assert len(held) == len(set(held)) and len(held) + len(train) == 100 and not set(held) & train
    assert 3 <= len(held) <= 20


def test_small_sets_hold_out_one_and_a_single_row_none(tmp_path: Path) -> None:
    two = stream(questions(tmp_path / "two.jsonl", ["a", "b"]), heldout_share=1e-9)
    assert len(two.heldout(5)) == 1 and {two.next().text, two.heldout(1)[0].text} == {"a", "b"}  # type: ignore[union-attr]
    one = stream(questions(tmp_path / "one.jsonl", ["a"]), heldout_share=1e-9)
    assert one.heldout(5) == [] and take(one, 3)[2].text == "a"
    with pytest.raises(UserError, match="source 'two' has 2 rows and all are held out"):
        stream(SourceConfig(path=str(tmp_path / "two.jsonl")), heldout_share=0.999999999)


def test_eval_sources_are_held_out_exactly(tmp_path: Path) -> None:
    train = questions(tmp_path / "train.jsonl", [f"q{i}" for i in range(50)])
    test = questions(tmp_path / "test.jsonl", ["q3 ", "other", "q7"])
    s = stream(train, eval_sources=[test])
    assert sorted(p.text for p in s.heldout(10)) == ["other", "q3 ", "q7"]
    assert {p.source for p in s.heldout(10)} == {"test"}
    assert {p.text for p in take(s, 96)} == {f"q{i}" for i in range(50)} - {"q3", "q7"}
    assert s.stats()[0].train == 48


def test_eval_tasks_take_from_the_held_out_side() -> None:
    s = stream(SMALL, SourceConfig(task="chain_sum"), eval_sources=[SourceConfig(task="chain_sum", options={"terms": 2})])
    held = {p.text for p in s.heldout(100)}
    assert len(held) > 3 and not held & {p.text for p in take(s, 400)}


def test_heldout_drops_overlong_prompts(tmp_path: Path) -> None:
    s = stream(SMALL, eval_sources=[questions(tmp_path / "t.jsonl", ["ok", "x" * 30])], max_prompt_tokens=20)
    assert [p.text for p in s.heldout(5)] == ["ok"]


# ---- checks


def test_iter_rows_reads_all_of_a_set_and_some_of_a_huge_task(tmp_path: Path) -> None:
    file = questions(tmp_path / "x.jsonl", ["a", "bb", "ccc"])
    s = stream(file, SourceConfig(task="chain_sum", options={"terms": 6, "digits": 3}), eval_sources=[SMALL])
    counts = Counter(name for name, _ in s.iter_rows())
    assert counts == {"x": 3, "chain_sum": 1000, "addition": 100}
    assert Counter(name for name, _ in s.iter_rows(limit=2)) == {"x": 2, "chain_sum": 2, "addition": 2}
    assert [row.answer for _, row in islice(s.iter_rows(), 3)] == ["1", "2", "3"]


def test_no_source_and_no_template_are_sentences() -> None:
    with pytest.raises(UserError, match=r"sources = \[\]"):
        PromptStream(DataConfig(sources=[]), TOKENIZER, 0)
    with pytest.raises(UserError, match="needs a tokenizer with a chat template"):
        stream(prompt_format="chat")
