"""Damaged and hostile model files and chat templates against the engine.

    python -m scripts.fuzz --count 20000 --seed 0 [--arch qwen2]
    python -m scripts.fuzz --templates --count 2000
    python -m scripts.fuzz --compare llama.cpp/models/templates

Each file goes the whole way (header, configuration, plan, tokenizer, template, weights, four tokens) in a process of
its own, forked from one that has everything loaded, with limits on new memory and CPU time. Right is an answer or a
TinychatError in one line; wrong is any other exception, a signal, or a limit that was reached. What fails is kept in
--keep, and number i of seed s is the same file in every run.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support import tiny
from tests.support.templates import TALK, hostile
from tinychat.engine import Engine
from tinychat.engine.config import ARCHITECTURES
from tinychat.engine.sandbox import Generation
from tinychat.engine.template import ChatTemplate
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import GREEDY

MEMORY = 600 << 20  # bytes of new address space for one file
SECONDS = 10  # of CPU time for one file
TEMPLATE_MEMORY = 50 << 20
TEMPLATE_SECONDS = 1


@dataclass(frozen=True)
class Outcome:
    """What became of one case: "answered", "refused" (TinychatError) or "failed"; `text` is its line or traceback."""

    how: str
    text: str = ""
    new_memory: int = 0  # bytes of address space at the most, above what the process began with
    seconds: float = 0.0  # CPU time


def guarded(job: Callable[[], object], memory: int, seconds: int) -> Outcome:
    """Runs `job` in a forked process that may take `memory` more bytes and `seconds` of CPU time."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        code = 1
        try:
            with os.fdopen(theirs, "w") as pipe:
                json.dump(_limited(job, memory, seconds), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        told = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = f"more than {seconds} s" if number in (signal.SIGXCPU, signal.SIGKILL) else signal.Signals(number).name
        return Outcome("failed", why)
    return Outcome(**json.loads(told)) if told else Outcome("failed", "the process said nothing")


def _limited(job: Callable[[], object], memory: int, seconds: int) -> dict[str, Any]:
    gc.freeze()  # a collection would copy every page of the parent, at this process's cost
    before = _memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (before + memory, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # a fork begins at zero
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    how, text = "answered", ""
    try:
        job()
    except TinychatError as e:
        how, text = "refused", str(e)
        if "\n" in text or "\x1b" in text or len(text) > 2000:
            how = "failed"
    except BaseException:
        how, text = "failed", traceback.format_exc()
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "how": how,
        "text": text,
        "new_memory": _memory("VmPeak") - before if how != "failed" else 0,
        "seconds": spent.ru_utime + spent.ru_stime,
    }


def _memory(key: str) -> int:
    """Bytes of a line of /proc/self/status. (VmPeak is inherited: before a fork it must have been VmSize.)"""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(key))


# --- files ---


@dataclass
class Parts:
    """A GGUF file taken apart: metadata as (key, type, value), tensors as [name, dims, type, offset], the data."""

    values: list[tuple[bytes, int, Any]] = field(default_factory=list)
    tensors: list[list[Any]] = field(default_factory=list)
    data: bytes = b""


