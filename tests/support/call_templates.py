"""Small chat templates of our own, one for each way of writing tool calls that published models have."""

from __future__ import annotations

from typing import Any

from tests.support import vocab
from tinychat.engine.prompt import Chat
from tinychat.engine.tokenizer import Tokenizer

_TURNS = """{% if tools %}<|im_start|>system
You have tools:{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}{% if m.tool_calls %}SECTION{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_LOOP = "{% for c in m.tool_calls %}CALL{% endfor %}"
_JSON = """{{ '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}' }}"""

SECTIONS: dict[str, str] = {
    # Hermes, Qwen 2.5 and 3, Granite 4
    "json": _LOOP.replace("CALL", "{{ '\n<tool_call>\n' }}" + _JSON + "{{ '\n</tool_call>' }}"),
    # Mistral Nemo: one array, with ids
    "json array": "[TOOL_CALLS][{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]",
    # Llama 3: no markup, one call
    "json bare": "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}',
    # OpenAI's own nesting, and Apertus
    "json nested": _LOOP.replace("CALL", "<call>{{ c | tojson }}</call>"),
    "json key": "<calls>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}{% endfor %}]</calls>',
    # DeepSeek
    "named": "<calls>"
    + _LOOP.replace("CALL", "<call>{{ c.function.name }}<sep>{{ c.function.arguments | tojson }}</call>")
    + "</calls>",
    # Kimi K2: the name is in the id
    "named id": "<calls>"
    + _LOOP.replace("CALL", "<call>{{ c.id }}<sep>{{ c.function.arguments | tojson }}</call>")
    + "</calls>",
    # Mistral Small 3.2
    "named with id": _LOOP.replace(
        "CALL", "[TOOL_CALLS]{{ c.function.name }}[ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"
    ),
    # GLM 4.5 and later
    "tagged": _LOOP.replace(
        "CALL",
        "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>",
    ),
    # Qwen3-Coder
    "tagged lines": _LOOP.replace(
        "CALL",
        "{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments.items() %}"
        "{{ '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</tool_call>' }}",
    ),
    # MiniCPM 5: some strings are quoted
    "tagged quotes": _LOOP.replace(
        "CALL",
        '<function name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}<param name="{{ k }}">'
        "{% if v is string and ('<' in v or '\n' in v) %}{{ '<![CDATA[' + v + ']]>' }}"
        "{% else %}{{ v if v is string else v | tojson }}{% endif %}</param>{% endfor %}</function>",
    ),
    # DeepSeek V3.2: the markup says what is a string
    "tagged types": "<calls>"
    + _LOOP.replace(
        "CALL",
        '<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
        '<parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
        "{{ v if v is string else v | tojson }}</parameter>{% endfor %}</invoke>",
    )
    + "</calls>",
}
CONTROL = ["<s>", "<|im_end|>", "<|im_start|>", "[TOOL_CALLS]", "[ID]", "[ARGS]", "<calls>", "</calls>", "<call>"]
CONTROL += ["</call>", "<sep>"]
USER = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


def source(name: str) -> str:
    """The template of the format `name`."""
    return _TURNS.replace("SECTION", SECTIONS[name])


def model(template: str | None) -> tuple[Chat, Tokenizer]:
    """A chat with that template, and its tokenizer."""
    metadata: dict[str, Any] = vocab.bpe("qwen2", CONTROL, USER, eos_token_id="<|im_end|>")
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    tokenizer = Tokenizer(metadata)
    return Chat(metadata, tokenizer), tokenizer
