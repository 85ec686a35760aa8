"""Full-size dialogs over the chat: each is one file, testable alone in a tiny host app."""
