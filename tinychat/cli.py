"""The command line: arguments and exit codes. What the commands do is in `commands`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinychat import __version__, process
from tinychat.errors import TinychatError, printable, shortage

DEVICES = ("cuda", "cpu", "reference")  # as in engine.devices, which is slow to import
MODEL_HELP = "a name (`tinychat cache list --all` shows them), a path to a .gguf file, or a URL"
_DESCRIPTION = """Chat with a local language model.

  tinychat [MODEL]           opens the chat; without MODEL, with the model of last time
  tinychat -c                opens the last conversation
  tinychat COMMAND ...       see below, and `tinychat COMMAND --help`"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. 0: done; 1: failed, with one line on stderr; 2: wrong usage; 130:
    Ctrl-C; 143: SIGTERM; 129: the terminal has gone; 141: the reader of stdout has gone."""
    process.prepare()
    debug = False
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        debug, command = args.pop("debug"), args.pop("command")
        _check_home()
        code = command(**args) or 0
        sys.stdout.flush()
    except TinychatError as e:
        if debug:
            raise
        print(f"tinychat: {printable(str(e), newlines=False)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 141
    except OSError as e:  # of stdout, on a full disk for example; commands turn their own into TinychatError
        if debug:
            raise
        where = f"{e.filename}: " if e.filename else ""
        what = shortage(e) or where + (e.strerror or str(e)).lower()
        print(f"tinychat: {printable(what, newlines=False)}", file=sys.stderr)
        return 1
    except Exception as e:
        if debug:
            raise
        what = printable(f"{type(e).__name__}: {e}", newlines=False)
        unexpected = f"{what} (not expected; `--debug` shows where, please report it)"
        print(f"tinychat: {shortage(e) or unexpected}", file=sys.stderr)
        return 1
    return code


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Arguments as a dict: `command` (what to call), `debug`, and the keyword arguments for `command`."""
    parser = argparse.ArgumentParser(
        "tinychat",
        "tinychat [MODEL] | COMMAND ...",
        _DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tinychat {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    group = parser.add_subparsers(prog="tinychat", title="commands", metavar="COMMAND", required=True)
    where = argparse.ArgumentParser(add_help=False)  # options of every command that runs a model
    where.add_argument(
        "--device",
        type=_device,
        metavar="DEVICE",
        help="where to run it: cuda (cuda:1 is GPU 1), cpu or reference (default: the fastest that works here)",
    )
    where.add_argument(
        "--threads", type=_count, metavar="N", help="CPU threads (default: the settings', or one for each core)"
    )

    remote = argparse.ArgumentParser(add_help=False)  # options of the commands that can also use a server
    remote.add_argument("--server", metavar="URL", help="a server's address, or its name in the settings")
    remote.add_argument("--model", dest="server_model", metavar="NAME", help="the server's model, where it has several")
    remote.add_argument(
        "--key-file", metavar="FILE", help="a file with the server's key (default: the variable TINYCHAT_API_KEY)"
    )

    tools = argparse.ArgumentParser(add_help=False)  # options of the commands whose model may call tools
    tools.add_argument("--tools", metavar="DIR", help="let the model work in a folder; it asks first")
    tools.add_argument(
        "--mcp", dest="mcp_file", metavar="FILE", help="MCP servers, as other programs name them (mcpServers)"
    )

    chat = _add(group, "chat", "chat", None, where, remote, tools)
    _speculate(chat)
    chat.add_argument("text", metavar="MODEL", nargs="?", help=MODEL_HELP)
    chat.add_argument("-c", "--continue", dest="resume", action="store_true", help="open the last conversation")
    chat.add_argument(
        "--plain", action="store_true", help="lines of text only: for dumb terminals, screen readers and pipes"
    )
    chat.prog, chat.usage = (
        "tinychat",
        "tinychat [-c] [MODEL] [--device DEVICE] [--threads N] | --server URL [--model NAME]",
    )

    run = p = _add(group, "run", "run", "one answer to one prompt", where, remote, tools)
    run.usage = "tinychat run MODEL PROMPT | --server URL [--model NAME] PROMPT, and options"
    _model(p, nargs="?")
    p.add_argument("prompt", metavar="PROMPT", nargs="?", help="the question; - reads it from stdin")
    p.add_argument("--file", dest="files", action="append", default=[], metavar="FILE", help="attach a text file")
    p.add_argument("--system", metavar="TEXT", help="the system prompt")
    p.add_argument("--conversation", metavar="NAME", help="continue a conversation of the history, or begin it")
    p.add_argument("--context", type=_parameter("context"), metavar="N", help="context length in tokens")
    p.add_argument("--max-tokens", type=_parameter("max_tokens"), metavar="N", help="stop after N tokens")
    p.add_argument(
        "--temperature", type=_parameter("temperature"), metavar="T", help="0 always takes the likeliest token"
    )
    p.add_argument("--top-p", type=_parameter("top_p"), metavar="P", help="only tokens that together reach P")
    p.add_argument("--seed", type=_parameter("seed"), metavar="S", help="same seed, same answer")
    p.add_argument("--schema", metavar="FILE", help="hold the answer to the JSON schema in FILE")
    p.add_argument("--raw", action="store_true", help="send PROMPT as it is, without the chat template")
    p.add_argument(
        "--no-think", dest="think", action="store_const", const=False, help="ask the model not to think first"
    )
    _speculate(p)
    _json(p)

    bench = p = _add(group, "bench", "bench", "measure the speed of a model, a layer or a kernel", where, remote)
    _model(p, nargs="?")
    p.add_argument("-n", dest="n_gen", type=_count, default=20, metavar="N", help="tokens to generate (default 20)")
    p.add_argument(
        "-p", dest="n_prompt", type=_count, default=128, metavar="N", help="tokens of the prompt (default 128)"
    )
    what = p.add_mutually_exclusive_group()
    what.add_argument("--kernel", metavar="OP[:QUANT[:ROWSxK]]", help="one kernel, as gate_up:Q4_K:6144x2048")
    what.add_argument("--block", action="store_true", help="one layer of each kind that MODEL has")
    what.add_argument("--history", action="store_true", help="what was measured before, of MODEL or of all")
    _speculate(p, "off")
    p.add_argument(
        "--accept",
        type=_share,
        metavar="SHARE",
        help="what drafts would bring if this share of them were right (0 to 1): they are made from the known answer, "
        "one in each step or as many as --speculate N says",
    )
    _no_wait(p)
    _json(p)

    p = _add(group, "profile", "profile", "show what the time of a token is spent on", where)
    _model(p)
    p.add_argument("-n", dest="steps", type=_count, default=10, metavar="N", help="tokens to measure (default 10)")
    p.add_argument("--source", action="store_true", help="also the source of the slowest kernels")
    _no_wait(p)
    _json(p)

    p = _add(group, "kernels", "kernels", "show the kernels that a model runs on a device", where)
    _model(p)
    p.add_argument("--source", metavar="NAME", help="the source of one of them")
    _json(p)

    p = _add(group, "smoke", "smoke", "ask models questions and compare the answers' tokens", where)
    p.add_argument("names", metavar="MODEL", nargs="*", help="default: every model of the cache")
    _no_wait(p)
    _json(p)

    p = _add(group, "limit", "limit", "measure how fast this machine reads its memory")
    p.add_argument(
        "--device", choices=("cuda", "cpu"), help="whose memory (default: the GPU's where there is one that works)"
    )
    _json(p)

    p = _add(group, "serve", "serve", "answer programs over HTTP as OpenAI, Anthropic and Ollama do", where)
    _model(p)
    p.add_argument("--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1: this machine)")
    p.add_argument("--port", type=_port, default=8080, metavar="N", help="default 8080; 0 takes a free one")
    key = p.add_mutually_exclusive_group()
    key.add_argument("--api-key", dest="key_file", metavar="FILE", help="a file with the key that clients must send")
    key.add_argument("--no-key", action="store_true", help="serve every client without a key")
    p.add_argument("--context", type=_count, metavar="N", help="tokens that prompt and answer share")
    _speculate(p)
    p.add_argument(
        "--queue", dest="queue_size", type=_count, default=16, metavar="N", help="requests that may wait (default 16)"
    )
    p.add_argument(
        "--allow-host",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name that clients may use",
    )
    p.add_argument(
        "--allow-origin",
        dest="origins",
        action="append",
        default=[],
        metavar="URL",
        help="a web page that may use it, as https://chat.example.com",
    )

    p = _add(group, "perplexity", "perplexity", "measure the perplexity of a text", where)
    _model(p)
    p.add_argument("file", metavar="FILE", help="a text file")
    p.add_argument(
        "--ctx", dest="context", type=_count, default=512, metavar="N", help="tokens per window (default 512)"
    )
    p.add_argument("--chunks", type=_count, metavar="N", help="only the first N windows")
    _json(p)

    p = _add(group, "tokenize", "tokenize", "show the tokens of a text")
    _model(p)
    p.add_argument("prompt", metavar="TEXT", nargs="?", default="-", help="the text; - or nothing reads stdin")
    _json(p)

    p = _add(group, "info", "info", "show what a model is, downloaded or not")
    _model(p)
    only = p.add_mutually_exclusive_group()
    only.add_argument("--grep", metavar="WORD", help="metadata whose key contains WORD")
    only.add_argument("--template", action="store_true", help="the chat template")
    only.add_argument("--tensors", action="store_true", help="every tensor with its type, shape and size")
    _json(p)

    p = _add(group, "import", "import_chats", "take over conversations of ChatGPT or of llama.cpp's web page")
    p.add_argument("file", metavar="FILE", help="ChatGPT's export (zip or conversations.json), or the page's export")

    cache = group.add_parser("cache", help="see and change which models are on this machine", allow_abbrev=False)
    files = cache.add_subparsers(title="commands", metavar="COMMAND", required=True)
    p = _add(files, "path", "cache.path", "where model files are, or one is")
    _model(p, nargs="?")
    p = _add(files, "list", "cache.list_files", "the files of the cache")
    p.add_argument("--all", dest="everything", action="store_true", help="also what could be downloaded")
    _model(_add(files, "pull", "cache.pull", "download a model, or resume a download"))
    p = _add(files, "add", "cache.add", "add a file that is on this machine already")
    p.add_argument("file", metavar="FILE")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", dest="text", metavar="NAME", help="the model that FILE is")
    what.add_argument("--url", dest="text", metavar="URL", help="where FILE would be downloaded from")
    how = p.add_mutually_exclusive_group()
    how.add_argument(
        "--copy",
        dest="mode",
        action="store_const",
        const="copy",
        default="link",
        help="copy FILE (default: share its disk blocks)",
    )
    how.add_argument("--move", dest="mode", action="store_const", const="move", help="move FILE")
    _model(_add(files, "verify", "cache.verify", "read files and compare their SHA-256"), nargs="?")
    _model(_add(files, "rm", "cache.rm", "delete a model"))
    _add(files, "prune", "cache.prune", "delete the remains of unfinished downloads")
    p = _add(files, "clear", "cache.clear", "delete saved KV caches or profiles")
    p.add_argument("what", choices=("kv", "profiles"))

    argv = list(argv)
    first = next((i for i, a in enumerate(argv) if a != "--debug"), len(argv))
    if first == len(argv) or (argv[first] not in group.choices and argv[first] not in ("-h", "--help", "--version")):
        argv.insert(first, "chat")
    found, extra = parser.parse_known_args(argv)
    args = vars(found)
    if argv[first] == "run":  # argparse takes no positional argument behind an option that follows another one
        for name in ("text", "prompt"):
            if args[name] is None and extra and not extra[0].startswith("-"):
                args[name] = extra.pop(0)
    if extra and argv[first] == "chat" and (text := args["text"]) and not text.startswith("-"):
        near = difflib.get_close_matches(text, group.choices, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        if meant or not extra[0].startswith("-"):
            chat.error(f"{printable(text)!r} is no command{meant} (unexpected: {printable(' '.join(extra))})")
    if extra:
        group.choices[argv[first]].error(f"unexpected: {printable(' '.join(extra))}")
    if argv[first] in ("chat", "run", "bench") and not args["server"]:
        for name, flag in (("server_model", "--model"), ("key_file", "--key-file")):
            if args[name] is not None:
                group.choices[argv[first]].error(f"argument {flag}: needs --server")
    if argv[first] == "run" and args["server"]:  # the first positional argument is the prompt
        if args["prompt"] is not None:
            run.error("MODEL: not allowed with --server, whose model --model names")
        args["text"], args["prompt"] = None, args["text"]
    if argv[first] == "run" and (args["prompt"] is None or not (args["server"] or args["text"])):
        run.error("the following arguments are required: " + ("PROMPT" if args["server"] else "MODEL and PROMPT"))
    if argv[first] == "chat" and args["server"] and args["text"] is not None:
        chat.error("MODEL: not allowed with --server, whose model --model names")
    other = argv[first] == "bench" and (args["server"] or args["kernel"] or args["block"] or args["history"])
    if other and args["accept"] is not None:
        bench.error("argument --accept: not allowed with --server, --kernel, --block or --history")
    if argv[first] == "bench" and args["server"]:
        if args["text"] is not None or args["kernel"] is not None or args["block"] or args["history"]:
            bench.error("argument --server: not allowed with MODEL, --kernel, --block or --history")
    elif argv[first] == "bench":
        if args["text"] is None and args["kernel"] is None and not args["history"]:
            bench.error("MODEL is required" + (" with --block" if args["block"] else ", or --kernel or --history"))
        if args["text"] is not None and args["kernel"] is not None:
            bench.error("argument --kernel: not allowed with MODEL")
    return args


def _add(
    group: Any, name: str, command: str, help: str | None = None, *parents: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Adds a command. `command` is MODULE[.FUNCTION] in tinychat.commands; the function is called like the module."""
    options: dict[str, Any] = {"help": help, "description": help} if help else {}
    p: argparse.ArgumentParser = group.add_parser(name, allow_abbrev=False, parents=parents, **options)
    p.set_defaults(command=_lazy(command))
    p.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return p


def _model(p: argparse.ArgumentParser, **options: Any) -> None:
    p.add_argument("text", metavar="MODEL", help=MODEL_HELP, **options)


def _json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", dest="as_json", action="store_true", help="one JSON object on stdout and nothing else")


def _speculate(p: argparse.ArgumentParser, default: str = "auto") -> None:
    p.add_argument(
        "--speculate",
        type=_drafts,
        default=default,
        metavar="auto|off|N",
        help="guess tokens from the text and verify several in a step, which changes no answer: as many as pay, none, "
        f"or N (default {default})",
    )


def _no_wait(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--no-wait", dest="wait", action="store_false", help="fail, instead of waiting, while another benchmark runs"
    )


def _lazy(command: str) -> Callable[..., object]:
    """A command's function, imported only when it is called, so that `--help` does not import the engine."""
    module, _, function = command.partition(".")

    def call(**arguments: Any) -> object:
        with process.starting():
            if command == "run":
                importlib.import_module("tinychat.commands.gpu").begin(**arguments)
            found = importlib.import_module(f"tinychat.commands.{module}")
        return getattr(found, function or module)(**arguments)

    return call


def _check_home() -> None:
    """Raises TinychatError where the user has no home folder, as in a container whose user ID is in no passwd file."""
    try:
        Path.home()
    except RuntimeError:
        raise TinychatError(
            "this user has no home folder; set HOME to a folder where tinychat may keep files"
        ) from None


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**7:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 9,999,999, not {text!r}")
    return int(text)


def _device(text: str) -> str:
    if text not in DEVICES and not re.fullmatch("cuda:[0-9]{1,3}", text):
        raise argparse.ArgumentTypeError(f"expected {', '.join(DEVICES)} or cuda:N, not {text!r}")
    return text


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, not {text!r}")


def _drafts(text: str) -> int | str:
    """As engine.speculation.Speculate."""
    if text not in ("auto", "off") and not (text.isdecimal() and 0 < int(text) < 16):
        raise argparse.ArgumentTypeError(f"expected auto, off or a number from 1 to 15, not {text!r}")
    return 0 if text == "off" else text if text == "auto" else int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535, not {text!r}")
    return int(text)


def _parameter(name: str) -> Callable[[str], Any]:
    """The converter of an option, which checks it by the same table as `/set` in the chat."""

    def convert(text: str) -> Any:
        from tinychat.chat.parameters import Parameters, get_parameter, set_parameter

        try:
            return get_parameter(set_parameter(Parameters(), name, text), name)
        except TinychatError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return convert
