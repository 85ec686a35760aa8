"""The questions of a conversation, asked of another model one after another."""

from __future__ import annotations

from dataclasses import dataclass

from tinychat.chat.conversation import Turn


@dataclass(frozen=True)
class Replay:
    """`asked` of the `questions` were put to `model`."""

    questions: tuple[Turn, ...]
    model: str
    asked: int = 0

    @property
    def progress(self) -> str:
        return f"replay {self.asked}/{len(self.questions)}"

    @property
    def ended(self) -> str:
        """What the user has to know when no further question is asked."""
        total = len(self.questions)
        if self.asked == total:
            done = f"{self.model} has answered {total:,} question{'s' * (total != 1)}"
        else:
            done = f"the replay ended after {self.asked:,} of {total:,} questions"
        return f"{done}; ← and → on the first answer switch between these answers and those before, /undo too"
