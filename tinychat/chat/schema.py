"""A JSON schema that answers are held to, from a file of the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinychat.errors import TinychatError, printable

LARGEST = 1 << 20  # bytes of a schema's file


def read_schema(path: Path) -> dict[str, Any]:
    """The schema in a JSON file. Raises TinychatError for a file that cannot be read or holds no object; keywords are
    checked by the backend that answers."""
    name = printable(str(path), newlines=False)
    try:
        with open(path, "rb") as f:
            data = f.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise TinychatError(f"{name}: larger than {LARGEST >> 20} MiB, too large for a JSON schema")
        schema = json.loads(data)
    except OSError as e:
        raise TinychatError(f"{name}: {(e.strerror or str(e)).lower()}") from None
    except (ValueError, RecursionError) as e:
        raise TinychatError(f"{name}: not JSON ({printable(str(e), newlines=False)})") from None
    if not isinstance(schema, dict):
        raise TinychatError(f"{name}: a JSON schema is an object")
    return schema


def response_format(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a Request says of an answer that is held to `schema`."""
    if schema is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema), "strict": True}}
