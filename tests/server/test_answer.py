"""What a client gets in one piece."""

from tinychat.backend.protocol import Finished, Piece, Prompted, Stats, ToolCall, Usage
from tinychat.server.answer import Answer


def test_a_call_that_is_taken_back_is_text() -> None:
    events = [
        Prompted(Usage()),
        ToolCall(0, "", "a", "weather"),
        ToolCall(0, '{"city": "Oslo"}'),
        ToolCall(1, '{"ci', "b", "weather"),
        ToolCall(1, "", note="the call is incomplete"),
        Piece("answer", '{"ci'),
        Finished("eos", Usage(), Stats()),
    ]
    answer = Answer.of(events)
    assert [(c.name, c.arguments) for c in answer.calls] == [("weather", '{"city": "Oslo"}')]
    assert answer.text == '{"ci'
