"""Holds a server to llm-comply's three formats (PyPI): the official schemas of OpenAI, Open Responses and Anthropic.

    python -m scripts.comply http://127.0.0.1:8080 [--model NAME] [--only ID,ID]

What a text model refuses by its nature (images) is counted apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llm_comply
from llm_comply.tests import get_tests

FORMATS = {"openai-chat": "openai_chat.json", "open-responses": "openresponses.json", "anthropic": "anthropic.json"}
REFUSED = {  # by design, with a 400 that names the part
    "chat-image-input": "no model here sees images",
    "image-input": "no model here sees images",
    "anth-image-input": "no model here sees images",
}


@dataclass(frozen=True)
class Result:
    """One test: passed, failed, skipped (by llm-comply) or refused (by us, see REFUSED)."""

    form: str
    id: str
    status: str
    errors: Sequence[str]


def comply(url: str, model: str, only: Sequence[str] = (), forms: Sequence[str] = tuple(FORMATS)) -> list[Result]:
    """Runs the tests of `forms` against the server at `url` (without /v1)."""
    config = llm_comply.ComplianceConfig(f"{url}/v1", "none", model, filter_ids=list(only) or None)
    results = []
    for form in forms:
        spec = llm_comply.SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / FORMATS[form]))
        for r in llm_comply.TestRunner(config, get_tests(form), spec).run_all().results:
            status = "refused" if r.status.value == "failed" and r.id in REFUSED else r.status.value
            results.append(Result(form, r.id, status, r.errors))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="tinychat")
    parser.add_argument("--only", default="", help="ids of tests, separated by commas")
    args = parser.parse_args()
    results = comply(args.url.rstrip("/").removesuffix("/v1"), args.model, [*filter(None, args.only.split(","))])
    for r in results:
        print(f"{r.form:15} {r.id:30} {r.status:8} {'; '.join(r.errors)[:200] if r.status == 'failed' else ''}")
    for form in FORMATS:
        of = [r.status for r in results if r.form == form]
        counted = ", ".join(f"{of.count(s)} {s}" for s in ("passed", "refused", "skipped", "failed"))
        print(f"{form}: {len(of)} tests, {counted}")
    return any(r.status == "failed" for r in results)


if __name__ == "__main__":
    sys.exit(main())
