"""`tinychat serve`: serves a model over HTTP."""

from __future__ import annotations

import contextlib
import ipaddress

from tinychat.backend.address import KEY_VARIABLE, read_key
from tinychat.backend.local import LocalBackend
from tinychat.chat.settings import Settings
from tinychat.commands.loading import obtain, settings_of_user
from tinychat.console import Bar, say, say_notes
from tinychat.engine.speculation import Speculate
from tinychat.errors import TinychatError, printable
from tinychat.kernels.cuda import driver
from tinychat.models.registry import resolve, sampling_of
from tinychat.process import signals_to, starting
from tinychat.server.answer import ServedModel
from tinychat.server.app import create_app
from tinychat.server.connection import bind, make_server
from tinychat.server.security import Policy
from tinychat.server.web import Web, installed, program


def serve(
    text: str,
    *,
    host: str,
    port: int,
    key_file: str | None,
    no_key: bool,
    context: int | None,
    queue_size: int,
    hosts: list[str],
    origins: list[str],
    device: str | None,
    threads: int | None,
    speculate: Speculate,
) -> None:
    """Serves the model that `text` names until Ctrl-C. A key is required where other machines can reach the port."""
    key = None if no_key else read_key(key_file)
    if key is None and not no_key and not _loopback(host):
        raise TinychatError(
            f"{printable(host)} can be reached by other machines, so a key is needed: --api-key FILE, or the "
            f"environment variable {KEY_VARIABLE} (--no-key lets everybody in)"
        )
    own = settings_of_user()
    found = resolve(text, own.models)
    path = obtain(found)
    with bind(host, port) as listening:  # before the load, so that a port in use is reported at once
        with Bar() as bar, starting():
            driver.start(device)
            backend = LocalBackend.open(
                path,
                max_context=context or own.parameters.context,
                preset=found.preset,
                device=device,
                threads=threads or own.threads,
                store_bytes=int(own.kv_cache_gb * 1e9),  # conversations that take turns are not prefilled again
                speculate=speculate,
                progress=bar.stage,
            )
        with contextlib.closing(backend):
            say_notes(backend.info.notes)
            served = served_model(found.name, backend, own)
            port = listening.getsockname()[1]
            own_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            pages = Web(f"http://{_bracketed(own_host)}:{port}", key, found.name, program()) if installed() else None
            policy = Policy(key, frozenset((host, *hosts)), frozenset(origins))
            app = create_app(served, policy, queue_size, pages)
            url = f"http://{_bracketed(host)}:{port}"
            listening.listen()  # from here on a client waits where it was refused: the URL below can be used at once
            say(f"{found.name} answers at {url}/v1 ({'with' if key else 'no'} key); Ctrl-C ends it")
            if pages is not None:
                say(f"the chat in a browser: {url}")
            server = make_server(app, websockets=pages is not None)
            with signals_to(server.handle_exit):
                server.run(sockets=[listening])


def served_model(name: str, backend: LocalBackend, own: Settings) -> ServedModel:
    """What answers, with the defaults of requests: the settings', else the model's own, else tinychat's."""
    sampling = own.parameters.sampling_of(backend.info.sampling or sampling_of(name))
    return ServedModel(name, backend, backend, sampling, own.parameters.seed)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _loopback(host: str) -> bool:
    """Whether only this machine reaches a port on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
