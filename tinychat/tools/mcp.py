"""MCP servers: started or reached on a thread of their own, their tools, prompts and resources as values.

What a server says (descriptions, results, prompts) is text of a stranger and stays text. The package `mcp` is an extra
(`tinychat[mcp]`), imported on that thread when the first server is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from tinychat.errors import TinychatError, printable
from tinychat.tools import mcp_lines
from tinychat.tools.mcp_config import ServerConfig
from tinychat.tools.protocol import CallContext, CallStopped, Question, Tool

START_S = 30.0  # seconds that a server may take to start and to say what it has
CALL_S = 60.0  # seconds that a call, a prompt or a resource may take
CLOSE_S = 8.0  # seconds that all servers may take to end; then they are left to themselves
STARTS = 3  # in a minute, of one server that keeps crashing
MOST = 256  # tools, prompts or resources of one server that are taken
LONGEST = 2000  # characters of a description
_LOOK = 0.05  # seconds between two looks at `cancel`
_GATHER = 0.1  # seconds in which changes of what a server has count as one

T = TypeVar("T")
Stage = Literal["off", "starting", "ready", "failed"]


@dataclass(frozen=True)
class ServerPrompt:
    """A prompt of a server: /server:name in the chat."""

    server: str
    name: str
    description: str
    arguments: tuple[str, ...]
    required: tuple[str, ...]


@dataclass(frozen=True)
class Resource:
    """A text of a server: @server:uri in the chat."""

    server: str
    uri: str
    name: str


@dataclass(frozen=True)
class McpStatus:
    """How a server is; `why` says why it failed."""

    config: ServerConfig
    stage: Stage = "off"
    why: str = ""
    tools: tuple[Tool, ...] = ()
    prompts: tuple[ServerPrompt, ...] = ()
    resources: tuple[Resource, ...] = ()


class McpServers:
    """All servers. Any thread may call; `start` returns at once, what asks a server waits for it."""

    def __init__(self, configs: Sequence[ServerConfig]) -> None:
        self._lock = threading.Lock()
        self._status = {config.name: McpStatus(config) for config in configs}
        self._clients: dict[str, Any] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._settled: dict[str, threading.Event] = {}  # set when a start has ended, well or not
        self._starts: dict[str, list[float]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def status(self) -> tuple[McpStatus, ...]:
        """Of each server, in the order of the file."""
        with self._lock:
            return tuple(self._status.values())

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Those of all servers that are ready, called SERVER_TOOL."""
        return tuple(tool for status in self.status for tool in status.tools)

    def start(self) -> None:
        """Starts every server that is on."""
        for status in self.status:
            if status.config.on:
                self.switch(status.config.name, True)

    def switch(self, name: str, on: bool) -> None:
        """Starts or ends one server."""
        self._set(name, config=replace(self._status[name].config, on=on))
        if on:
            self._begin(name)
        else:
            self._end(name)
            self._set(name, stage="off", why="", tools=(), prompts=(), resources=())

    def wait(self) -> None:
        """Until every server that was started is ready, or has failed and ended."""
        until = time.monotonic() + START_S + CLOSE_S
        for settled in list(self._settled.values()):
            settled.wait(max(0.0, until - time.monotonic()))

    def prompt(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> str:
        """The text of a prompt. Raises TinychatError."""
        if missing := [name for name in prompt.required if name not in arguments]:
            raise TinychatError(f"/{prompt.server}:{prompt.name} needs {', '.join(missing)}")
        got = self._ask(prompt.server, lambda client: client.get_prompt(prompt.name, dict(arguments)))
        return "\n\n".join(_text(message.content) for message in got.messages)

    def read(self, resource: Resource) -> str:
        """The text of a resource. Raises TinychatError."""
        got = self._ask(resource.server, lambda client: client.read_resource(resource.uri))
        texts = [content.text for content in got.contents if hasattr(content, "text")]
        if not texts:
            raise TinychatError(f"{printable(resource.uri, newlines=False)} has no text; only text can be attached")
        return "\n\n".join(texts)

    def close(self) -> None:
        """Ends all servers; returns when they have ended, or after CLOSE_S seconds."""
        loop, self._loop = self._loop, None
        if loop is None:
            return

        async def end() -> None:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(NotYet):
            asyncio.run_coroutine_threadsafe(end(), loop).result(CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)

    # any thread

    def _set(self, name: str, **changes: Any) -> None:
        with self._lock:
            self._status[name] = replace(self._status[name], **changes)

    def _begin(self, name: str) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        self._end(name)
        self._set(name, stage="starting", why="")
        settled = self._settled[name] = threading.Event()
        before = self._tasks.get(name)

        loop = self._loop

        def begin() -> None:
            self._tasks[name] = loop.create_task(self._live(name, settled, before))

        loop.call_soon_threadsafe(begin)

    def _end(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def _ask(self, name: str, ask: Callable[[Any], Coroutine[Any, Any, T]], cancel: threading.Event | None = None) -> T:
        """What a server answers. One that has ended is started again first. Raises TinychatError; CallStopped when
        `cancel` is set."""
        if self._status[name].stage != "ready":
            self._again(name)
        client, loop = self._clients.get(name), self._loop
        if client is None or loop is None:
            raise TinychatError(f"the server {name} is not there: {self._status[name].why or 'it is off'}")
        future: Future[T] = asyncio.run_coroutine_threadsafe(asyncio.wait_for(ask(client), CALL_S), loop)
        while True:
            try:
                return future.result(_LOOK)
            except NotYet:
                if future.done():
                    raise TinychatError(f"the server {name} did not answer within {CALL_S:.0f} s") from None
                if cancel is not None and cancel.is_set():
                    future.cancel()
                    raise CallStopped("stopped") from None
            except Exception as e:
                if self._broken(e):
                    self._again(name)
                    state = "has been started again" if self._status[name].stage == "ready" else "cannot be started"
                    raise TinychatError(f"the server {name} ended during the call; it {state}") from None
                raise TinychatError(f"the server {name} says: {printable(str(e), newlines=False)[:LONGEST]}") from None

    def _again(self, name: str) -> None:
        """Starts a server again that has ended, unless it does so all the time."""
        if not self._status[name].config.on:
            return
        now = time.monotonic()
        recent = self._starts[name] = [t for t in self._starts.get(name, []) if now - t < 60]
        if len(recent) >= STARTS:
            self._set(name, stage="failed", why=f"it ended {STARTS} times within a minute")
            return
        recent.append(now)
        self._begin(name)
        self._settled[name].wait(START_S + CLOSE_S)

    @staticmethod
    def _broken(e: Exception) -> bool:
        """Whether the connection is gone, not only the call."""
        return type(e).__name__ in ("ClosedResourceError", "BrokenResourceError", "EndOfStream") or (
            getattr(getattr(e, "error", None), "code", 0) == -32000 and "closed" in str(e).lower()
        )

    # the thread of the servers

    async def _live(self, name: str, settled: threading.Event, before: asyncio.Task[None] | None) -> None:
        """One server from its start to its end."""
        if before is not None:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await before
        config, changed = self._status[name].config, asyncio.Event()
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    async with asyncio.timeout(START_S):
                        client = await stack.enter_async_context(_client(config, said, changed))
                        found = await self._found(client, config)
                    self._clients[name] = client
                    self._set(name, stage="ready", **found)
                    settled.set()
                    listening = await stack.enter_async_context(asyncio.TaskGroup())
                    listening.create_task(_listen(client, changed))
                    while await changed.wait():
                        await asyncio.sleep(_GATHER)
                        changed.clear()
                        with contextlib.suppress(Exception):  # what it had stays; calls find out whether it is there
                            async with asyncio.timeout(CALL_S):
                                self._set(name, **await self._found(client, config))
            except asyncio.CancelledError:
                pass
            except BaseException as e:
                self._set(name, stage="failed", why=_why(e, said), tools=(), prompts=(), resources=())
            finally:
                self._clients.pop(name, None)
                settled.set()

    async def _found(self, client: Any, config: ServerConfig) -> dict[str, Any]:
        """What the server has, by the fields of McpStatus."""
        can = client.server_capabilities
        tools = await _all(client.list_tools, "tools") if can.tools else []
        prompts = await _all(client.list_prompts, "prompts") if can.prompts else []
        resources = await _all(client.list_resources, "resources") if can.resources else []
        made: dict[str, Tool] = {}
        for tool in tools:
            if (one := self._tool(config, tool)) and one.name not in made:
                made[one.name] = one
        return {
            "tools": tuple(made.values()),
            "prompts": tuple(
                ServerPrompt(
                    config.name,
                    p.name,
                    _line(p.description),
                    tuple(a.name for a in p.arguments or ()),
                    tuple(a.name for a in p.arguments or () if a.required),
                )
                for p in prompts
            ),
            "resources": tuple(Resource(config.name, str(r.uri), _line(r.name)) for r in resources),
        }

    def _tool(self, config: ServerConfig, tool: Any) -> Tool:
        def run(arguments: Mapping[str, Any], context: CallContext) -> str:
            shown = json.dumps(arguments, indent=1, ensure_ascii=False)
            exact = f"call {config.name} {config.where}\n{tool.name}\n{json.dumps(arguments, sort_keys=True)}"
            title = f"Call {_line(tool.name)} of the server {_line(config.name)}?"
            context.ask(Question("call", title, shown, exact, f"call {config.where} {tool.name}"))
            got = self._ask(config.name, lambda client: client.call_tool(tool.name, dict(arguments)), context.cancel)
            text = "\n".join(_text(content) for content in got.content)
            if not text and got.structured_content is not None:
                text = json.dumps(got.structured_content, ensure_ascii=False)
            if got.is_error:
                raise TinychatError(text or "the tool failed and did not say why")
            return text or "[no output]"

        name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{config.name}_{tool.name}")[:64]
        schema = {"type": "object", "properties": {}} | dict(tool.input_schema)
        return Tool(name, (tool.description or "")[:LONGEST], schema, run)


@contextlib.asynccontextmanager
async def _client(config: ServerConfig, said: Any, changed: asyncio.Event) -> AsyncIterator[Any]:
    """A connected client of the official package; `changed` is set when the server says that its tools, prompts or
    resources are others now. Raises TinychatError where the package is not installed."""
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
    except ImportError:
        raise TinychatError("the package mcp is not installed; pip install 'tinychat[mcp]' adds it") from None

    async def heard(message: Any) -> None:
        if str(getattr(message, "method", "")).endswith("/list_changed"):
            changed.set()

    log = logging.getLogger("mcp")
    log.propagate = False  # its lines would be painted over the screen
    log.addHandler(logging.NullHandler())
    if config.url:
        async with (
            create_mcp_http_client(headers=dict(config.headers) or None) as http,
            Client(streamable_http_client(config.url, http_client=http), message_handler=heard) as client,
        ):
            yield client
        return
    cwd = os.path.expanduser(config.cwd) or None
    parameters = StdioServerParameters(
        command=config.command,
        args=list(config.args),
        env=dict(config.env),
        cwd=cwd,
        encoding=mcp_lines.encoding(),
    )
    async with Client(stdio_client(parameters, errlog=said), message_handler=heard) as client:
        yield client


async def _listen(client: Any, changed: asyncio.Event) -> None:
    """Sets `changed` when the server says so to clients that subscribe, as the protocol has it since 2026-07-28;
    servers of earlier ones tell everybody."""
    what = {f"{kind}_list_changed": True for kind in ("tools", "prompts", "resources")}
    with contextlib.suppress(Exception):  # an earlier protocol, or a server that tells nothing
        async with client.listen(**what) as told:
            async for _ in told:
                changed.set()


async def _all(list_page: Callable[..., Coroutine[Any, Any, Any]], what: str) -> list[Any]:
    """All pages of a listing, up to MOST entries."""
    found: list[Any] = []
    cursor = None
    while len(found) < MOST:
        page = await list_page(cursor=cursor)
        found += getattr(page, what)
        cursor = page.next_cursor
        if not cursor:
            break
    return found[:MOST]


def _text(content: Any) -> str:
    """A block of content as text."""
    if hasattr(content, "text"):
        return str(content.text)
    inner = getattr(content, "resource", None)
    if inner is not None and hasattr(inner, "text"):
        return str(inner.text)
    return f"[{getattr(content, 'type', 'content')}: not text, left out]"


def _line(text: str | None) -> str:
    return printable(" ".join((text or "").split()))[:LONGEST]


def _why(e: BaseException, said: Any) -> str:
    """Why a server could not be started: the innermost error, and the last line that it wrote."""
    while isinstance(e, BaseExceptionGroup):
        e = e.exceptions[0]
    if isinstance(e, TimeoutError):
        why = f"it was not ready within {START_S:.0f} s"
    else:
        why = str(e).strip() or type(e).__name__
    with contextlib.suppress(OSError, ValueError):
        said.seek(0)
        if last := said.read()[-LONGEST:].strip().rpartition("\n")[2]:
            why += f" ({last})"
    return printable(why, newlines=False)[:LONGEST]
