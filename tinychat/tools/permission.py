"""The actions that the user has allowed: in a folder, in a conversation, or always for one exact action."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from platformdirs import user_data_dir

from tinychat.errors import TinychatError, printable
from tinychat.files import alone, replace_file
from tinychat.tools.protocol import PermissionAnswer, Question


class Permissions:
    """The permissions given so far; thread-safe. Answers "always" are stored in `file` (None: in this object); all
    others are lost with the object."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._folders = set[str]()
        self._conversations = set[tuple[str, str]]()
        self._always = self._read()

    @classmethod
    def of_user(cls) -> Permissions:
        """The permissions stored in the user's data folder."""
        return cls(Path(user_data_dir("tinychat", appauthor=False)) / "permissions.json")

    def allows(self, question: Question, conversation: str) -> bool:
        """Whether an earlier answer covers `question`."""
        with self._lock:
            if question.kind == "read":
                return question.exact in self._folders
            return (conversation, question.scope) in self._conversations or question.exact in self._always

    def remember(self, question: Question, answer: PermissionAnswer, conversation: str) -> None:
        """Stores what `answer` allows for later calls. Raises TinychatError when "always" cannot be written."""
        with self._lock:
            if answer == "folder":
                self._folders.add(question.exact)
            elif answer == "conversation":
                self._conversations.add((conversation, question.scope))
            elif answer == "always":
                self._always.add(question.exact)
                self._write()

    def _read(self) -> set[str]:
        """The stored actions; none where the file cannot be read."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8")) if self._file else []
        except (OSError, ValueError):
            return set()
        return {each for each in found if isinstance(each, str)} if isinstance(found, list) else set()

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with alone(self._file.parent):
                self._always |= self._read()  # with those of other processes
                replace_file(self._file, json.dumps(sorted(self._always), indent=1).encode(), durable=True)
        except OSError as e:
            shown = printable(str(self._file), newlines=False)
            raise TinychatError(f"{shown} cannot be written: {(e.strerror or str(e)).lower()}") from None
