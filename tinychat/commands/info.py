"""`tinychat info`: describes a model file from its header alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from tinychat.commands.loading import CONTEXT, header
from tinychat.console import grid, show, show_json
from tinychat.engine import snapshots
from tinychat.engine.config import ModelConfig
from tinychat.engine.fit import context_bytes, fit
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError, printable
from tinychat.models import cache
from tinychat.models.hosts import shown


def info(text: str, *, grep: str | None, template: bool, tensors: bool, as_json: bool) -> None:
    """Prints facts about a model; or the metadata whose key contains `grep`, the chat template, or the tensors."""
    with header(text) as (model, path):
        if template:
            source = _template(path)
            show_json({"template": source}) if as_json else print(printable(source))
        elif tensors:
            found = _tensors(path)
            if as_json:
                show_json({"tensors": found})
            else:
                cells = [(t["name"], t["type"], "×".join(map(str, t["shape"])), f"{t['bytes']:,}") for t in found]
                show(grid(cells, ("tensor", "type", "shape", "bytes"), right=(2, 3)))
        elif grep is not None:
            values = _metadata(path, grep)
            if not values and not as_json:
                raise TinychatError(f"no key of the metadata contains {grep!r}")
            show_json(values) if as_json else show(grid([(k, str(v)) for k, v in values.items()]))
        else:
            facts = _describe(path, model.name)
            if path != cache.path_of(model):
                facts["path"] = shown(model.sources[0])
            if as_json:
                show_json(facts | {"metadata": _metadata(path)})
            else:
                show(grid(list(_lines(facts))))


def _describe(path: Path, name: str, context: int = CONTEXT) -> dict[str, Any]:
    """The facts as a JSON object; sizes in bytes. `problem` says why the engine cannot run the file, or is None.

    Raises TinychatError when the file is damaged or is not a GGUF.
    """
    header = GGUF.open(path)
    types: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for t in header.tensors.values():
        types[t.type.name]["tensors"] += 1
        types[t.type.name]["bytes"] += t.nbytes
    weights = sum(t.nbytes for t in header.tensors.values())
    facts: dict[str, Any] = {
        "model": name,
        "path": str(path),
        "bytes": header.nbytes,
        "architecture": str(header.metadata.get("general.architecture", "")),
        "parameters": sum(math.prod(t.shape) for t in header.tensors.values()),
        "tensors": len(header.tensors),
        "weight_bytes": weights,
        "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
        "template": isinstance(header.metadata.get("tokenizer.chat_template"), str),
        "problem": None,
    }
    try:
        config = ModelConfig.from_gguf(header)
        plan = build_plan(header, config)
    except TinychatError as e:
        return facts | {"problem": str(e)}
    context = min(context, config.context)
    verdict = fit(weights, context_bytes(plan, context), context)
    values = {k: v for k, v in asdict(config).items() if k not in ("rope", "architecture", "name")}
    del values["window_heads"]["rope"]
    for rule in (values["delta_rule"], values["kda"]):
        if rule:
            rule["layers"] = sorted(rule["layers"])
    sizes = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in values.items()}
    return facts | {
        "title": config.name,
        "context": config.context,
        "config": sizes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "window": {"layers": len(config.windowed), "sees": plan.window, "keeps": plan.kept} if plan.window else None,
        "state_bytes": plan.state_bytes,
        "snapshots": snapshots.kept(plan),
        "bytes_per_token": plan.bytes_per_token(),
        "fit": asdict(verdict) | {"context": context},
    }


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts as pairs (what, value) for people."""
    yield "model", facts["model"]
    yield "file", f"{facts['path']}  ({decimal(facts['bytes'])})"
    yield "architecture", facts["architecture"]
    if facts["problem"]:
        yield "cannot run", facts["problem"]
    else:
        c = facts["config"]
        yield "title", facts["title"]
        yield "layers", f"{c['layers']} of width {c['dim']}, feed-forward {' or '.join(map(str, sorted(set(c['ff']))))}"
        heads = f"{c['heads']} heads of {c['head_dim']}"
        if latent := c["latent"]:
            yield "attention", f"{heads}, latent rows of {latent['kv_lora']} + {c['head_dim'] - latent['nope']} (MLA)"
        else:
            yield "attention", f"{heads}, {c['kv_heads']} of them for keys and values"
        if c["storing"] < c["layers"]:
            yield "shared caches", f"{c['layers'] - c['storing']} of the layers read the rows of earlier ones"
        if rule := c["delta_rule"]:
            size = rule["head_dim"]
            yield (
                "delta rule",
                f"in {len(rule['layers'])} of the layers instead: {rule['heads']} heads of {size} x {size}",
            )
        if kda := c["kda"]:
            size = kda["head_dim"]
            yield "delta rule", f"in {len(kda['layers'])} of the layers instead: {c['heads']} heads of {size} x {size}"
        if c["convolutions"]:
            width = c["convolution_width"]
            yield "convolutions", f"in {len(c['convolutions'])} of the layers instead, over {width} tokens"
        if e := c["experts"]:
            shared = f" + a shared one of {e['shared_ff']}" if e["shared_ff"] else ""
            yield (
                "experts",
                f"{e['used']} of {e['count']}, each {e['ff']} wide{shared}; {e['dense_layers']} dense layers before",
            )
        yield "context", f"{facts['context']:,} tokens trained"
        yield "KV cache", f"{decimal(facts['kv_bytes_per_token'])} per token"
        if window := facts["window"]:
            what = f"{window['layers']} of the layers see the last {window['sees']:,} tokens"
            yield "windows", f"{what}, and keep the last {window['keeps']:,} of a longer context"
        if state := facts["state_bytes"]:
            yield "state", f"{decimal(state)} whatever the context, and up to {facts['snapshots']} snapshots of it"
        states = " and states" if facts["state_bytes"] else ""
        yield "moves", f"{decimal(facts['bytes_per_token'])} of weights{states} per token"
        yield "memory", f"{facts['fit']['verdict']}: {facts['fit']['explanation']}"
    yield "parameters", f"{facts['parameters']:,}"
    for i, (name, t) in enumerate(facts["types"].items()):
        yield "" if i else "tensors", f"{name}: {t['tensors']} tensor{'s' * (t['tensors'] > 1)}, {decimal(t['bytes'])}"
    yield "template", "in the file (`--template` shows it)" if facts["template"] else "none in the file"


def _metadata(path: Path, word: str = "") -> dict[str, Any]:
    """The metadata whose key contains `word` (any case), ready for JSON; long arrays as their length and beginning."""
    found = {k: v for k, v in GGUF.open(path).metadata.items() if word.lower() in k.lower()}
    return {k: _plain(v) for k, v in found.items()}


def _template(path: Path) -> str:
    """The chat template of the file. Raises TinychatError when it has none."""
    text = GGUF.open(path).metadata.get("tokenizer.chat_template")
    if not isinstance(text, str):
        raise TinychatError("the file has no chat template")
    return text


def _tensors(path: Path) -> list[dict[str, Any]]:
    """Every tensor: name, quant type, shape (rows before columns), bytes."""
    found = GGUF.open(path).tensors.values()
    return [{"name": t.name, "type": t.type.name, "shape": list(t.shape), "bytes": t.nbytes} for t in found]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | list):
        start = [v.item() if isinstance(v, np.generic) else v for v in value[:8]]
        return start if len(value) <= 8 else {"length": len(value), "first": start}
    return value
