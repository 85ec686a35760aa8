"""Chat formats for files without a template that works: templates like those in files, so that there is one way to
render. Past thinking is never sent back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinychat.engine import harmony
from tinychat.engine.tokenizer import Tokenizer

THINK = "<think>", "</think>"
GEMMA4_THINK = "<|channel>thought", "<channel|>"

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_THINK_OFF = "{{ '<think>\n\n</think>\n\n' if add_generation_prompt and enable_thinking is false }}"
PRESETS = {
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "qwen2": _CHATML + _THINK_OFF,
    "qwen35": _CHATML + "{{ '<think>\n' if add_generation_prompt and enable_thinking is true }}" + _THINK_OFF,
    "chatml": _CHATML,
    "glm4": (
        "[gMASK]<sop>{% for m in messages %}"
        "<|{{ m.role }}|>{{ '</think>' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"
    ),
    "deepseek-llm": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}"
        "{% else %}{{ 'User: ' if m.role == 'user' }}{{ m.content }}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "youtu": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|' + (m.role | capitalize) + '|>' if m.role != 'system' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<|Assistant|>"
        "{{ '<think>\n' if enable_thinking is true }}{% endif %}" + _THINK_OFF
    ),
    "olmo": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n"
        "{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "kimi-k2": (
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    ),
    "gemma3": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ messages[0].content + '\n\n' if loop.index == 2 and messages[0].role == 'system' }}{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "gemma4": (
        "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% if enable_thinking or system %}<|turn>system\n{{ '<|think|>\n' if enable_thinking }}{{ system | trim }}"
        "<turn|>\n{% endif %}{% for m in messages if m.role != 'system' %}"
        "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n"
        "{{ '<|channel>thought\n<channel|>' if not enable_thinking }}{% endif %}"
    ),
    "gpt-oss": harmony.PRESET,
    "plain": (
        "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}{{ '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}
_BY_PRE = {
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "glm4": "glm4",
    "youtu": "youtu",
    "deepseek-llm": "deepseek-llm",
    "olmo": "olmo",
    "kimi-k2": "kimi-k2",
    "smollm": "chatml",
}


def find_preset(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The name of the preset that suits a file."""
    if (architecture := metadata.get("general.architecture")) in ("gemma3", "gemma4"):
        return str(architecture)
    if harmony.is_harmony(text for text, _ in tokenizer.marks):
        return "gpt-oss"
    pre, thinks = str(metadata.get("tokenizer.ggml.pre")), tokenizer.token_id(THINK[0]) is not None
    if pre in _BY_PRE:
        return _BY_PRE[pre]
    if pre in ("qwen2", "qwen35") and thinks:
        return pre
    return "chatml" if tokenizer.token_id("<|im_start|>") is not None else "plain"
