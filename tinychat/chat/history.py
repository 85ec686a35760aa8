"""Conversations on disk, saved as they happen, and the prompts that were typed: one SQLite file that several tinychats
share.

Every save is one transaction in WAL mode, so a killed process loses what it had not saved yet and nothing else. Search
scans a case-folded copy of every turn: 0.12 s for 25,000 turns (42 MB of text), in every language, without an index to
keep. Rows with n >= 0 are Conversation.turns, those with n < 0 its `others`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_data_dir

from tinychat.chat.conversation import Conversation, Turn
from tinychat.errors import TinychatError, encodable, printable

_MIGRATIONS = [  # index + 1 is the user_version it leads to
    """
    CREATE TABLE conversations(
      id TEXT PRIMARY KEY, name TEXT NOT NULL, title TEXT NOT NULL, model TEXT NOT NULL, created REAL NOT NULL,
      updated REAL NOT NULL, revision INTEGER NOT NULL, data TEXT NOT NULL);
    CREATE INDEX by_time ON conversations(updated DESC);
    CREATE TABLE turns(
      conversation TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE, n INTEGER NOT NULL, folded TEXT NOT NULL,
      data TEXT NOT NULL, PRIMARY KEY(conversation, n));
    CREATE TABLE prompts(id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL UNIQUE);
    """,
    "CREATE TABLE drafts(conversation TEXT PRIMARY KEY, text TEXT NOT NULL)",
    "ALTER TABLE drafts ADD COLUMN pastes TEXT NOT NULL DEFAULT '[]'",  # JSON: [place in the text, characters] of each
]
_PROJECT = "CASE WHEN json_valid(c.data) THEN coalesce(json_extract(c.data, '$.project'), '') ELSE '' END"
_PREVIEW = (
    "(SELECT CASE WHEN json_valid(data) THEN CAST(substr(json_extract(data, '$.text'), 1, 200) AS BLOB) END "
    "FROM turns "
    "WHERE conversation = c.id AND n >= 0 AND folded <> '' ORDER BY n DESC LIMIT 1)"
)
_MARKS = re.compile(r"^\s*(#+|[-*>|])\s|\*\*|`+", re.M)  # of Markdown, in a preview
_TITLE = "CASE WHEN c.name = '' THEN c.title ELSE c.name END"
_PROMPTS = 1000  # kept
LISTED = 500  # conversations in a list; a search finds the others
_OPENING = 5.0  # seconds to wait for another process when the file is opened
_BUSY = 0.04  # seconds to wait for it later; the screen's thread is blocked meanwhile


class ChangedElsewhere(TinychatError):
    """Another tinychat has written the conversation since it was read; nothing was saved."""


class Locked(TinychatError):
    """Another process holds the file; nothing was done, and the next try may succeed."""


@dataclass(frozen=True)
class Summary:
    """One conversation in the list: times are Unix times, `snippet` is the text around what was searched for,
    `preview` the beginning of the last turn that has text, where the title does not say it."""

    id: str
    title: str
    model: str
    turns: int
    created: float
    updated: float
    snippet: str = ""
    project: str = ""
    preview: str = ""


class Draft(NamedTuple):
    """What is typed and not sent, and which long pastes are in it."""

    text: str = ""
    pastes: tuple[str, ...] = ()


class History:
    """The store. May be used from several threads; `problem` is a line for the user when a damaged file was moved
    aside."""

    def __init__(self, file: Path | None = None) -> None:
        """Opens or creates `file` (default: in the user's data folder). Raises TinychatError when that is
        impossible."""
        self.file = file or Path(user_data_dir("tinychat", appauthor=False)) / "history.db"
        self.problem = ""
        self._lock = threading.RLock()
        self._saved: tuple[Conversation, int] | None = None  # what we wrote last, and as which revision
        self._revisions: dict[str, int] = {}  # of each conversation, the one that was read or written here last
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = self._open()
        except OSError as e:
            raise TinychatError(f"{self._shown}: {(e.strerror or str(e)).lower()}") from None

    def save(self, conversation: Conversation, updated: float | None = None) -> None:
        """Writes what changed since the last save, as a change of now or of the Unix time `updated`. A conversation
        without turns is not stored. Raises TinychatError; Locked while another process writes; ChangedElsewhere if
        saving would overwrite what another tinychat wrote.

        A name given elsewhere (by `rename`, or another tinychat) stays unless `conversation` was renamed since.
        """
        c = conversation
        if not c.turns:
            return
        with self._lock:
            with self._transaction() as db:
                revision = self._write(db, c, time.time() if updated is None else updated)
            self._saved, self._revisions[c.id] = (c, revision), revision  # not before the transaction has succeeded

    def _write(self, db: sqlite3.Connection, c: Conversation, updated: float) -> int:
        """Returns the revision that was written."""
        row = db.execute("SELECT revision FROM conversations WHERE id = ?", (c.id,)).fetchone()
        if row and row[0] != self._revisions.get(c.id, 0):
            raise ChangedElsewhere("another tinychat has changed this conversation")
        old = self._saved[0] if row and self._saved and (self._saved[0].id, self._saved[1]) == (c.id, row[0]) else None
        same = _common(old.turns, c.turns) if old else 0
        revision = row[0] + 1 if row else 1
        head = replace(c, turns=(), others=()).as_dict()
        data = json.dumps({k: v for k, v in head.items() if k not in ("turns", "others", "id", "name")})
        title = encodable(replace(c, name="").title)
        db.execute(
            "INSERT INTO conversations VALUES(?,?,?,?,?,?,?,?) ON CONFLICT(id) DO UPDATE SET "
            "title = excluded.title, "
            "model = excluded.model, updated = excluded.updated, revision = excluded.revision, "
            "data = excluded.data",
            (c.id, encodable(c.name), title, c.model, c.created, updated, revision, data),
        )
        if row and old and old.name != c.name:
            db.execute("UPDATE conversations SET name = ? WHERE id = ?", (encodable(c.name), c.id))
        kept = _common(old.others, c.others) if old else 0
        db.execute("DELETE FROM turns WHERE conversation = ? AND (n >= ? OR n < ?)", (c.id, same, -kept))
        numbered = [*enumerate(c.turns[same:], same), *((-1 - n, t) for n, t in enumerate(c.others[kept:], kept))]
        rows = [(c.id, n, encodable(turn.text.casefold()), _dump(turn)) for n, turn in numbered]
        db.executemany("INSERT INTO turns VALUES(?,?,?,?)", rows)
        return revision

    def load(self, id: str) -> Conversation:
        """The conversation `id`. Raises TinychatError when there is none, or when a newer tinychat wrote it."""
        with self._transaction("DEFERRED") as db:
            row = db.execute("SELECT data, name, revision FROM conversations WHERE id = ?", (id,)).fetchone()
            rows = db.execute("SELECT n, data FROM turns WHERE conversation = ? ORDER BY n", (id,)).fetchall()
        if row is None:
            raise TinychatError("this conversation is not in the history any more")
        try:
            turns, others = [json.loads(t) for n, t in rows if n >= 0], [json.loads(t) for n, t in rows[::-1] if n < 0]
            data = {**json.loads(row[0]), "id": id, "name": row[1], "turns": turns, "others": others}
        except (ValueError, RecursionError):
            raise TinychatError("this conversation cannot be read: its record in the history is damaged") from None
        conversation = Conversation.from_dict(data)
        with self._lock:
            self._saved, self._revisions[id] = (conversation, row[2]), row[2]
        return conversation

    def find(self, search: str = "", limit: int = LISTED, project: str = "") -> list[Summary]:
        """The conversations, latest change first, of one `project` or ("") all; with `search`, those where one turn,
        or the name and the project together, has all its words."""
        words = encodable(search.casefold()).split()
        query = (
            f"SELECT c.id, {_TITLE}, model, "
            "(SELECT count(*) FROM turns WHERE conversation = c.id AND n >= 0), "
            f"created, updated, {_PROJECT}, {_PREVIEW}, {{}} FROM conversations c WHERE ? IN ('', {_PROJECT}) {{}} "
            "ORDER BY updated DESC LIMIT ?"
        )
        with self._transaction("DEFERRED") as db:
            if not words:
                return [_summary(row, "") for row in db.execute(query.format("''", ""), (project, limit))]
            found = " AND ".join("instr({0}, ?)" for _ in words)
            match = f"conversation = c.id AND {found.format('folded')}"
            hit = f"(SELECT data FROM turns WHERE {match} ORDER BY n < 0, n LIMIT 1)"
            inside = f"SELECT conversation FROM turns WHERE {found.format('folded')}"
            named = found.format(f"fold(name || ' ' || {_PROJECT})")
            rows = db.execute(
                query.format(hit, f"AND (id IN ({inside}) OR {named})"), (*words, project, *words * 2, limit)
            ).fetchall()
        return [_summary(row, _snippet(row[-1], words)) for row in rows]

    def titled(self, title: str) -> str:
        """The id of the latest conversation of that title, in whichever case; "" where there is none."""
        query = f"SELECT c.id FROM conversations c WHERE fold({_TITLE}) = ? ORDER BY updated DESC LIMIT 1"
        with self._transaction("DEFERRED") as db:
            row = db.execute(query, (encodable(title.casefold()),)).fetchone()
        return row[0] if row else ""

    def ids(self) -> set[str]:
        """Of all conversations."""
        with self._transaction("DEFERRED") as db:
            return {id for (id,) in db.execute("SELECT id FROM conversations")}

    def projects(self) -> list[str]:
        """The names of all projects."""
        with self._transaction("DEFERRED") as db:
            rows = db.execute(f"SELECT DISTINCT {_PROJECT} AS project FROM conversations c ORDER BY project").fetchall()
        return [name for (name,) in rows if name]

    def rename(self, id: str, name: str) -> None:
        """Gives conversation `id` a name; an empty one gives its own title back."""
        with self._transaction() as db:
            db.execute("UPDATE conversations SET name = ? WHERE id = ?", (encodable(" ".join(name.split())), id))

    def delete(self, id: str) -> None:
        """Deletes conversation `id`."""
        with self._transaction() as db:
            db.execute("DELETE FROM conversations WHERE id = ?", (id,))
            db.execute("DELETE FROM drafts WHERE conversation = ?", (id,))

    def set_draft(self, conversation: str, draft: Draft) -> None:
        """Stores the draft of `conversation` ("": a new one); one without text deletes it."""
        text, pastes = draft
        with self._transaction() as db:
            if text:
                places = json.dumps([[text.index(p), len(p)] for p in pastes if p in text])
                db.execute("INSERT OR REPLACE INTO drafts VALUES(?,?,?)", (conversation, encodable(text), places))
            else:
                db.execute("DELETE FROM drafts WHERE conversation = ?", (conversation,))

    def draft(self, conversation: str) -> Draft:
        """What `set_draft` stored."""
        with self._transaction("DEFERRED") as db:
            row = db.execute("SELECT text, pastes FROM drafts WHERE conversation = ?", (conversation,)).fetchone()
        text, places = row or ("", "[]")
        with contextlib.suppress(ValueError, TypeError):  # damaged: the text alone
            return Draft(text, tuple(text[at : at + n] for at, n in json.loads(places)))
        return Draft(text)

    def add_prompt(self, text: str) -> None:
        """Stores a typed prompt as the latest; equal texts are stored once."""
        if not text.strip():
            return
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO prompts(text) VALUES(?)", (encodable(text),))
            db.execute("DELETE FROM prompts WHERE id <= (SELECT max(id) FROM prompts) - ?", (_PROMPTS,))

    def prompts(self) -> list[str]:
        """The typed prompts, oldest first."""
        with self._transaction("DEFERRED") as db:
            return [text for (text,) in db.execute("SELECT text FROM prompts ORDER BY id")]

    def close(self) -> None:
        """Closes the file; the store is not used again."""
        with self._lock:
            self._db.close()

    # the file

    @property
    def _shown(self) -> str:
        return printable(str(self.file), newlines=False)

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.Error as e:
            if not _damaged(e):
                raise TinychatError(f"{self._shown} cannot be opened: {printable(str(e), newlines=False)}") from None
            self._move_aside()
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        with contextlib.suppress(OSError):  # SQLite says what is wrong, and gives its other files the same mode
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))
            self.file.chmod(0o600)
        db = sqlite3.connect(self.file, timeout=_OPENING, isolation_level=None, check_same_thread=False)
        try:
            db.create_function("fold", 1, str.casefold, deterministic=True)
            if db.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                with contextlib.suppress(
                    sqlite3.OperationalError
                ):  # another process is doing it now; or no WAL on this disk
                    db.execute("PRAGMA journal_mode = WAL")
            db.execute(
                "PRAGMA synchronous = NORMAL"
            )  # in WAL mode a power cut may take the last moments, never the file
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("BEGIN IMMEDIATE")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > len(_MIGRATIONS):
                raise TinychatError(f"{self._shown} was written by a newer tinychat; update to read it")
            for script in _MIGRATIONS[version:]:
                for statement in script.split(";"):
                    db.execute(statement)
            db.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")
            db.execute("COMMIT")
            db.execute(f"PRAGMA busy_timeout = {1e3 * _BUSY:.0f}")
            return db
        except BaseException:
            db.close()
            raise

    def _move_aside(self) -> None:
        aside = self.file.with_name(f"{self.file.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                self.file.with_name(self.file.name + suffix).rename(aside.with_name(aside.name + suffix))
        self.problem = (
            f"the history was damaged; it is kept as {printable(str(aside), newlines=False)} and a new one was begun"
        )

    @contextlib.contextmanager
    def _transaction(self, begin: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """One transaction, all or nothing. Raises TinychatError; a file found damaged now is moved aside for the next
        call."""
        with self._lock:
            try:
                self._db.execute(f"BEGIN {begin}")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as e:
                if not _damaged(e):
                    kind = Locked if _named(e).startswith("SQLITE_BUSY") else TinychatError
                    raise kind(f"the history cannot be used: {printable(str(e), newlines=False)}") from None
                self._db.close()
                self._saved = None
                self._move_aside()
                self._db = self._connect()
                raise TinychatError(self.problem) from None


def _summary(row: Sequence[Any], snippet: str) -> Summary:
    """Of a row of `find`."""
    id, title, model, turns, created, updated, project, preview, _ = row
    written = (preview or b"").decode(errors="replace")  # a lone surrogate is no UTF-8
    text = " ".join(_MARKS.sub(" ", written).split())
    text = "" if text.startswith(title.rstrip("…")) else text
    return Summary(id, title, model, turns, created, updated, snippet, str(project), text)


def _common(old: Sequence[Turn], new: Sequence[Turn]) -> int:
    """How many turns at the start of both are the same objects."""
    return next((i for i, (a, b) in enumerate(zip(old, new)) if a is not b), min(len(old), len(new)))


def _damaged(e: sqlite3.Error) -> bool:
    return _named(e).startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT"))


def _named(e: sqlite3.Error) -> str:
    return getattr(e, "sqlite_errorname", "")


def _dump(turn: Turn) -> str:
    return json.dumps(asdict(replace(turn, stats=dict(turn.stats))))


def _snippet(data: str | None, words: list[str]) -> str:
    """The text of the turn `data` around the first of the case-folded `words`, as it was written."""
    text = json.loads(data)["text"] if data else ""
    folded = text.casefold()
    at = min((i for w in words if (i := folded.find(w)) >= 0), default=0)
    if len(folded) != len(text):  # some letters fold to several
        ends = itertools.accumulate(len(c.casefold()) for c in text)
        at = sum(1 for _ in itertools.takewhile(lambda end: end <= at, ends))
    start = max(0, at - 30)
    return " ".join(("…" * (start > 0) + text[start : at + 60]).split())
