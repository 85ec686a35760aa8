"""Layers of a plan that differ in nothing but where their weights and what they keep lie: launches are made for one of
them, and are those of the others over other buffers. A model of 47 layers has two or three kinds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

from tinychat.kernels.blocks import Weight
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.ops import Plan


def first_alike(plan: Plan, layout: Layout) -> list[int]:
    """Of each layer the first that is like it."""
    seen = dict[Hashable, int]()
    # an embedding's kernel knows the number of its layer
    numbered = ((i, layer, i if layer.embedding else -1) for i, layer in enumerate(plan.layers))
    return [seen.setdefault((own, _form(layer, layout, {})), i) for i, layer, own in numbered]


def _form(part: Any, layout: Layout, tensors: dict[str, int]) -> Hashable:
    """A block with the number of each tensor in place of its name, and the tensor's size."""
    if isinstance(part, Weight):
        number, size = tensors.setdefault(part.tensor, len(tensors)), layout[part].tensor.values
        return (number, size, *(getattr(part, f.name) for f in fields(part) if f.name != "tensor"))
    if is_dataclass(part):
        return (type(part), *(_form(getattr(part, f.name), layout, tensors) for f in fields(part)))
    assert isinstance(part, Hashable)
    return part
