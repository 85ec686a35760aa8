"""Lines of bounded length for the official MCP package, which keeps what an MCP server writes until the line ends."""

from __future__ import annotations

import codecs
from functools import cache

LONGEST = 16 << 20  # characters of a message
_NAME = "utf_8_lines"


class _Decoder(codecs.IncrementalDecoder):
    """UTF-8. A line ends behind LONGEST characters, which is no JSON, and what is left of it is not there."""

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._length = 0

    def decode(self, data: bytes, final: bool = False) -> str:  # type: ignore[override]
        first, end, rest = self._utf8.decode(data, final).partition("\n")
        room = LONGEST - self._length
        if len(first) <= room:
            line, self._length = first + end, self._length + len(first)
        else:  # it ends here, or has ended before
            line, self._length = f"{first[:room]}\n" if room >= 0 else "", LONGEST + 1
        if end:
            self._length = len(rest) - rest.rfind("\n") - 1
        return line + rest


@cache
def encoding() -> str:
    """The name of the encoding, as the package takes it."""
    utf8 = codecs.lookup("utf-8")
    found = codecs.CodecInfo(utf8.encode, utf8.decode, incrementaldecoder=_Decoder, name=_NAME)
    codecs.register(lambda name: found if name == _NAME else None)
    return _NAME
