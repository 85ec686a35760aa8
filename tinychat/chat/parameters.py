"""The parameters that a user may set for a conversation: those of sampling and the chat's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tinychat.backend.protocol import SAMPLING_PARAMETERS, Parameter, Sampling
from tinychat.errors import TinychatError, printable

_NOT_SET = {"dry_breakers", "logit_bias"}  # fields of Sampling that no user sets


@dataclass(frozen=True)
class Parameters:
    """Everything that shapes the answers of one conversation. `sampling.seed` is replaced by `seed`, or by a new one
    for every answer while `seed` is None; `max_tokens` None means up to the end of the context; `context` None means
    what the model was loaded with; `schema` is the JSON schema that answers are held to; `drop_oldest` leaves out the
    oldest turns when the context is full, without asking."""

    system: str = ""
    thinking: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    max_tokens: int | None = None
    context: int | None = None
    schema: Mapping[str, Any] | None = None
    drop_oldest: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and TOML-like stores."""
        values = asdict(self)
        for name in _NOT_SET:
            del values["sampling"][name]
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Parameters:
        """The reverse of as_dict; unknown keys are ignored (a newer version wrote them). Raises TinychatError for bad
        values."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        sampling = values.pop("sampling", {})
        names = {f.name for f in fields(Sampling)} - _NOT_SET
        try:
            given: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in dict(sampling).items() if k in names
            }
            return cls(sampling=Sampling(**given), **values)
        except (TypeError, ValueError) as e:
            raise TinychatError(f"these parameters cannot be read: {e}") from None


PARAMETERS: dict[str, Parameter] = SAMPLING_PARAMETERS | {
    p.name: p
    for p in (
        Parameter(
            "seed", int, 0, 2**32 - 1, "same seed and prompt, same answer (random = a new one each time)", "random"
        ),
        Parameter(
            "max_tokens", int, 1, 1_000_000, "longest answer in tokens (off = up to the end of the context)", "off"
        ),
        Parameter(
            "context",
            int,
            64,
            10_000_000,
            "context length in tokens; loads the model again (auto = its default)",
            "auto",
        ),
    )
}
_OWN = ("seed", "max_tokens", "context")  # fields of Parameters; the rest are Sampling's


def get_parameter(parameters: Parameters, name: str) -> float | int | None:
    """The present value of one of PARAMETERS."""
    value: float | int | None = getattr(parameters if name in _OWN else parameters.sampling, name)
    return value


def set_parameter(parameters: Parameters, name: str, text: str) -> Parameters:
    """`parameters` with `name` set to what the user typed. Raises TinychatError for an unknown name or a value out of
    range."""
    spec = PARAMETERS.get(name)
    if spec is None:
        raise TinychatError(f"there is no parameter {printable(name)!r}; there are {', '.join(PARAMETERS)}")
    value: Any = None
    if not (spec.empty and text.strip().lower() == spec.empty):
        value = _number(spec, text)
    if name in _OWN:
        return replace(parameters, **{name: value})
    return replace(parameters, sampling=replace(parameters.sampling, **{name: value}))


def _number(spec: Parameter, text: str) -> float | int:
    kind = "a whole number" if spec.kind is int else "a number"
    wanted = f"{spec.name} must be {kind}, {spec.low:g} to {spec.high:g}" + (f", or {spec.empty}" if spec.empty else "")
    try:
        value: float | int = spec.kind(text.strip().replace(",", "." if spec.kind is float else ""))
    except ValueError:
        raise TinychatError(f"{wanted}, not {printable(text.strip())!r}") from None
    if not math.isfinite(value) or not spec.low <= value <= spec.high:
        raise TinychatError(f"{wanted}, not {value:g}")
    return value
