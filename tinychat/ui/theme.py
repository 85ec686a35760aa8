"""tinychat's own colours, dark and light; Textual's themes are there as well."""

from textual.theme import Theme

DARK = Theme(
    name="tinychat-dark",
    dark=True,
    primary="#4fb8a8",
    secondary="#7c93c8",
    accent="#e0a458",
    foreground="#d8dce2",
    background="#14171b",
    surface="#1a1e23",
    panel="#21262c",
    success="#7fbf7f",
    warning="#e0a458",
    error="#e06c75",
    variables={"border": "#4fb8a8", "border-blurred": "#2b3138"},
)
LIGHT = Theme(
    name="tinychat-light",
    dark=False,
    primary="#0f766e",
    secondary="#3b5b9a",
    accent="#b45309",
    foreground="#22272e",
    background="#fbfaf7",
    surface="#f3f1ec",
    panel="#e9e6df",
    success="#2e7d32",
    warning="#b45309",
    error="#b3261e",
    variables={"border": "#0f766e", "border-blurred": "#d6d2c8"},
)
THEMES = (DARK, LIGHT)
