"""Streamed Markdown: split into blocks as it arrives (blocks), laid out as lines (layout), painted by one widget
(view).

One widget per answer instead of one per block keeps a 3,000-token answer smooth: a flush costs what its last block
costs.
"""

from tinychat.ui.chat.markdown.view import MarkdownView

__all__ = ["MarkdownView"]
