"""The scheduler's state in a file, so that it can be started again: keys and values, members, and answers.

Each request is one transaction, and the answer to a request that changes something is part of it: a client that lost
its connection asks again and is answered from here. A killed process loses nothing; a machine without power may lose
the last moments (no sync after each write, which would cost a thousand times as much).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from meshwright.errors import LaunchError

FORMAT = 1
TABLES = """
create table if not exists pairs (key text primary key, value blob not null) without rowid;
create table if not exists facts (name text primary key, value blob not null) without rowid;
create table if not exists answers (session text primary key, number integer, answer blob) without rowid;
"""


class Kept:
    """Reads go to memory, writes to the file as well. `path` None: nothing outlives the process."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            version = self._file.execute("pragma user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise LaunchError(f"{path} is of another version of Meshwright", hint="a new --state folder")
            self._file.execute("pragma journal_mode=wal")
            self._file.execute("pragma synchronous=off")
            self._file.executescript(TABLES)
            self._file.execute(f"pragma user_version={FORMAT}")
            self.pairs: dict[str, bytes] = dict(self._file.execute("select key, value from pairs"))
            self.facts: dict[str, bytes] = dict(self._file.execute("select name, value from facts"))
            rows = self._file.execute("select session, number, answer from answers")
            self._answers: dict[str, tuple[int, bytes]] = {s: (n, a) for s, n, a in rows}
        except sqlite3.Error as error:
            raise LaunchError(
                f"the scheduler's state {path} cannot be used", why=str(error), hint="a new --state folder"
            ) from None

    def begin(self) -> None:
        self._file.execute("begin")

    def commit(self, session: str, number: int, answer: bytes) -> None:
        """Close a transaction with the answer that its request gets, now and when it is asked again."""
        self._answers[session] = (number, answer)
        self._file.execute("insert or replace into answers values (?, ?, ?)", (session, number, answer))
        self._file.execute("commit")

    def answered(self, session: str, number: int) -> bytes | None:
        """The answer that a request has had already."""
        found = self._answers.get(session)
        return found[1] if found is not None and found[0] == number else None

    def set(self, key: str, value: bytes) -> None:
        self.pairs[key] = value
        self._file.execute("insert or replace into pairs values (?, ?)", (key, value))

    def delete(self, key: str) -> bool:
        self._file.execute("delete from pairs where key = ?", (key,))
        return self.pairs.pop(key, None) is not None

    def forget(self, prefix: str) -> None:
        """Delete all keys that begin so."""
        for key in [k for k in self.pairs if k.startswith(prefix)]:
            self.delete(key)

    def note(self, name: str, value: bytes) -> None:
        """Keep a fact about the members."""
        self.facts[name] = value
        self._file.execute("insert or replace into facts values (?, ?)", (name, value))

    def close(self) -> None:
        self._file.close()


__all__ = ["Kept"]
