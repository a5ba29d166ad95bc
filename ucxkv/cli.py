"""The command ``ucxkv``: ``demo``, ``info``, ``doctor`` and ``top``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ucxkv.demo.model import ModelConfig
    from ucxkv.demo.run import Outcome

_WIDTH = 80
_MAX_TOKENS_STEP = 256
_BLOCK_TOKENS = 16
_INTERRUPTED = 130

PROMPT = """\
When a language model reads a prompt, every layer of it computes a key and a value for every
token, and keeps them: the KV cache. Reading is work for the arithmetic units, since all tokens
go through the layers together; writing the answer is work for the memory, since each token goes
through them alone. One machine seldom suits both, so they are given to two, and the cache has
to travel from the one that has read to the one that will write. It is large, it grows with every
token, and while it is on its way nobody can say the first word of the answer. The faster it
arrives the better; but what arrives must be the right bytes, and what has been given up must not
be written a moment later into memory that already serves another request. This demo reads this
text in one process, lets a second one fetch the cache straight out of the first one's memory,
and begins to write with the first layer while the others are still on their way. Then a third
process does everything by itself, to see whether it comes to the same answer, and how much
longer it takes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "demo":
            return _demo(options)
        if options.command == "doctor":
            return _doctor(options)
        if options.command == "top":
            return _top(options)
        return _info(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; what Python would still flush has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=22, width=_WIDTH)


class _Parser(argparse.ArgumentParser):
    """Breaks its error messages as its help."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, _wrapped(f"{self.prog}: {message}") + "\n")


class _Version(argparse.Action):
    """--version, without importing anything for the other commands."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ucxkv import __version__
        from ucxkv._load import loaded

        print(f"ucxkv {__version__} with UCX {loaded().version_text} ({loaded().path})")
        parser.exit()


def _parser() -> _Parser:
    parser = _Parser(
        "ucxkv",
        description="Moves LLM KV caches between processes, over UCX.",
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    info = commands.add_parser(
        "info",
        help="tell which UCX is in use and what it can do here",
        description="Tells which UCX is in use, its transports, and whether one-sided reads work.",
        formatter_class=_formatter,
    )
    info.add_argument("--json", action="store_true", help="print JSON")
    _add_doctor(commands)
    _add_top(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="pull the KV cache of a real transformer from one process into another",
        description=(
            "Computes a prompt with a small transformer in one process, pulls its KV cache into"
            " another, which goes on to generate, and compares the tokens with those of a"
            " single process. The exit code is 0 only if they are equal."
        ),
        formatter_class=_formatter,
    )
    text = demo.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the prompt; each byte is one token")
    text.add_argument("--file", metavar="PATH", help="read the prompt from a file, - for stdin")
    demo.add_argument(
        "--tokens", type=_at_least(2), default=32, metavar="N",
        help="tokens to generate, the prefill process's one included (32)",
    )  # fmt: skip
    demo.add_argument(
        "--path", choices=("auto", "get", "stream"), default="auto",
        help="how the cache moves: one-sided reads, streamed by the owner, or as fits",
    )  # fmt: skip
    demo.add_argument(
        "--paged", action="store_true",
        help="caches in scattered blocks, held by prefill until decode gives notice",
    )  # fmt: skip
    demo.add_argument(
        "--block-size", type=_at_least(1), metavar="N",
        help=f"with --paged: tokens in a block ({_BLOCK_TOKENS})",
    )  # fmt: skip
    demo.add_argument("--json", action="store_true", help="print JSON")
    demo.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S",
        help="give up after so many seconds without progress (60)",
    )  # fmt: skip
    model = demo.add_argument_group("model")
    for name, default, meaning in (
        ("layers", 8, "decoder layers"),
        ("dim", 512, "width of the residual stream"),
        ("heads", 8, "query heads"),
        ("kv-heads", 4, "key and value heads, each shared by several query heads"),
        ("ffn", 1408, "inner width of the feed-forward layers"),
    ):
        model.add_argument(
            f"--{name}", type=_at_least(1), default=default, metavar="N",
            help=f"{meaning} ({default})",
        )  # fmt: skip
    model.add_argument(
        "--max-tokens", type=_at_least(1), metavar="N",
        help="tokens a sequence in the cache has room for (as many as needed)",
    )  # fmt: skip
    model.add_argument(
        "--seed", type=_at_least(0), default=0, metavar="N", help="seed of the weights (0)"
    )


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find what keeps pulls from working well here, or between two machines",
        description=(
            "Looks at UCX, devices, limits and settings, links to the doctor that listens at the"
            " peer, or to a second process on this host, and pulls from it. Tells of each finding"
            " why it matters and the command that mends it. The exit code is 1 if something has to"
            " be mended."
        ),
        formatter_class=_formatter,
    )
    end = doctor.add_mutually_exclusive_group()
    end.add_argument(
        "--peer", metavar="HOST:PORT", help="where the doctor of the other end listens"
    )
    end.add_argument(
        "--listen", metavar="HOST:PORT",
        help="be the other end, until interrupted; whoever can connect may look at it",
    )  # fmt: skip
    doctor.add_argument(
        "--seconds", type=_seconds, metavar="S", help="with --listen: end after so many seconds"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")


def _add_top(commands: argparse._SubParsersAction[_Parser]) -> None:
    top = commands.add_parser(
        "top",
        help="watch engines: links, throughput, latency, failures, holds",
        description=(
            "Shows the figures of running engines, again and again until interrupted: of one"
            " process of this user on this host, of the engine that listens at an address of this"
            " host, or of those whose metrics are served at http://HOST:PORT/metrics. Without a"
            " target: of all engines of this user on this host."
        ),
        formatter_class=_formatter,
    )
    top.add_argument("target", nargs="?", metavar="PID|HOST:PORT", help="whose figures")
    top.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S",
        help="seconds between two looks (1)",
    )  # fmt: skip
    top.add_argument("--once", action="store_true", help="print after one interval, and end")
    top.add_argument("--json", action="store_true", help="print one look as JSON, and end")


