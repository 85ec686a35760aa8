"""The chat of a browser: one process per page, a client of the server that started it, with no files of this machine.

    python -m tinychat.ui.web URL FOLDER NAME

The server that starts it gives the key in the environment and an empty FOLDER, and carries what Textual's web driver
says and reads to the browser. Whoever sits there may talk to the model and nothing else.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinychat import process
from tinychat.backend.address import Server, read_key
from tinychat.backend.factory import open_backend
from tinychat.chat.conversation import Attachment
from tinychat.errors import TinychatError
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat import commands
from tinychat.ui.chat.prompt import Choice
from tinychat.ui.chat.screen import ChatScreen
from tinychat.ui.screens.help import Entry

COMMANDS = frozenset(
    {"new", "rename", "regenerate", "version", "undo", "continue", "start", "edit", "fork", "skip", "think", "system"}
    | {"set", "raw", "copy", "stats", "panel", "help", "quit"}
)
# What is read besides Python and its packages: how names, zones and types are called.
_READABLE = ("/usr/share", "/usr/lib", "/dev/null", "/dev/urandom", "/proc/self", "/proc/meminfo")
_READABLE_IN_ETC = ("hosts", "resolv.conf", "nsswitch.conf", "host.conf", "gai.conf", "localtime", "mime.types")
_PATHS = {"os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "os.truncate", "os.chdir"}
_NEVER = {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen"}
_NEVER |= {"os.link", "os.symlink", "sqlite3.connect", "socket.bind"}


class WebScreen(ChatScreen):
    """The chat without what reaches this machine. `confine` is what makes it safe; this only hides what would fail."""

    attaches = False

    async def run_command(self, text: str) -> None:
        try:
            allowed = commands.find(text.partition(" ")[0]).name in COMMANDS
        except TinychatError:
            allowed = True  # it is said which command was meant
        if allowed:
            await super().run_command(text)
        else:
            await self.say("this command is not there in a browser", error=True)

    def command_entries(self) -> list[Entry]:
        return [(c.usage, c.help) for c in commands.COMMANDS if c.name in COMMANDS]

    def offers(self, command: str) -> bool:
        return command in COMMANDS

    def copy(self, text: str, what: str) -> None:
        """To the browser's terminal; this machine's clipboard is not the reader's."""
        self.app.copy_to_clipboard(text)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """There is one model, the server's: nothing chooses another."""
        return action != "choose_model" and super().check_action(action, parameters)

    def files_in(self, *args: Any) -> tuple[Attachment, ...]:
        """Nothing: the files are the server's, not those of the page's reader."""
        return ()

    def _files(self, typed: str) -> list[Choice]:
        return []


class WebApp(TinychatApp):
    """The chat with a server's model."""

    CHAT = WebScreen
    DRIVER = None  # the one that the environment names


def confine(folder: Path, url: str) -> None:
    """From now on this process opens no file outside of `folder` but those of Python, starts no program, and
    connects to no other server than `url`. Python's audit events report every attempt before it happens."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    own = os.path.realpath(folder)
    package = Path(__file__).parents[1]
    roots = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(package), *_READABLE, f"/proc/{os.getpid()}"}
    roots |= {entry for entry in sys.path if "-packages" in entry} | {f"/etc/{name}" for name in _READABLE_IN_ETC}
    readable = tuple({os.path.realpath(root) for root in roots})

    def inside(path: str, root: str) -> bool:
        return path == root or path.startswith(root + os.sep)

    def refuse(what: object) -> None:
        raise PermissionError(errno.EACCES, "not from a browser", str(what))

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event in _NEVER:
            refuse(event)
        elif event == "socket.connect":
            address = args[1]
            if not isinstance(address, tuple) or address[1] != port or address[0] not in (parts.hostname, "127.0.0.1"):
                refuse(address)
        elif event == "os.rename":
            if not all(inside(os.path.realpath(p), own) for p in args[:2]):
                refuse(args[0])
        elif (event == "open" or event in _PATHS) and not isinstance(args[0], int):
            path = os.path.realpath(os.fsdecode(args[0] if args[0] is not None else "."))
            writes = event not in ("open", "os.listdir", "os.scandir", "os.chdir") or (
                event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            )
            if not inside(path, own) and (writes or not any(inside(path, root) for root in readable)):
                refuse(args[0])

    sys.addaudithook(check)


def main(url: str, folder: Path, name: str) -> int:
    """Runs the chat until the page is closed."""
    process.prepare()
    server = Server(url, None, read_key(None))
    app = WebApp(name, Path(url), open_backend=open_backend, server=server)
    process.freeze()
    confine(folder, url)
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
