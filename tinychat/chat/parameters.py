"""The parameters that a user may set for a conversation: those of sampling and the chat's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tinychat.backend.protocol import SAMPLING_PARAMETERS as SAMPLING_PARAMETERS
from tinychat.backend.protocol import Parameter, Sampling
from tinychat.errors import TinychatError, printable

_SHOWN = 40  # characters of a value that is refused
_NOT_SET = {"dry_breakers", "logit_bias"}  # fields of Sampling that no user sets


@dataclass(frozen=True)
class Parameters:
    """Everything that shapes the answers of one conversation. `sampling.seed` is replaced by `seed`, or by a new one
    for every answer while `seed` is None; `max_tokens` None means up to the end of the context; `context` None means
    what the model was loaded with; `schema` is the JSON schema that answers are held to; `drop_oldest` leaves out the
    oldest turns when the context is full, without asking. `chosen` names the fields of `sampling` that the user has
    set, at least those with another value than tinychat's; the others give way to the model's own defaults."""

    system: str = ""
    thinking: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    max_tokens: int | None = None
    context: int | None = None
    schema: Mapping[str, Any] | None = None
    drop_oldest: bool = False
    chosen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        usual = Sampling()
        others = {k for k in SAMPLING_PARAMETERS if getattr(self.sampling, k) != getattr(usual, k)}
        object.__setattr__(self, "chosen", self.chosen | others)

    def sampling_of(self, model: Mapping[str, float]) -> Sampling:
        """The sampling of a model with the defaults `model` of its own."""
        own: dict[str, Any] = {k: SAMPLING_PARAMETERS[k].kind(v) for k, v in model.items() if k not in self.chosen}
        return replace(self.sampling, **own)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and TOML-like stores."""
        values = {**asdict(self), "chosen": sorted(self.chosen)}
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
        values["chosen"] = frozenset(map(str, values.get("chosen", ()))) & SAMPLING_PARAMETERS.keys()
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
DEFAULT = "default"  # what a user writes for the default of a field of Sampling
_OWN = ("seed", "max_tokens", "context")  # fields of Parameters; the rest are Sampling's


def get_parameter(parameters: Parameters, name: str) -> float | int | None:
    """The present value of one of PARAMETERS."""
    value: float | int | None = getattr(parameters if name in _OWN else parameters.sampling, name)
    return value


def shown(parameters: Parameters, name: str, model: Mapping[str, float]) -> str:
    """The value of one of PARAMETERS as a user reads it, for a model with the sampling defaults `model`."""
    value = get_parameter(replace(parameters, sampling=parameters.sampling_of(model)), name)
    text = PARAMETERS[name].empty if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if name not in model or name in parameters.chosen else f"{text}, the model's default"


def set_parameter(parameters: Parameters, name: str, text: str) -> Parameters:
    """`parameters` with `name` set to what the user typed; "default" gives a field of sampling its default
    back. Raises TinychatError for an unknown name or a value out of range."""
    spec = PARAMETERS.get(name)
    if spec is None:
        raise TinychatError(f"there is no parameter {printable(name)!r}; there are {', '.join(PARAMETERS)}")
    value: Any = None
    if name not in _OWN and text.strip().lower() == DEFAULT:
        usual = replace(parameters.sampling, **{name: getattr(Sampling(), name)})
        return replace(parameters, sampling=usual, chosen=parameters.chosen - {name})
    if not (spec.empty and text.strip().lower() == spec.empty):
        value = _number(spec, text)
    if name in _OWN:
        return replace(parameters, **{name: value})
    sampling = replace(parameters.sampling, **{name: value})
    return replace(parameters, sampling=sampling, chosen=parameters.chosen | {name})


def _number(spec: Parameter, text: str) -> float | int:
    kind = "a whole number" if spec.kind is int else "a number"
    shape = ",d" if spec.kind is int else "g"
    wanted = f"{spec.name} is {kind} from {spec.low:{shape}} to {spec.high:{shape}}"
    wanted += f", or {spec.empty}" if spec.empty else ""
    try:
        value: float | int = spec.kind(text.strip().replace(",", "." if spec.kind is float else ""))
    except ValueError:
        raise TinychatError(f"{wanted}, not {printable(text.strip())[:_SHOWN]!r}") from None
    if not spec.low <= value <= spec.high:  # nor is NaN
        raise TinychatError(f"{wanted}, not {f'{value:{shape}}'[:_SHOWN]}")
    return value
