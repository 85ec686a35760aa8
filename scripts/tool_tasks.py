"""20 tasks for a model that calls tools: files, arithmetic and two MCP servers; the outcome of each is checked.

    python scripts/tool_tasks.py [MODEL] [--server URL] [--tasks N,N,...]

MODEL runs on this machine (default qwen2.5-coder:1.5b); with --server a server's model answers, llama-server's say, and
the tools still run here. Every permission is given, in a folder of each task's own. Prints a line for each task: what
was checked, calls, seconds; then the rate.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import Backend, DoesNotFit, Failed, Finished, Piece, Request, ToolCall
from tinychat.backend.remote import RemoteBackend
from tinychat.chat.calling import Written, result_of, stuck
from tinychat.chat.conversation import Conversation, Turn
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import Sampling
from tinychat.models import cache
from tinychat.models.registry import resolve
from tinychat.tools.builtin import tools_of
from tinychat.tools.folder import Folder
from tinychat.tools.mcp import McpServers
from tinychat.tools.mcp_config import ServerConfig
from tinychat.tools.protocol import CallContext
from tinychat.tools.toolbox import Toolbox

ROUNDS = 8
FILES = {
    "fruit.txt": "pears 12\nplums 7\n",
    "notes/plan.md": "# Plan\n\nThe launch is on Thursday.\n",
    "notes/team.md": "Ada leads. Grace tests.\n",
    "src/main.py": "def area(w, h):\n    return w + h\n",
    "src/config.ini": "port = 8123\nhost = example\n",
    "numbers.txt": "417\n23\n",
}
STOCK = {"bolt": (640, 0.25), "nut": (512, 0.1), "gear": (37, 18.5)}  # pieces, price


class Outcome(NamedTuple):
    """What a task has led to."""

    answer: str
    folder: Path
    used: frozenset[str]  # tools whose call succeeded


Check = Callable[[Outcome], bool]


class Task(NamedTuple):
    prompt: str
    check: Check


def numbers(text: str) -> set[float]:
    """The numbers in `text`, with or without commas between thousands."""
    return {float(n) for n in re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))}


def number(value: float, *others: float) -> Check:
    """The answer gives `value`, and beside it at most `others`, which the task or its result names: no other guess."""
    return lambda o: value in (found := numbers(o.answer)) and found <= {value, *others}


def names(*wanted: str, never: str = "") -> Check:
    """The answer has the words `wanted` and none of `never`."""

    def check(o: Outcome) -> bool:
        words = set(re.findall(r"[\w/.-]*\w", o.answer.lower()))
        words |= {word.rpartition("/")[2] for word in words}
        return words >= set(wanted) and not words & set(never.split())

    return check


def holds(file: str, text: str) -> Check:
    """The file has exactly this text, but for white space at its ends."""
    return lambda o: (o.folder / file).is_file() and (o.folder / file).read_text().strip() == text.strip()


def through(tool: str, check: Check) -> Check:
    """As `check`, and `tool` was called with success."""
    return lambda o: tool in o.used and check(o)


def multiplies(o: Outcome) -> bool:
    """src/main.py is Python whose area() multiplies."""
    space: dict[str, Callable[[int, int], int]] = {}
    try:
        exec((o.folder / "src/main.py").read_text(), space)
        return space["area"](3, 5) == 15
    except Exception:
        return False


def price(o: Outcome) -> bool:
    """price.txt gives one number, 18.5."""
    file = o.folder / "price.txt"
    return file.is_file() and numbers(file.read_text()) == {18.5}


PORT = FILES["src/config.ini"].replace("8123", "9000")
TASKS = (
    Task("Read fruit.txt. How many plums are there?", number(7)),
    Task(
        "Which files are in the directory notes?",
        names("plan.md", "team.md", never="fruit.txt main.py config.ini numbers.txt"),
    ),
    Task("On which day is the launch? It is in notes/plan.md.", names("thursday")),
    Task(
        "Find the file that contains the word Grace and name it.", names("team.md", never="plan.md fruit.txt main.py")
    ),
    Task("Which port is set in src/config.ini?", number(8123)),
    Task("List all Python files in the folder.", names("main.py", never="fruit.txt numbers.txt config.ini plan.md")),
    Task("Write a file hello.txt with the text: good morning", holds("hello.txt", "good morning")),
    Task("In src/config.ini change the port from 8123 to 9000.", holds("src/config.ini", PORT)),
    Task("area() in src/main.py is wrong: it adds w and h. Make it multiply them.", multiplies),
    Task("Run the command `wc -c fruit.txt` and tell me the number.", through("run_command", number(17))),
    Task("Use the tool: what is 4817 plus 9386?", through("arithmetic_add", number(14203, 4817, 9386))),
    Task("Use the tool: what is 127 times 389?", through("arithmetic_multiply", number(49403, 127, 389))),
    Task("Use the tool: what is 100000 minus 8642?", through("arithmetic_subtract", number(91358, 100000, 8642))),
    Task(
        "Read numbers.txt and add the two numbers in it with the tool.", through("arithmetic_add", number(440, 417, 23))
    ),
    Task(
        "Use the tools: multiply 12 by 34, then add 1000 to the result.",
        through("arithmetic_multiply", through("arithmetic_add", number(1408, 12, 34, 408, 1000))),
    ),
    Task("How many pieces of bolt are in stock?", number(*STOCK["bolt"])),
    Task("What does a gear cost?", number(18.5, 37)),
    Task("Take 12 pieces of nut out of the stock. How many are left?", through("stock_take", number(500, 12))),
    Task("Which parts are in stock?", names("bolt", "nut", "gear", never="screw washer")),
    Task("Write the price of a gear into the file price.txt.", price),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="qwen2.5-coder:1.5b")
    parser.add_argument("--server", metavar="URL")
    parser.add_argument("--tasks", metavar="N,N", help="only these, from 1")
    parser.add_argument("--serve", choices=("arithmetic", "stock"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    chosen = [int(n) for n in options.tasks.split(",")] if options.tasks else range(1, len(TASKS) + 1)
    backend: Backend
    if options.server:
        backend = RemoteBackend.open(options.server)
    else:
        backend = LocalBackend.open(cache.pull(resolve(options.model)), max_context=8192)
    passed, began = 0, time.perf_counter()
    with closing(backend):
        for number in chosen:
            started = time.perf_counter()
            good, calls, said = attempt(backend, TASKS[number - 1])
            passed += good
            seconds = time.perf_counter() - started
            print(f"{number:2} {'yes' if good else 'NO '} {seconds:5.1f} s  {TASKS[number - 1].prompt}", flush=True)
            print(f"       {', '.join(calls) or 'no calls'}; {' '.join(said.split())[:120]}", flush=True)
    print(f"{passed} of {len(chosen)} tasks in {time.perf_counter() - began:.0f} s, {backend.info.name}")
    return 0


def attempt(backend: Backend, task: Task) -> tuple[bool, list[str], str]:
    """(was the outcome right, the calls, the last answer)."""
    configs = [
        ServerConfig(name, sys.executable, (str(Path(__file__).resolve()), "--serve", name))
        for name in ("arithmetic", "stock")
    ]
    with tempfile.TemporaryDirectory() as name, closing(McpServers(configs)) as servers:
        folder = Path(name)
        for file, text in FILES.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        servers.start()
        servers.wait()
        toolbox = Toolbox(tools_of(Folder(folder)), lambda: servers.tools)
        request = Request(
            messages=({"role": "user", "content": task.prompt},),
            sampling=Sampling(temperature=0.0),
            max_tokens=512,
            tools=toolbox.definitions,
        )
        talk, used, made, text = Conversation(), set[str](), list[str](), ""
        for _ in range(ROUNDS):
            text, written = "", Written()
            for event in backend.answer(request):
                match event:
                    case Piece(kind="answer"):
                        text += event.text
                    case ToolCall():
                        written.take(event)
                    case Failed():
                        raise TinychatError(event.message)
                    case DoesNotFit():
                        raise TinychatError("the context is full")
                    case Finished():
                        reason = event.reason
            calls = written.made(reason) if reason in ("eos", "tool_calls") else ()
            talk = talk.add(Turn("assistant", text, calls=calls))
            if not calls:
                break
            for call in calls:
                context = CallContext(lambda question: None, threading.Event())
                result = result_of(call, talk.repeats(call), toolbox, context)
                made.append(f"{call.name} {result.state}")
                used |= {call.name} if result.state == "done" else set()
                talk = talk.add(Turn("tool", result.text, call_id=call.id, stop_reason=result.state))
            messages = (request.messages[0], *talk.messages())
            choice = "none" if stuck(talk) else "auto"
            request = replace(request, messages=messages, tool_choice=choice, cancel=threading.Event())
        return task.check(Outcome(text, folder, frozenset(used))), made, text


def serve(name: str) -> int:
    """One of the two MCP servers, on stdin and stdout."""
    from mcp.server import MCPServer

    server, stock = MCPServer(name), dict(STOCK)
    if name == "arithmetic":

        @server.tool()
        def add(a: float, b: float) -> float:
            """Adds two numbers."""
            return a + b

        @server.tool()
        def subtract(a: float, b: float) -> float:
            """a minus b."""
            return a - b

        @server.tool()
        def multiply(a: float, b: float) -> float:
            """Multiplies two numbers."""
            return a * b
    else:

        @server.tool()
        def parts() -> list[str]:
            """The names of the parts in stock."""
            return list(stock)

        @server.tool()
        def look_up(part: str) -> dict[str, float]:
            """How many pieces of a part are in stock, and its price."""
            return {"pieces": stock[part][0], "price": stock[part][1]}

        @server.tool()
        def take(part: str, pieces: int) -> int:
            """Takes pieces of a part out of the stock; gives how many are left."""
            stock[part] = (stock[part][0] - pieces, stock[part][1])
            return stock[part][0]

    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