def _at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return integer


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return number


def _info(options: argparse.Namespace) -> int:
    from ucxkv import info

    return info.main(json=options.json)


def _doctor(options: argparse.Namespace) -> int:
    from ucxkv.doctor import run

    return run.main(options.peer, options.listen, options.seconds, options.json)


def _top(options: argparse.Namespace) -> int:
    from ucxkv import top

    return top.main(options.target, interval=options.interval, once=options.once, json=options.json)


def _demo(options: argparse.Namespace) -> int:
    from ucxkv.demo.run import DemoError, run
    from ucxkv.demo.show import progress

    forced = os.environ.get("UCXKV_PATH")
    if forced and options.path not in ("auto", forced):
        return _fail(f"--path {options.path} contradicts the environment's UCXKV_PATH={forced}", 2)
    if options.block_size and not options.paged:
        return _fail("--block-size needs --paged", 2)
    try:
        prompt = _prompt(options)
        config = _config(options, len(prompt))
    except OSError as error:
        return _fail(f"{options.file}: {error.strerror}", 2)
    except ValueError as error:
        return _fail(str(error), 2)
    try:
        with contextlib.closing(progress()) as shown:
            outcome = run(
                config,
                prompt,
                tokens=options.tokens,
                path=options.path,
                block_tokens=(options.block_size or _BLOCK_TOKENS) if options.paged else None,
                timeout=options.timeout,
                watcher=shown.update,
            )
    except DemoError as error:
        if error.details:
            print(error.details, file=sys.stderr)
        return _fail(str(error), 1)
    return _finish(outcome, as_json=options.json)


def _finish(outcome: Outcome, *, as_json: bool) -> int:
    from ucxkv.demo import show

    print(json.dumps(outcome.as_dict(), indent=2) if as_json else "\n".join(show.lines(outcome)))
    if outcome.exit_code:
        what = "tokens" if not outcome.tokens_equal else "bytes"
        return _fail(f"the {what} differ", outcome.exit_code)
    return 0


def _prompt(options: argparse.Namespace) -> bytes:
    if options.file is not None:
        prompt = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
        if not prompt:
            raise ValueError(f"{options.file}: there is nothing in it")
        return prompt
    prompt = os.fsencode(PROMPT if options.prompt is None else options.prompt)
    if not prompt:
        raise ValueError("the prompt is empty")
    return prompt


def _config(options: argparse.Namespace, prompt_tokens: int) -> ModelConfig:
    from ucxkv.demo.model import ModelConfig

    # The last token is only generated, never read.
    needed = prompt_tokens + options.tokens - 1
    max_tokens = options.max_tokens or -(-needed // _MAX_TOKENS_STEP) * _MAX_TOKENS_STEP
    if needed > max_tokens:
        raise ValueError(
            f"{prompt_tokens} tokens of prompt and {options.tokens} generated ones need room for"
            f" {needed}, but --max-tokens is {max_tokens}"
        )
    return ModelConfig(
        layers=options.layers,
        dim=options.dim,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        max_tokens=max_tokens,
        seed=options.seed,
    )


def _fail(message: str, code: int) -> int:
    print(_wrapped(f"ucxkv: {message}"), file=sys.stderr)
    return code


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)
