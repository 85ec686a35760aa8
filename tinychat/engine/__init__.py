"""From a GGUF file to a stream of tokens: `Engine.load(path).generate(ids, Sampling())`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinychat.engine.engine import Engine, EngineInfo, Token
    from tinychat.kernels.sampling import Sampling

__all__ = ["Engine", "EngineInfo", "Sampling", "Token"]


def __getattr__(name: str) -> Any:
    """Loads the engine when it is first named, so that reading a header does not pay for templates and tokenizers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tinychat.engine import engine

    return getattr(engine, name)
