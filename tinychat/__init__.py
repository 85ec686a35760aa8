"""tinychat: chat with a local language model in the terminal, and see why it is fast."""

__version__ = "0.1.0"
