"""`winnow explain`: what would the loss do to this group of answers? Numbers from the formulas; no Ray, no model, no torch.

Shape legend: B answers of the group. The push on a token is −d loss / d log-probability of the policy term, at ratio 1 and
without a mismatch; there every objective pushes by A_i · w_i, the answer's advantage times its weight in the average.
"""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cluster import load
from learner.advantage import group_advantages, informative_groups, treat_overlong, weigh_rewards
from learner.config import ObjectiveConfig
from learner.denominators import answer_weights
from learner.variants import inert_clip, resolve_objective
from rollout.errors import UserError

PROBABILITIES = (0.6, 0.2, 0.05, 0.01)
"""Where a token may stand before the step; `max_prob` is in this order."""

_CONTEXT = ("rollout.max_tokens", "rollout.max_staleness", "optim.minibatches", "optim.epochs")


@dataclass(frozen=True)
class Explanation:
    """What an objective does to a group; its fields are the keys of `--json`.

    `max_prob`: how high a token at each of PROBABILITIES may rise before the clip stops it, and `steps_1_to_10`: steps from
    1 % to 10 % at that pace; None where no such cap exists (CISPO, SAPO, REINFORCE, ratios of whole answers).
    """

    variant: str
    flags: dict[str, Any]
    advantages: list[float]
    push_per_token: list[float]
    push_whole: list[float]
    max_prob: list[float] | None
    steps_1_to_10: int | None


@dataclass(frozen=True)
class Asked:
    """The group, as the command line gives it; `budget` is L in tokens, None where it was not given."""

    rewards_RB: np.ndarray
    lengths_B: np.ndarray
    budget: int | None

    @property
    def max_len(self) -> int:
        """L, which is the longest answer's length unless it is given."""
        return self.budget if self.budget is not None else max(int(self.lengths_B.max()), 1)


def main(argv: list[str]) -> int:
    """`winnow explain ARGUMENTS`; returns the exit code."""
    try:
        _main(argv)
        sys.stdout.flush()
    except UserError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough; the interpreter's own flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _main(argv: list[str]) -> None:
    args, rest = _parser().parse_known_args(_joined(argv))
    flags, loose = load.parse_flags(rest)
    flags |= {key: value for key, value in (("variant", args.variant), ("rollout.max_tokens", args.max_tokens)) if value is not None}
    if loose:
        raise UserError(f"the argument {loose[0]!r} belongs to no flag; flags are --key value, see winnow explain --help.")
    for key in flags:
        if not key.startswith("objective.") and key not in (*_CONTEXT, "variant"):
            raise UserError(f"--{key.rsplit('.', 1)[-1]} does not change what the loss does to a group; leave it out of winnow explain.")
    if args.compare is not None and "variant" in flags:
        raise UserError("--compare and --variant both choose variants; give one of them.")
    asked = _group(args.rewards, args.lengths, flags.get("rollout.max_tokens"))
    names = args.compare.split(",") if args.compare is not None else [str(flags.get("variant", "grpo"))]
    told = [explain(name, flags, asked) for name in names]
    if args.json:
        print(json.dumps([asdict(e) for e, _ in told] if args.compare is not None else asdict(told[0][0])))
    else:
        _show(told, asked)


def explain(variant: str, flags: dict[str, Any], asked: Asked) -> tuple[Explanation, list[str]]:
    """The explanation of `variant` under `flags` (dotted key -> value, as the command line's), and remarks in words.

    Raises UserError where the objective has no meaning.
    """
    answers = len(asked.lengths_B)
    if asked.budget is None and "objective.overlong_cache" in flags:
        raise UserError("overlong_cache measures lengths against the generation budget; add --max_tokens.")
    cfg = load.resolve(None, {**flags, "variant": variant, "rollout.group_size": answers, "rollout.max_tokens": asked.max_len})
    batch = (cfg.optim.minibatches, cfg.optim.epochs)
    objective = resolve_objective(
        cfg.objective,
        max_staleness=cfg.rollout.max_staleness,
        minibatches=batch[0],
        epochs=batch[1],
        variant=variant,
        group_size=answers,
        max_tokens=asked.budget,
    )
    notes = _notes(objective, asked, batch)
    advantage_B, masked_B = _advantages(objective, asked)
    lengths_B = np.where(masked_B, 0, asked.lengths_B)
    weights_B = answer_weights(lengths_B, np.zeros(answers), mode=objective.loss_agg, max_len=asked.max_len)
    push_B = advantage_B * weights_B
    max_prob, steps = _room(objective)
    told = Explanation(
        variant=variant,
        flags=objective.model_dump(),
        advantages=advantage_B.tolist(),
        push_per_token=push_B.tolist(),
        push_whole=(push_B * lengths_B).tolist(),
        max_prob=max_prob,
        steps_1_to_10=steps,
    )
    return told, notes


