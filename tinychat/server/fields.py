"""The fields of a request's JSON: each is taken by its name and checked; a field that no code takes is refused by
name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinychat.server.refusal import RequestRefused, invalid

MISSING = object()


class Fields:
    """One JSON object. A field that is null counts as not sent. `where` names the object in messages: "messages[2]".

    Every method takes its field out and raises RequestRefused for a value that is not possible; `done` refuses what is
    left.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise invalid("expected an object", where or None)
        self._left = {k: v for k, v in value.items() if v is not None}
        self._where = where

    def name(self, field: str) -> str:
        """The field as a message names it."""
        return f"{self._where}.{field}" if self._where else field

    def refuse(self, field: str, message: str) -> RequestRefused:
        return invalid(message, self.name(field))

    def any(self, field: str, default: Any = None) -> Any:
        """The value as it is."""
        return self._left.pop(field, default)

    def text(self, field: str, default: str | None = None) -> str | None:
        value = self.any(field, default)
        if value is not None and not isinstance(value, str):
            raise self.refuse(field, "expected a string")
        return value

    def needed(self, field: str) -> str:
        """A string that must be there and is not empty."""
        value = self.text(field)
        if not value:
            raise self.refuse(field, "is required")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.any(field, default)
        if not isinstance(value, bool):
            raise self.refuse(field, "expected true or false")
        return value

    def number(self, field: str, default: float, low: float, high: float) -> float:
        value = self.any(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(field, "expected a number")
        if not low <= value <= high:
            raise self.refuse(field, f"expected a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, field: str, default: int | None, low: int, high: int) -> int | None:
        value = self.any(field, default)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(field, "expected a whole number")
        if not low <= value <= high:
            raise self.refuse(field, f"expected a whole number from {low} to {high}")
        return value

    def choice(self, field: str, values: Sequence[str], default: str | None = None) -> str | None:
        value = self.any(field, default)
        if value is not default and value not in values:
            raise self.refuse(field, f"expected one of {', '.join(values)}")
        return value

    def object(self, field: str) -> dict[str, Any] | None:
        value = self.any(field)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(field, "expected an object")
        return value

    def fields(self, field: str) -> Fields | None:
        """An object, to take its fields; None when it is not there."""
        value = self.object(field)
        return None if value is None else Fields(value, self.name(field))

    def array(self, field: str, most: int) -> list[Any] | None:
        value = self.any(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(field, "expected an array")
        if len(value) > most:
            raise self.refuse(field, f"has {len(value):,} entries, at most {most:,} are possible")
        return value

    def strings(self, field: str, most: int, longest: int) -> tuple[str, ...]:
        """A string or an array of strings, none of them empty."""
        if isinstance(self._left.get(field), str):
            self._left[field] = [self._left[field]]
        values = self.array(field, most) or []
        for value in values:
            if not isinstance(value, str) or not value:
                raise self.refuse(field, "expected strings that are not empty")
            if len(value) > longest:
                raise self.refuse(field, f"has a string of more than {longest:,} characters")
        return tuple(values)

    def fixed(self, allowed: Mapping[str, Sequence[Any]]) -> None:
        """Takes fields that are only possible with one of the listed values, which ask for the behaviour that is
        fixed here."""
        for field, values in allowed.items():
            value = self.any(field, MISSING)
            if value is MISSING or value in ([], {}, ""):
                continue
            if not any(type(value) is type(v) and value == v for v in values):
                only = " or ".join(map(_json, values))
                raise self.refuse(field, f"is not supported, except {only}" if values else "is not supported")

    def notes(self, *fields: str) -> None:
        """Takes fields that are the client's own annotations and by definition change nothing: user, metadata."""
        for field in fields:
            self.any(field)

    def done(self) -> None:
        """Refuses fields that were not taken; null and empty values are ignored."""
        for field, value in self._left.items():
            if value not in ([], {}, ""):
                raise self.refuse(field[:80], "is not known")


def _json(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
