"""The engine panel: what the engine does right now, beside the chat."""

from tinychat.ui.panel.panel import EnginePanel, ExpertsStrip
from tinychat.ui.panel.reading import Reading

__all__ = ["EnginePanel", "ExpertsStrip", "Reading"]