def _advantages(objective: ObjectiveConfig, asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    """(advantages [B], answers out of the loss [B]); an answer of the budget's length counts as cut off."""
    rewards_RB, lengths_B = asked.rewards_RB, asked.lengths_B
    group_B = np.zeros(len(lengths_B), dtype=np.int64)
    cut_B = np.zeros(len(lengths_B), dtype=bool) if asked.budget is None else lengths_B >= asked.budget
    extra_B, masked_B = treat_overlong(objective.overlong, cut_B, lengths_B, asked.max_len, objective.overlong_cache)
    raw_B = weigh_rewards(rewards_RB)
    gdpo = objective.reward_norm == "gdpo"
    if gdpo and extra_B.any():
        rewards_RB = np.concatenate([rewards_RB, extra_B[None]])
    if objective.filter_groups and not _spread(objective, asked.rewards_RB):
        masked_B = np.ones_like(masked_B)
    advantage_B = group_advantages(
        rewards_RB if gdpo else raw_B + extra_B,
        group_B,
        baseline=objective.baseline,
        scale=objective.adv_norm,
        std_ddof=objective.std_ddof,
        std_eps=objective.std_eps,
        spread_tol=objective.spread_tol,
        masked=masked_B,
        raw=None if gdpo else raw_B,
        reward_norm=objective.reward_norm,
    )
    return advantage_B, masked_B


def _spread(objective: ObjectiveConfig, rewards_RB: np.ndarray) -> bool:
    """Whether the group is informative: by any reward under gdpo, else by their sum."""
    rows = rewards_RB if objective.reward_norm == "gdpo" else weigh_rewards(rewards_RB)[None]
    one = np.zeros(rewards_RB.shape[1], dtype=np.int64)
    return any(informative_groups(row, one, spread_tol=objective.spread_tol).all() for row in rows)


def _room(objective: ObjectiveConfig) -> tuple[list[float] | None, int | None]:
    """(highest probability after one step from each of PROBABILITIES, steps from 1 % to 10 %) under the clip of single tokens."""
    if objective.policy_loss != "clip" or objective.ratio_level != "token":
        return None, None
    grow = 1 + (objective.clip if objective.clip_high is None else objective.clip_high)
    steps = math.ceil(math.log(10) / math.log(grow) - 1e-9) if grow > 1 else None
    return [min(p * grow, 1.0) for p in PROBABILITIES], steps


def _notes(objective: ObjectiveConfig, asked: Asked, batch: tuple[int, int]) -> list[str]:
    """What the numbers alone do not say."""
    notes = []
    if asked.budget is None and objective.loss_agg == "seq-mean-token-sum-norm":
        notes.append(f"no --max_tokens: the budget L that the sum is divided by is taken to be the longest answer, {asked.max_len}.")
    if inert_clip(objective, *batch):
        notes.append(
            "with one step per batch (minibatches = 1, epochs = 1) and the ratio to old every ratio is 1 when the step is taken, so "
            "no clip binds; the room for one token is what the clip allows when several steps share a batch."
        )
    if "batch" in (objective.baseline, objective.adv_norm) or objective.reward_norm == "gdpo":
        notes.append("statistics of the batch are taken over this one group.")
    if objective.filter_groups and not _spread(objective, asked.rewards_RB):
        notes.append("filter_groups: the group has no reward spread, so it does not train and another takes its place.")
    if objective.kl_coef > 0:
        notes.append("the KL term is not part of the push: its gradient is 0 where the policy is still the reference.")
    return notes


# -- what the command line says -----------------------------------------------------------------------------------


def _parser() -> load.SentenceParser:
    objective = "\n".join(f"  --{name}: {info.description}" for name, info in ObjectiveConfig.model_fields.items())
    parser = load.SentenceParser(
        prog="winnow explain",
        description="What would the loss do to this group of answers?",
        epilog="and any flag of the objective, with minibatches, epochs and max_staleness as their context:\n" + objective,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rewards", required=True, help="reward of each answer, 1,1,0; several rewards (gdpo) are divided by semicolons")
    parser.add_argument("--lengths", required=True, help="tokens of each answer, 200,200,1200")
    parser.add_argument("--variant", help="preset of objective flags; default: grpo")
    parser.add_argument("--compare", help="several variants side by side: grpo,dr_grpo,dapo,gspo")
    parser.add_argument("--max_tokens", help="generation budget L; answers of this length count as cut off; default: the longest, uncut")
    parser.add_argument("--json", action="store_true", help="for programs: one object, or with --compare a list of them")
    return parser


def _joined(argv: Sequence[str]) -> list[str]:
    """`--rewards -1,1` as `--rewards=-1,1`: argparse would take the value for a flag. Flags of the tree keep their own parser."""
    todo, out = list(argv), []
    while todo:
        token = todo.pop(0)
        if token in ("--rewards", "--lengths", "--compare") and todo:
            token = f"{token}={todo.pop(0)}"
        out.append(token)
    return out


def _group(rewards: str, lengths: str, budget: object) -> Asked:
    rows = [_numbers("rewards", row) for row in rewards.split(";")]
    lengths_B = np.asarray(_numbers("lengths", lengths))
    for row in rows:
        if len(row) != len(lengths_B):
            raise UserError(f"--rewards has {len(row)} answers and --lengths {len(lengths_B)}; give one number per answer in both.")
    if (lengths_B < 0).any() or (lengths_B != np.floor(lengths_B)).any():
        raise UserError(f"--lengths {lengths} counts tokens; give whole numbers from 0.")
    if budget is not None:
        try:
            budget = int(str(budget))
        except ValueError:
            raise UserError(f"--max_tokens {budget} counts tokens; give a whole number.") from None
        if budget < lengths_B.max():
            raise UserError(f"--max_tokens {budget} is below the longest answer, {int(lengths_B.max())} tokens; raise it.")
    return Asked(np.asarray(rows, dtype=np.float64), lengths_B.astype(np.int64), budget)


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--{name} {text!r} is not a list of numbers; write it as 1,1,0.") from None
    if not all(map(math.isfinite, values)):
        raise UserError(f"--{name} {text!r} has a number that is not finite; give finite ones.")
    return values


# -- for people ---------------------------------------------------------------------------------------------------


def _show(told: list[tuple[Explanation, list[str]]], asked: Asked) -> None:
    first = told[0][0]
    names = [e.variant for e, _ in told]
    answers = [[f"{i + 1}", _plain(weigh_rewards(asked.rewards_RB)[i]), f"{n}"] for i, n in enumerate(asked.lengths_B)]
    lead, kinds = ["answer", "reward", "tokens"], ("advantages", "push_per_token", "push_whole")
    titles = ("advantage", "push per token", "push on the whole answer")
    if len(told) == 1:
        rows = [[*row, *(f"{getattr(first, kind)[i]:+.4g}" for kind in kinds)] for i, row in enumerate(answers)]
        _table(f"What {first.variant} does to this group", [*lead, *titles], rows)
    else:
        for kind, title in zip(kinds, titles, strict=True):
            _table(title, [*lead, *names], [[*row, *(f"{getattr(e, kind)[i]:+.4g}" for e, _ in told)] for i, row in enumerate(answers)])
    rows = [[f"{p:g} may reach"] for p in PROBABILITIES]
    for e, _ in told:
        for i, row in enumerate(rows):
            row.append(f"{e.max_prob[i]:.4g}" if e.max_prob else "no cap")
    rows.append(["steps from 0.01 to 0.10", *("no cap" if e.max_prob is None else str(e.steps_1_to_10 or "never") for e, _ in told)])
    _table("Room for one token in one step", ["probability", *names], rows)
    flags = [[key, *(_plain(e.flags[key]) for e, _ in told)] for key in first.flags]
    differ = [row for row in flags if len(told) == 1 or len(set(row[1:])) > 1]
    _table("Resolved flags" if len(told) == 1 else "Resolved flags that differ", ["flag", *names], differ)
    seen = dict.fromkeys((note, name) for name, (_, notes) in zip(names, told, strict=True) for note in notes)
    for note in dict.fromkeys(note for note, _ in seen):
        whose = [name for n, name in seen if n == note]
        print(f"note{'' if len(whose) == len(names) else ' (' + ', '.join(whose) + ')'}: {note}")


def _plain(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A rich table on a terminal, aligned plain lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    wide = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(title)
    for first, *others in [header, *rows]:
        print("  ".join(["", first.ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(others, wide[1:], strict=True))]))
    print()
