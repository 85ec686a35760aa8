"""The built-in tools of one folder."""

from __future__ import annotations

from tinychat.tools.files import reading, writing
from tinychat.tools.folder import Folder
from tinychat.tools.protocol import Tool
from tinychat.tools.shell import running


def tools_of(folder: Folder) -> tuple[Tool, ...]:
    return (*reading(folder), *writing(folder), *running(folder))