_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def take_apart(data: bytes) -> Parts:
    """The parts of a sound file."""
    at = 8

    def take(format: str) -> Any:
        nonlocal at
        at += struct.calcsize("<" + format)
        return struct.unpack_from("<" + format, data, at - struct.calcsize("<" + format))[0]

    def text() -> bytes:
        nonlocal at
        n = take("Q")
        at += n
        return data[at - n : at]

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            inner, n = take("I"), take("Q")
            return inner, [value(inner) for _ in range(n)]
        return take(_FORMATS[kind])

    n_tensors, n_values = take("Q"), take("Q")
    parts = Parts()
    for _ in range(n_values):
        key, kind = text(), take("I")
        parts.values.append((key, kind, value(kind)))
    for _ in range(n_tensors):
        name = text()
        dims = [take("Q") for _ in range(take("I"))]
        parts.tensors.append([name, dims, take("I"), take("Q")])
    parts.data = data[-(-at // 32) * 32 :]
    return parts


def put_together(parts: Parts) -> bytes:
    """The file of `parts`, however wrong they are."""

    def pack(format: str, x: Any) -> bytes:
        if format in "fd":
            return struct.pack("<" + format, float(x))
        size = 8 * struct.calcsize("<" + format)
        return struct.pack("<" + format.upper(), int(x) % 2**size)

    def text(x: bytes) -> bytes:
        return pack("Q", len(x)) + x

    def value(kind: int, x: Any) -> bytes:
        if kind == _STRING:
            return text(x)
        if kind == _ARRAY:
            inner, items = x
            return pack("I", inner) + pack("Q", len(items)) + b"".join(value(inner, i) for i in items)
        return pack(_FORMATS.get(kind, "Q"), x)

    out = [b"GGUF", pack("I", 3), pack("Q", len(parts.tensors)), pack("Q", len(parts.values))]
    out += [text(key) + pack("I", kind) + value(kind, x) for key, kind, x in parts.values]
    for name, dims, kind, offset in parts.tensors:
        out.append(text(name) + pack("I", len(dims)) + b"".join(pack("Q", d) for d in dims))
        out.append(pack("I", kind) + pack("Q", offset))
    head = b"".join(out)
    return head + bytes(-len(head) % 32) + parts.data


INTEGERS = (
    *(0, 1, 2, 3, 7, 16, 31, 32, 33, 64, 100, 127, 128, 255, 256, 300, 1000, 4096, 10**6),
    *(2**bits + more for bits in (16, 20, 24, 31, 32, 40, 62, 63, 64) for more in (-1, 0)),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"), 1e4, 1e-45)
TEXTS = (
    *(b"", b"x", b" ", b"a b", b"\x00", b"\xff\xfe", b"\x1b[31m", "é日".encode(), b"a" * 5000),
    *(b"llama", b"linear", b"yarn", b"none", b"gpt2", b"default", b"qwen2", b"<|im_start|>", b"<0x41>", b"<0xZZ>"),
)


def mutated(sound: Parts, raw: bytes, rng: random.Random) -> bytes:
    """One damaged file."""
    if rng.random() < 0.35:
        return _raw(raw, rng)
    parts = Parts(list(sound.values), [[n, list(d), k, o] for n, d, k, o in sound.tensors], sound.data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        rng.choice(_DAMAGES)(parts, rng)
    data = put_together(parts)
    return _raw(data, rng) if rng.random() < 0.05 else data


def _raw(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    header = len(data) if rng.random() < 0.1 else min(len(data), rng.choice((64, 600, 3000, 20000)))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(4, header)
        match rng.randrange(7):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", rng.choice(INTEGERS) % 2**32)
            case 3:
                data[at : at + 8] = struct.pack("<Q", rng.choice(INTEGERS) % 2**64)
            case 4:
                del data[at : at + rng.choice((1, 4, 8, 100))]
            case 5:
                data[at:at] = data[at : at + rng.choice((1, 4, 8, 100, 1000))]
            case 6:
                del data[rng.randrange(at, len(data) + 1) :]
        header = min(header, len(data))
        if header <= 5:
            break
    return bytes(data)


def _number(kind: int, rng: random.Random) -> Any:
    if kind in (6, 12):
        return rng.choice((*FLOATS, rng.uniform(-1e6, 1e6)))
    return rng.choice((*INTEGERS, rng.getrandbits(64), rng.randrange(300)))


def _scalar(parts: Parts, rng: random.Random) -> None:
    """Another value, or another type, for a number or text of the metadata."""
    places = [i for i, (_, kind, _) in enumerate(parts.values) if kind != _ARRAY]
    if not places:
        return
    i = rng.choice(places)
    key, kind, old = parts.values[i]
    if rng.random() < 0.2:
        kind = rng.choice((0, 1, 4, 5, 6, 7, 8, 10, 11, 12))
    elif kind != _STRING and kind not in (6, 7, 12) and rng.random() < 0.5:  # near the right value
        parts.values[i] = key, kind, max(0, int(old) + rng.choice((-2, -1, 1, 2, old, 31)))
        return
    if rng.random() < 0.1:
        n = rng.choice((0, 1, 2, 3, 100))
        inner = rng.choice((4, 5, 6, 7, 8, 9, 12))
        item = (lambda: rng.choice(TEXTS)) if inner == _STRING else (lambda: _number(inner, rng))
        parts.values[i] = key, _ARRAY, (inner, [(4, [1]) if inner == _ARRAY else item() for _ in range(n)])
        return
    parts.values[i] = key, kind, rng.choice(TEXTS) if kind == _STRING else _number(kind, rng)


def _array(parts: Parts, rng: random.Random) -> None:
    """Changes in a vocabulary, its types, scores or merges."""
    places = [i for i, (_, kind, x) in enumerate(parts.values) if kind == _ARRAY and x[1]]
    if not places:
        return
    i = rng.choice(places)
    key, kind, (inner, items) = parts.values[i]
    items = list(items)
    match rng.randrange(7):
        case 0:
            items = items[: rng.randrange(len(items))]
        case 1:
            items += [rng.choice(items)] * rng.choice((1, 10, 20000))
        case 2:
            rng.shuffle(items)
        case 3:
            inner = rng.choice((0, 4, 5, 6, 8, 12, 99))
            items = [rng.choice(TEXTS) if inner == _STRING else _number(inner, rng) for _ in items]
        case _:
            for _ in range(rng.choice((1, 5, 50))):
                items[rng.randrange(len(items))] = (
                    rng.choice((*TEXTS, b"z" * rng.choice((200, 3000, 40_000, 2_000_000))))
                    if inner == _STRING
                    else rng.choice((_number(inner, rng), rng.randrange(8)))
                    if inner != _ARRAY
                    else (4, [1])
                )
    parts.values[i] = key, kind, (inner, items)


def _key(parts: Parts, rng: random.Random) -> None:
    """A key gone, twice, renamed, or new."""
    if not parts.values:
        return
    i = rng.randrange(len(parts.values))
    key, kind, x = parts.values[i]
    match rng.randrange(4):
        case 0:
            del parts.values[i]
        case 1:
            parts.values.append((key, kind, x))
        case 2:
            parts.values[i] = rng.choice((b"", b"x" * 70000, key + b"x", b"split.count", b"general.alignment")), kind, x
        case 3:
            name = rng.choice((b"split.count", b"split.tensors.count", b"general.alignment", b"general.name"))
            parts.values.append((name, 4, rng.choice(INTEGERS)))


def _tensor(parts: Parts, rng: random.Random) -> None:
    """A tensor gone, twice, renamed, of another type or elsewhere."""
    if not parts.tensors:
        return
    i = rng.randrange(len(parts.tensors))
    t = parts.tensors[i]
    match rng.randrange(6):
        case 0:
            del parts.tensors[i]
        case 1:
            parts.tensors.append(list(t))
        case 2:
            t[0] = rng.choice((b"", b"y" * 5000, t[0] + b"x", rng.choice(parts.tensors)[0], b"rope_freqs.weight"))
        case 3:
            t[2] = rng.choice((*range(42), 1 << 31))
        case 4:
            t[3] = rng.choice((*INTEGERS, t[3] + 1, t[3] + 32))
        case 5:
            parts.tensors[:] = parts.tensors[: rng.randrange(len(parts.tensors) + 1)]


def _dims(parts: Parts, rng: random.Random) -> None:
    if not parts.tensors:
        return
    t = rng.choice(parts.tensors)
    match rng.randrange(5):
        case 0:
            t[1] = []
        case 1:
            t[1].reverse()
        case 2:
            t[1] += [1] * rng.randrange(1, 7)
        case _ if t[1]:
            t[1][rng.randrange(len(t[1]))] = rng.choice((*INTEGERS, rng.randrange(300)))


def _data(parts: Parts, rng: random.Random) -> None:
    """Weights that are no numbers."""
    data = bytearray(parts.data)
    for _ in range(rng.choice((1, 10, 1000))):
        at = rng.randrange(max(len(data) - 3, 1))
        data[at : at + 4] = rng.choice((b"\xff" * 4, struct.pack("<f", rng.choice(FLOATS)), rng.randbytes(4)))
    parts.data = bytes(data)


def _template(parts: Parts, rng: random.Random) -> None:
    parts.values.append((b"tokenizer.chat_template", _STRING, hostile(rng).encode()))


_DAMAGES = (_scalar, _scalar, _scalar, _scalar, _array, _array, _key, _tensor, _tensor, _dims, _data, _template)


def the_whole_way(path: Path) -> None:
    """Everything that a chat does with a file, up to the first tokens; some of them are drafts that are verified."""
    engine = Engine.load(path, device="cpu", threads=1, speculate=2)
    engine.tokenizer.encode_prompt("Hello <|im_start|> world 123 é日")
    ids = engine.chat.render([{"role": "user", "content": "Hi <|im_end|> there"}])
    for token in engine.generate(ids, GREEDY, 4):
        assert isinstance(token.text, str)
    engine.close()


# Per architecture the forms and quant types that differ most in what they read.
SEEDS: dict[str, tuple[tuple[str, str], ...]] = {
    "llama": (("llama", "Q4_K"), ("llama_rope_freqs", "Q8_0"), ("llama_fused_qkv", "F16"), ("llama", "IQ_MIX")),
    "qwen2": (("qwen2", "Q4_0"), ("qwen2_yarn_keys", "Q5_1")),
    "qwen3": (("qwen3", "Q6_K"),),
    "qwen3moe": (("qwen3moe", "Q4_0"),),
    "olmoe": (("olmoe", "IQ4_NL"),),
    "olmo2": (("olmo2_windows", "Q8_0"),),
    "granite": (("granite", "Q5_K"), ("granite_experts", "Q4_0")),
    "glm4moe": (("glm4moe", "Q4_K"), ("glm4moe_qk_norm", "Q8_0")),
    "gpt-oss": (("gpt-oss", "MXFP4"),),
    "gemma3": (("gemma3_keys", "Q4_0"),),
    "gemma4": (("gemma4", "Q8_0"), ("gemma4_experts", "Q4_0"), ("gemma4_layer_embeddings", "Q5_0")),
    "qwen35": (("qwen35", "Q8_0"),),
    "qwen35moe": (("qwen35moe", "Q4_0"),),
    "qwen3next": (("qwen3next", "Q4_K"),),
    "kimi-linear": (("kimi-linear", "Q4_0"),),
    "bailingmoe3": (("bailingmoe3", "Q8_0"),),
    "lfm2": (("lfm2", "Q4_0"),),
    "lfm2moe": (("lfm2moe", "Q8_0"),),
    "deepseek2": (
        ("deepseek2_glm", "Q4_K_M"),
        ("deepseek2_lite_legacy", "Q8_0"),
        ("deepseek2_groups", "Q4_0"),
        ("deepseek2_nextn", "F32"),
        ("deepseek2_fused_experts", "Q5_0"),
    ),
}


MTP_BLOCK = "blk.2."  # of deepseek2_nextn, whose side file has its tensors alone


def files(count: int, seed: int, folder: Path, arch: str | None = None) -> Iterator[tuple[str, bytes, Outcome]]:
    """(seed file, damaged file, outcome) of `count` cases, evenly over the architectures."""
    assert set(ARCHITECTURES) >= set(SEEDS)
    sound: list[tuple[str, bytes, Parts, Path, Path]] = []  # the paths: where the damage is written, what is loaded

    def add(name: str, seed: Path, damaged: Path, loaded: Path) -> None:
        raw = seed.read_bytes()
        sound.append((name, raw, take_apart(raw), damaged, loaded))
        assert put_together(sound[-1][2])[: len(raw)] == raw

    path = folder / "damaged.gguf"
    for arch_name in (arch,) if arch else ARCHITECTURES:
        for variant, quant in SEEDS.get(arch_name, ((arch_name, "F32"),)):
            seed_path = tiny.write(folder / "seed.gguf", variant, quant)
            the_whole_way(seed_path)  # right before, and all that is made once is made now
            add(f"{variant} {quant}", seed_path, path, path)
    if arch in (None, "deepseek2"):
        trunk = tiny.write(folder / "trunk.gguf", "deepseek2_nextn", only=lambda name: not name.startswith(MTP_BLOCK))
        side = tiny.write(folder / "mtp-trunk.gguf", "deepseek2_nextn", only=lambda name: name.startswith(MTP_BLOCK))
        the_whole_way(trunk)
        add("side file of deepseek2_nextn", side, side, trunk)
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        name, raw, parts, damaged, loaded = sound[i % len(sound)]
        data = mutated(parts, raw, rng)
        damaged.write_bytes(data)
        yield name, data, guarded(partial(the_whole_way, loaded), MEMORY, SECONDS)


# --- templates ---


def templates(count: int, seed: int) -> Iterator[tuple[str, str, Outcome]]:
    """("template", source, outcome) of `count` hostile templates."""
    ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}").render(messages=TALK)
    for i in range(count):
        source = hostile(random.Random(f"{seed} {i}"))

        def render(source: str = source) -> None:
            ChatTemplate(source).render(messages=TALK, tools=None, add_generation_prompt=True, bos_token="<s>")

        yield "template", source, guarded(render, TEMPLATE_MEMORY, TEMPLATE_SECONDS)


def compare(folder: Path) -> Counter[str]:
    """Renders every template in `folder` with ours and as HF transformers does; prints where they differ."""
    counts = Counter[str]()
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text()
        for name, variables in CONVERSATIONS.items():
            want = _rendered(plain, source, variables)
            got = _rendered(ChatTemplate, source, variables)
            how = "different" if want != got else "both refuse" if want is None else "equal"
            counts[how] += 1
            if how == "different":
                at = next((i for i, (a, b) in enumerate(zip(want or "", got or "")) if a != b), 0)
                says = [repr(text[at : at + 60]) if text is not None else "refused" for text in (want, got)]
                print(f"{path.name} ({name}): {says[0]} is here {says[1]}")
    return counts


def _rendered(make: Callable[[str], Any], source: str, variables: dict[str, Any]) -> str | None:
    try:
        return make(source).render(**copy.deepcopy(variables))
    except Exception:
        return None


def plain(source: str) -> Template:
    """`source` in the environment of HF transformers (utils/chat_template_utils.py)."""

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": refuse, "strftime_now": lambda pattern: datetime.now().strftime(pattern)}
    return env.from_string(source)


_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln <b>"}}}
_ASK = {"role": "user", "content": "What is <b>it</b> like?"}
_TOLD = {"role": "tool", "content": '{"t": 3}', "tool_call_id": "call00001", "name": "get_weather"}
_CALLED = [_ASK, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _TOLD]
_ANSWERED = [*_CALLED, {"role": "assistant", "content": "3 degrees"}, _ASK]
_BASE: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, "tools": None}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "a question": _BASE | {"messages": [_ASK]},
    "a talk": _BASE | {"messages": TALK},
    "no generation": _BASE | {"messages": TALK[:3], "add_generation_prompt": False},
    "thinking": _BASE | {"messages": TALK[1:], "enable_thinking": True, "reasoning_effort": "high"},
    "no thinking": _BASE | {"messages": TALK[1:], "enable_thinking": False},
    "reasoning": _BASE | {"messages": [_ASK, {"role": "assistant", "content": "A", "reasoning_content": "R"}, _ASK]},
    "tools": _BASE | {"messages": [_ASK], "tools": [_TOOL]},
    "a tool called": _BASE | {"messages": _CALLED, "tools": [_TOOL]},
    "a tool answered": _BASE | {"messages": _ANSWERED, "tools": [_TOOL, _TOOL]},
    "parts": _BASE | {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arch", choices=ARCHITECTURES, help="files of one architecture only")
    parser.add_argument("--templates", action="store_true", help="chat templates instead of files")
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir()) / "tinychat-fuzz", help="for what fails"
    )
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="its *.jinja, as plain Jinja renders them")
    options = parser.parse_args()
    if options.compare:
        found = compare(options.compare)
        print(", ".join(f"{n:,} {how}" for how, n in sorted(found.items())))
        return int(found["different"] > 0)
    counts, worst, longest = Counter[str](), 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        cases: Iterator[tuple[str, Any, Outcome]] = (
            templates(options.count, options.seed)
            if options.templates
            else files(options.count, options.seed, Path(folder), options.arch)
        )
        for i, (name, case, outcome) in enumerate(cases):
            counts[outcome.how] += 1
            worst, longest = max(worst, outcome.new_memory), max(longest, outcome.seconds)
            if outcome.how == "failed":
                options.keep.mkdir(parents=True, exist_ok=True)
                kept = options.keep / f"{options.seed}-{i}.{'jinja' if options.templates else 'gguf'}"
                kept.write_bytes(case.encode() if isinstance(case, str) else case)
                print(f"{kept} ({name}): {outcome.text.strip()}", flush=True)
            if (i + 1) % 1000 == 0:
                print(f"{i + 1:,}: {dict(counts)}", flush=True)
    print(
        f"{counts.total():,} cases: {counts['answered']:,} answered, {counts['refused']:,} refused in one line, "
        f"{counts['failed']:,} failed; at most {worst / 1e6:.0f} MB of new memory and {longest:.1f} s"
    )
    return int(counts["failed"] > 0)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
if __name__ == "__main__":
    sys.exit(main())
