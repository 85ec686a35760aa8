"""What is known about the sites that files come from. Another site is another entry of HOSTS.

The scheme of a source says how it is fetched (over HTTP, out of a wheel): see sources.py.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from tinychat.errors import TinychatError, printable


@dataclass(frozen=True)
class Host:
    """One site. `mirror` and `token` name environment variables, "" where the site has none."""

    url: str  # scheme and host
    name: str  # in messages
    mirror: str = ""  # a URL that serves the same paths
    token: str = ""  # sent to this site (or its mirror) only
    page: tuple[str, str] | None = None  # (pattern, replacement): path of a file's web page -> path of the file
    digest: str = ""  # header with the file's SHA-256, in the response that redirects to the storage

    def file(self, repo: str, name: str) -> str:
        """URL of a file in a repository."""
        return f"{self.url}/{repo}/resolve/main/{name}"


HUB = Host(
    "https://huggingface.co",
    "the hub",
    mirror="HF_ENDPOINT",
    token="HF_TOKEN",
    page=(r"^(/[^/]+/[^/]+)/blob/", r"\1/resolve/"),
    digest="X-Linked-ETag",
)
HOSTS = (HUB,)


def host_of(url: str) -> Host | None:
    """The site of HOSTS that `url` is on."""
    return next((h for h in HOSTS if url.startswith(f"{h.url}/")), None)


def canonical_url(url: str) -> str:
    """`url` without blanks around it; the URL of a file's web page (`/blob/` on the hub) becomes that of the file.

    Raises TinychatError when `url` is not a URL."""
    try:
        parts = urlsplit(url.strip())
        url.encode()  # lone surrogates
    except ValueError as e:
        why = "a character is half of a pair" if isinstance(e, UnicodeError) else str(e).lower()
        raise TinychatError(f"{printable(url, newlines=False)} is no URL: {why}") from None
    if (host := host_of(urlunsplit(parts))) and host.page:
        parts = parts._replace(path=re.sub(*host.page, parts.path))
    return urlunsplit(parts)


def mirrored(url: str) -> str:
    """`url` on the mirror that the environment names for its site, if any. The cache's keys use the site's own URL."""
    host = host_of(url)
    mirror = os.environ.get(host.mirror, "").rstrip("/") if host and host.mirror else ""
    return mirror + url.removeprefix(host.url) if host and mirror else url


def authorization(url: str) -> dict[str, str]:
    """The header with the token for the site of `url`; httpx drops it when a redirect leaves that host."""
    host = host_of(url)
    token = os.environ.get(host.token, "").strip() if host and host.token else ""
    return {"Authorization": f"Bearer {token}"} if token else {}


def shown(source: str) -> str:
    """A source for display: a URL without user, password, query, fragment and control characters."""
    try:
        parts = urlsplit(source)
        if parts.netloc:
            port = f":{parts.port}" if parts.port else ""
            source = f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
    except ValueError:  # not a URL: "http://[bad"
        source = source.rpartition("@")[2].partition("?")[0]
    return printable(source, newlines=False)
