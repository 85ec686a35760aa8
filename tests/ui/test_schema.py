"""/schema: answers are held to a JSON schema, which is shown, saved with the conversation and taken away again."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from tests.support import tiny
from tests.support.screens import text_of, until
from tinychat.chat.conversation import Conversation
from tinychat.ui.app import TinychatApp

SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}


async def test_answers_follow_the_schema_until_it_is_off(tmp_path: Path) -> None:
    model, file = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), tmp_path / "s.json"
    file.write_text(json.dumps(SCHEMA))
    app = TinychatApp("m", model)
    async with app.run_test(size=(100, 30)) as pilot:

        async def say(text: str, shown: str) -> None:
            app.chat.prompt.put(text)
            await pilot.press("enter")
            await until(pilot, lambda: shown in text_of(app))

        await until(pilot, lambda: app.controller.ready)
        await say("/schema", "/schema FILE")
        await say("/schema /nowhere.json", "no such file")
        await say(f"/schema {file}", "follow this JSON schema from")
        await until(pilot, lambda: "JSON schema" in text_of(app).splitlines()[0])
        app.chat.prompt.put("go")
        await pilot.press("enter")
        await until(pilot, lambda: len(app.controller.conversation.turns) == 2 and not app.controller.busy)
        c = app.controller.conversation
        jsonschema.validate(json.loads(c.turns[-1].text), SCHEMA)
        assert Conversation.from_dict(json.loads(json.dumps(c.as_dict()))).parameters.schema == SCHEMA
        app.chat.prompt.put("/start [tr")
        await pilot.press("enter")
        await until(pilot, lambda: "cannot be held by an answer that goes on" in text_of(app))
        await say("/schema off", "answers are free again")
        assert app.controller.conversation.parameters.schema is None
        await until(pilot, lambda: "JSON schema" not in text_of(app).splitlines()[0])
