"""The engine panel: what the engine does right now, beside the chat or as one line above the prompt."""

from tinychat.ui.panel.panel import EngineLine, EnginePanel, ExpertsStrip
from tinychat.ui.panel.reading import Reading

__all__ = ["EngineLine", "EnginePanel", "ExpertsStrip", "Reading"]
