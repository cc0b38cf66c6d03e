"""The command `winnow` (= `python -m cluster.launch`): one table of subcommands, each imported when it is asked for.

Exit codes: 0 done, 2 something that the user gave is wrong (one sentence on stderr, no traceback, no actor started),
else what the subcommand returns.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rollout.errors import UserError

if TYPE_CHECKING:
    from cluster.config import RunConfig


class Command(NamedTuple):
    """A subcommand: what follows its name, one line of help, and the function from its arguments to an exit code."""

    form: str
    help: str
    run: Callable[[list[str]], int]


def _train(argv: list[str]) -> int:
    cfg = _config("train", argv)
    if cfg is None:
        return 0
    from cluster.check import raise_first
    from cluster.resources import cluster_address

    if cluster_address(cfg):  # before anything that takes its time: whether the cluster answers, and can ever hold the run
        from cluster import placement

        placement.join(cfg)
        placement.refuse_impossible(cfg)
    raise_first(cfg)  # before the imports of a run, which take seconds
    from cluster.train import train

    return train(cfg)


def _eval(argv: list[str]) -> int:
    cfg = _config("eval", argv)
    if cfg is None:
        return 0
    from cluster.check import raise_first
    from cluster.offline import evaluate

    raise_first(cfg, learner=False)
    return evaluate(cfg)


def _check(argv: list[str]) -> int:
    cfg = _config("check", argv)
    if cfg is None:
        return 0
    from cluster.check import report

    return report(cfg)


def _export(argv: list[str]) -> int:
    from cluster import load

    parser = load.SentenceParser(prog="winnow export", description=COMMANDS["export"].help)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=int, help="step whose checkpoint is exported; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights; default: the run's export_dtype")
    parser.add_argument("--out", type=Path, help="folder to write; default: RUN/exports/step-N")
    args = parser.parse_args(argv)
    if not args.run.is_dir():
        raise UserError(f"there is no run folder {args.run}: give the path that the run printed as its last line")
    from cluster.offline import export

    return export(args.run, step=args.step, dtype=args.dtype, out=args.out)


def _explain(argv: list[str]) -> int:
    from cluster.explain import main as explain

    return explain(argv)


def _verify(argv: list[str]) -> int:
    from verifier.verify import main as verify

    return verify(argv)


def _ledger(argv: list[str]) -> int:
    from cluster.ledger import main as ledger

    return ledger(argv)


def _report(argv: list[str]) -> int:
    from cluster.report import main as report

    return report(argv)


def _submit(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv or "--print-config" in argv:
        _config("submit", argv)
        return 0
    from cluster.submit import submit

    return submit(argv)


def _jobs(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(
            f"usage: winnow jobs {COMMANDS['jobs'].form}\n\n{COMMANDS['jobs'].help}. JOB is a job's id, its run's name or its run folder."
        )
        return 0
    from cluster.submit import manage

    return manage(argv)


def _sweep(argv: list[str]) -> int:
    from cluster.sweep import main as sweep

    return sweep(argv)


COMMANDS = {
    "train": Command("RECIPE [flags]", "train a model by reinforcement learning", _train),
    "submit": Command("RECIPE [flags] [--address URL] [--detach]", "train as a job of a Ray cluster; the same line again goes on", _submit),
    "jobs": Command("[follow JOB | stop JOB] [--address URL]", "the jobs of a Ray cluster: list, follow the log, stop in order", _jobs),
    "eval": Command("RECIPE|RUN [flags]", "accuracy on held-out prompts, without training", _eval),
    "check": Command("RECIPE [flags]", "all that can be known before actors start: config, data, gold answers, resources", _check),
    "export": Command("RUN [--step N] [--dtype D] [--out PATH]", "a checkpoint of a run as a Hugging Face folder", _export),
    "explain": Command("...", "what an objective does to a group of answers, in numbers", _explain),
    "verify": Command("FILE|- [--verifier NAME] [--output FILE]", "score answers with a verifier", _verify),
    "ledger": Command("RUN", "where every prompt and every token of a run went", _ledger),
    "report": Command("RUN [RUN …] [--out FILE] [--png DIR] [--csv DIR]", "runs side by side on one HTML page", _report),
    "sweep": Command("SPEC [--sweep_dir DIR] [--address URL]", "a grid of runs as Ray jobs, compared; goes on where it was", _sweep),
}


def _config(command: str, argv: list[str]) -> RunConfig | None:
    """The config of `COMMAND RECIPE [flags]`; None when the arguments asked for a print and that is done."""
    from cluster import load

    known = COMMANDS[command]
    if "-h" in argv or "--help" in argv:
        about = f"{known.help}\n\nRECIPE is a TOML file or a built-in one: {', '.join(load.builtin_recipes())}."
        parser = load.flag_parser(f"winnow {command}", known.form, about)
        parser.add_argument("--print-config", action="store_true", help="print the resolved config as TOML and do nothing else")
        parser.print_help()
        return None
    asked = [a for a in argv if a in ("--print-config", "--print_config")]
    flags, recipes = load.parse_flags([a for a in argv if a not in asked])
    if len(recipes) != 1:
        got = f"got {len(recipes)}: {' '.join(recipes)}" if recipes else "got none"
        raise UserError(f"winnow {command} takes one recipe, {got}; write winnow {command} {known.form}, e.g. winnow {command} arithmetic")
    cfg = load.resolve(recipes[0], flags)
    if asked:
        print(load.to_toml(cfg), end="")
        return None
    return cfg


def usage() -> str:
    """The table of subcommands."""
    left = {name: f"{name} {c.form}" for name, c in COMMANDS.items()}
    wide = max(map(len, left.values()))
    rows = "\n".join(f"  {left[name]:<{wide}}  {c.help}" for name, c in COMMANDS.items())
    return (
        "winnow trains language models by reinforcement learning on verifiable rewards.\n\n"
        f"usage: winnow COMMAND ...\n\n{rows}\n\n"
        "winnow COMMAND --help shows the flags; --print-config shows the resolved config; --version the version."
    )


def version() -> str:
    """The installed version, or 'unknown' when winnow runs from a bare checkout."""
    from importlib import metadata

    try:
        return metadata.version("winnow")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"winnow {version()}")
        return 0
    try:
        if args[0] not in COMMANDS:
            from cluster.sentences import nearest

            guess = nearest(args[0], list(COMMANDS))
            raise UserError(f"there is no command {args[0]!r}{guess}: take one of {', '.join(COMMANDS)}")
        return COMMANDS[args[0]].run(args[1:])
    except UserError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG or error.filename is None:
            raise
        print(f"winnow: {str(error.filename)[:60]!r}… is longer than a file's name can be: shorten it", file=sys.stderr)
        return 2
    except SystemExit as done:  # argparse's --help
        return int(done.code or 0)


if __name__ == "__main__":
    sys.exit(main())
