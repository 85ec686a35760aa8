"""A transformer forward in NumPy float64, straight from the formulas: what every executor is measured against.

It shares no code with the engine: files are read by `gguf.GGUFReader`, weights by `gguf.quants.dequantize`, and latent
attention is computed per head without absorption. Where papers and files leave a choice, llama.cpp's is taken
(src/llama-context.cpp and src/models/*.cpp; `# llama.cpp:` marks the lines).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

Array = np.ndarray  # float64
DELTA_RULE = ("qwen3next", "qwen35", "qwen35moe")


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu(gate: Array, up: Array) -> Array:
    return gate * sigmoid(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    return gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """Of gpt-oss."""
    gate = np.minimum(gate, 7)
    return gate * sigmoid(1.702 * gate) * (np.clip(up, -7, 7) + 1)


def topk(scores: Array, k: int) -> Array:
    """Indices of the k largest, the lower index first among equals."""
    return np.argsort(-scores, kind="stable")[:k]


@dataclass
class Model:
    """A GGUF (all parts of a split) as float64 arrays by tensor name, and its metadata without the architecture's
    prefix."""

    path: Path
    routing: list[tuple[Array, Array]] = field(
        default_factory=list
    )  # (experts, selection scores) of each MoE layer and token

    def __post_init__(self) -> None:
        split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", str(self.path))
        paths = (
            [f"{split[1]}-{i + 1:05d}-of-{split[2]}.gguf" for i in range(int(split[2]))] if split else [str(self.path)]
        )
        readers = [GGUFReader(p) for p in paths]
        self.metadata = {
            name: f.contents() for name, f in readers[0].fields.items() if not name.startswith("tokenizer")
        }
        self.arch: str = self.metadata["general.architecture"]
        self.tensors = {t.name: t for r in readers for t in r.tensors}
        self._cache: dict[str, Array] = {}
        self.shared: dict[int, tuple[Array, Array]] = {}  # keys and values of a layer's last run

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", default)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Array:
        """The tensor as numpy shapes it: matrices (rows, row length), experts and heads in front."""
        if name not in self._cache:
            t = self.tensors[name]
            self._cache[name] = dequantize(t.data, t.tensor_type).astype(np.float64).reshape(t.shape[::-1])
        return self._cache[name]

    # --- metadata ---

    @cached_property
    def layers(self) -> int:
        return int(self.get("block_count") - self.get("nextn_predict_layers", 0))

    @cached_property
    def eps(self) -> float:
        return float(self.get("attention.layer_norm_rms_epsilon"))

    @property
    def mla(self) -> bool:
        return self.arch in ("deepseek2", "mistral4", "kimi-linear", "bailingmoe3")

    def window(self, layer: int) -> int:
        """Rows that the layer sees; 0: all."""
        period = {"olmo2": 4, "gpt-oss": 2, "gemma3": 6, "gemma4": 6, "lfm2": 1 << 10}.get(self.arch, 0)
        rows = self.get("attention.sliding_window", 0) if period else 0
        pattern = self.get("attention.sliding_window_pattern", period)
        if isinstance(pattern, list):
            return rows if pattern[layer] else 0
        return rows if rows and layer % pattern < pattern - 1 else 0

    # --- rotary embedding ---

    def turns(self, layer: int) -> tuple[Array, float]:
        """(angle per position of each pair, factor on cos and sin) of a layer."""
        freq, magnitude, _ = self.yarn
        if (self.arch == "smollm3" and layer % 4 == 3) or self.arch == "kimi-linear":
            return 0 * freq, 1.0
        if self.window(layer) and self.arch != "gpt-oss":  # llama.cpp: not scaled
            base = self.get("rope.freq_base_swa", 10000.0 if self.arch == "gemma3" else self.get("rope.freq_base"))
            pairs = self.get("rope.dimension_count_swa", 2 * len(freq)) // 2
            return 1 / base ** (np.arange(pairs, dtype=np.float64) / pairs), 1.0
        return freq, magnitude

    @cached_property
    def yarn(self) -> tuple[Array, float, float]:
        """(angle per position of each pair, factor on cos and sin, factor on the attention scale of latent
        attention)."""
        width = self.get("attention.key_length_mla") or self.get("attention.key_length")
        width = width or self.get("embedding_length") // self.get("attention.head_count")
        dims, base = self.get("rope.dimension_count", width), self.get("rope.freq_base", 10000.0)
        freq = 1 / base ** (2 * np.arange(dims // 2, dtype=np.float64) / dims)
        if "rope_freqs.weight" in self:
            freq = freq / self["rope_freqs.weight"]
        factor = float(self.get("rope.scaling.factor", 1.0))
        ln = np.log(factor)
        own = float(self.get("rope.scaling.attn_factor", 1.0))
        magnitude = attention = 1.0
        multiplier = self.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        if self.get("rope.scaling.type", "linear") == "yarn":
            context = self.get("rope.scaling.original_context_length")
            turns = context * base ** (-2 * np.arange(dims // 2) / dims) / (2 * np.pi)  # in the original context
            pair = lambda beta: dims * np.log(context / (2 * np.pi * beta)) / (2 * np.log(base))  # noqa: E731
            assert turns[0] > 1
            first, last = max(0, np.floor(pair(32))), min(dims - 1, np.ceil(pair(1)))
            slow = np.clip(
                (np.arange(dims // 2) - first) / (last - first), 0, 1
            )  # 0: turns often, keep; 1: interpolate
            freq = freq * (1 - slow) + freq / factor * slow
            if not self.mla:
                magnitude = 1 + 0.1 * ln
            elif multiplier:
                attention = (1 + 0.1 * multiplier * ln) ** 2  # llama.cpp: cos and sin stay unscaled
            else:
                magnitude, attention = 1 + 0.1 * ln, (1 + 0.1 * ln) ** 2  # llama.cpp: both
        else:
            freq = freq / factor
            if self.mla:
                attention = (1 + 0.1 * ln) ** 2  # llama.cpp: also when the scaling is linear
        return freq, magnitude * own, attention * own**2

    def rotate(self, x: Array, positions: Array, layer: int) -> Array:
        """x (tokens, heads, width) with its first values rotated. Pairs are (2i, 2i+1) in the files named below, (i, i
        + dims/2) elsewhere."""
        freq, magnitude = self.turns(layer)
        turn = np.exp(1j * positions[:, None, None] * freq) * magnitude
        half = len(freq)
        if x.shape[-1] > 2 * half:
            return np.concatenate([self.rotate(x[..., : 2 * half], positions, layer), x[..., 2 * half :]], -1)
        out = np.empty_like(x)
        if self.mla or self.arch in ("llama", "granite", "smollm3", "glm4"):
            z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            out[..., 0::2], out[..., 1::2] = z.real, z.imag
        else:
            z = (x[..., :half] + 1j * x[..., half:]) * turn
            out[..., :half], out[..., half:] = z.real, z.imag
        return out

    # --- layers ---

    def linear(self, x: Array, name: str) -> Array:
        y = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y

    def layer_inputs(self, ids: Sequence[int], x: Array) -> Array:
        """The per-layer embeddings (tokens, layers, width)."""
        width = self.get("embedding_length_per_layer_input")
        rows = self["per_layer_token_embd.weight"][list(ids)].reshape(len(ids), -1, width) * np.sqrt(width)
        projected = self.linear(x, "per_layer_model_proj").reshape(rows.shape) / np.sqrt(x.shape[-1])
        return (rms_norm(projected, self["per_layer_proj_norm.weight"], self.eps) + rows) / np.sqrt(2)

    def cache_of(self, layer: int) -> int:
        """The layer whose keys and values this one reads."""
        own = self.layers - self.get("attention.shared_kv_layers", 0)
        alike = (i for i in range(own) if bool(self.window(i)) == bool(self.window(layer)))
        return max(alike) if own <= layer < self.layers else layer

    def attend(self, q: Array, k: Array, v: Array, scale: float, window: int = 0, sinks: str = "") -> Array:
        """Causal attention: q (tokens, heads, d), k and v (tokens, kv heads, d); heads of a group are neighbours.
        `sinks`: a tensor with one more score of each head, where there is one."""
        n, heads, groups = len(q), q.shape[1], q.shape[1] // k.shape[1]
        unseen = np.triu(np.ones((n, n), bool), 1)
        if window:
            unseen |= np.tril(np.ones((n, n), bool), -window)
        out = np.empty((n, heads, v.shape[-1]))
        for h in range(heads):
            scores = q[:, h] @ k[:, h // groups].T * scale
            scores = np.where(unseen, -np.inf, scores)
            if sinks in self:
                scores = np.concatenate([scores, np.full((n, 1), self[sinks][h])], -1)
            out[:, h] = softmax(scores)[:, :n] @ v[:, h // groups]
        return out.reshape(n, -1)

    def attention(self, x: Array, layer: int) -> Array:
        b = f"blk.{layer}."
        n, heads = len(x), self.get("attention.head_count")
        kv_heads, gated = self.get("attention.head_count_kv", heads), self.arch in DELTA_RULE
        width = self.get("attention.key_length", self.get("embedding_length") // heads)
        if isinstance(kv_heads, list):
            kv_heads = kv_heads[layer]
        if self.window(layer):
            width = self.get("attention.key_length_swa", width)
        if b + "attn_qkv.weight" in self:
            at = np.cumsum([heads * width, kv_heads * width])
            q, k, v = np.split(x @ self[b + "attn_qkv.weight"].T, at, -1)
            if b + "attn_q.bias" in self:
                q, k, v = q + self[b + "attn_q.bias"], k + self[b + "attn_k.bias"], v + self[b + "attn_v.bias"]
        elif self.cache_of(layer) != layer:
            q = rms_norm(
                self.linear(x, b + "attn_q").reshape(n, heads, width), self[b + "attn_q_norm.weight"], self.eps
            )
            keys, values = self.shared[self.cache_of(layer)]
            out = self.attend(self.rotate(q, np.arange(n), layer), keys, values, 1, self.window(layer))
            return self.linear(out, b + "attn_output")
        else:
            q, k = self.linear(x, b + "attn_q"), self.linear(x, b + "attn_k")
            v = self.linear(x, b + "attn_v") if b + "attn_v.weight" in self else k
        if gated:  # per head: the query, then the gate
            q, gate = np.split(q.reshape(n, heads, 2 * width), 2, -1)
        if self.arch in ("olmoe", "olmo2"):
            q, k = (
                rms_norm(q, self[b + "attn_q_norm.weight"], self.eps),
                rms_norm(k, self[b + "attn_k_norm.weight"], self.eps),
            )
        q, k, v = q.reshape(n, heads, width), k.reshape(n, kv_heads, width), v.reshape(n, kv_heads, -1)
        if self.arch == "gemma4":
            v = rms_norm(v, np.ones(width), self.eps)
        if (
            gated
            or self.arch in ("qwen3", "qwen3moe", "gemma3", "gemma4", "lfm2", "lfm2moe")
            or (self.arch == "glm4moe" and b + "attn_q_norm.weight" in self)
        ):
            q, k = (
                rms_norm(q, self[b + "attn_q_norm.weight"], self.eps),
                rms_norm(k, self[b + "attn_k_norm.weight"], self.eps),
            )
        at = np.arange(n)
        q, k = self.rotate(q, at, layer), self.rotate(k, at, layer)
        self.shared[layer] = k, v
        scale = self.get("attention.scale", 0) or (1 if self.arch == "gemma4" else width**-0.5)
        out = self.attend(q, k, v, scale, self.window(layer), b + "attn_sinks.weight")
        if gated:
            out = out * sigmoid(gate.reshape(n, -1))
        return self.linear(out, b + "attn_output")

    def delta_rule(self, x: Array, layer: int) -> Array:
        """Gated delta rule (arXiv 2412.06464, formula 10), token by token."""
        b, n = f"blk.{layer}.", len(x)
        key_heads, heads, width = (self.get(f"ssm.{k}") for k in ("group_count", "time_step_rank", "state_size"))
        inputs = x @ self[b + "attn_qkv.weight"].T
        conv = self[b + "ssm_conv1d.weight"]
        taps = conv.shape[1]
        before = np.concatenate([np.zeros((taps - 1, len(conv))), inputs])
        mixed = sum(before[j : j + n] * conv[:, j] for j in range(taps))
        mixed = mixed * sigmoid(mixed)
        q, k, v = np.split(mixed, [key_heads * width, 2 * key_heads * width], -1)
        q, k = (t.reshape(n, key_heads, width) for t in (q, k))
        q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + self.eps) for t in (q, k))
        share = np.repeat if self.arch == "qwen3next" else lambda t, times, axis: np.tile(t, (1, times, 1))
        q, k = (share(t, heads // key_heads, 1) for t in (q, k))
        if b + "ssm_ba.weight" in self:
            both = (x @ self[b + "ssm_ba.weight"].T).reshape(n, key_heads, 2, -1)
            beta, alpha = both[:, :, 0].reshape(n, heads), both[:, :, 1].reshape(n, heads)
        else:
            beta, alpha = (x @ self[f"{b}ssm_{name}.weight"].T for name in ("beta", "alpha"))
        decay = np.exp(self[b + "ssm_a"] * np.log1p(np.exp(alpha + self[b + "ssm_dt.bias"])))
        state, out = np.zeros((heads, width, width)), np.empty((n, heads, width))
        for t in range(n):
            for h in range(heads):
                s = state[h] * decay[t, h]
                s += np.outer(k[t, h], sigmoid(beta[t, h]) * (v[t].reshape(heads, width)[h] - k[t, h] @ s))
                state[h], out[t, h] = s, q[t, h] @ s / np.sqrt(width)
        gate = x @ self[b + "attn_gate.weight"].T
        out = rms_norm(out, self[b + "ssm_norm.weight"], self.eps).reshape(n, -1)
        return self.linear(out * gate * sigmoid(gate), b + "ssm_out")

    def kda(self, x: Array, b: str) -> Array:
        """Kimi Delta Attention (arXiv 2510.26692), token by token."""
        n, heads, width = len(x), self.get("attention.head_count"), self.get("kda.head_dim")
        mixed = []
        for name in "qkv":
            inputs, conv = x @ self[f"{b}attn_{name}.weight"].T, self[f"{b}ssm_conv1d_{name}.weight"][0, :, 0]
            before = np.concatenate([np.zeros((conv.shape[1] - 1, len(conv))), inputs])
            y = sum(before[j : j + n] * conv[:, j] for j in range(conv.shape[1]))
            mixed.append((y * sigmoid(y)).reshape(n, heads, width))
        q, k, v = mixed
        q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + self.eps) for t in (q, k))
        f, g = (x @ self[f"{b}ssm_{name}_a.weight"].T for name in "fg")
        if b + "ssm_f_b.weight" in self:
            f, g = (y @ self[f"{b}ssm_{name}_b.weight"].T for name, y in (("f", f), ("g", g)))
        f, rate = (f + self[b + "ssm_dt.bias"]).reshape(n, heads, width), self[b + "ssm_a"].reshape(-1, 1)
        bound = self.get("kda.gate_lower_bound")
        decay = np.exp(rate * np.log1p(np.exp(f)) if bound is None else bound * sigmoid(rate * f))
        rate = sigmoid(x @ self[b + "ssm_beta.weight"].T)
        state, out = np.zeros((heads, width, width)), np.empty((n, heads, width))
        for t in range(n):
            for h in range(heads):
                s = decay[t, h][:, None] * state[h]
                s += np.outer(k[t, h], rate[t, h] * (v[t, h] - k[t, h] @ s))
                state[h], out[t, h] = s, q[t, h] @ s / np.sqrt(width)
        out = rms_norm(out, self[b + "ssm_norm.weight"], self.eps).reshape(n, -1)
        return self.linear(out * sigmoid(g), b + "attn_output")

    def short_convolution(self, x: Array, b: str) -> Array:
        gate, out, z = np.split(x @ self[b + "in_proj.weight"].T, 3, -1)
        conv = self[b + "conv.weight"]
        before = np.concatenate([np.zeros((conv.shape[1] - 1, len(conv))), gate * z])
        mixed = sum(before[j : j + len(x)] * conv[:, j] for j in range(conv.shape[1]))
        return self.linear(out * mixed, b + "out_proj")

    def latent_attention(self, x: Array, layer: int) -> Array:
        b = f"blk.{layer}."
        n, heads, rank, rope = (
            len(x),
            *map(self.get, ("attention.head_count", "attention.kv_lora_rank", "rope.dimension_count")),
        )
        new = self.get("attention.key_length_mla") is not None
        width = self.get("attention.key_length_mla" if new else "attention.key_length")
        v_width = self.get("attention.value_length_mla" if new else "attention.value_length")
        nope = width - rope
        if b + "attn_q.weight" in self:
            q = self.linear(x, b + "attn_q")
        else:
            q = self.linear(
                rms_norm(self.linear(x, b + "attn_q_a"), self[b + "attn_q_a_norm.weight"], self.eps), b + "attn_q_b"
            )
        q = q.reshape(n, heads, width)
        latent, k_rope = np.split(self.linear(x, b + "attn_kv_a_mqa"), [rank], -1)
        latent = rms_norm(latent, self[b + "attn_kv_a_norm.weight"], self.eps)
        if new:
            k_nope = np.einsum("tr,hrd->thd", latent, self[b + "attn_k_b.weight"])
            v = np.einsum("tr,hdr->thd", latent, self[b + "attn_v_b.weight"])
        else:
            k_nope, v = np.split(self.linear(latent, b + "attn_kv_b").reshape(n, heads, nope + v_width), [nope], -1)
        at = np.arange(n)
        q = np.concatenate([q[..., :nope], self.rotate(q[..., nope:], at, layer)], -1)
        k_rope = np.broadcast_to(self.rotate(k_rope[:, None], at, layer), (n, heads, rope))
        if scale := self.get("attention.temperature_scale", 0):
            q *= 1 + scale * np.log(1 + at // self.get("attention.temperature_length"))[:, None, None]
        out = self.attend(q, np.concatenate([k_nope, k_rope], -1), v, width**-0.5 * self.yarn[2])
        if b + "attn_gate.weight" in self:
            out = (out.reshape(n, heads, -1) * sigmoid(self.linear(x, b + "attn_gate"))[..., None]).reshape(n, -1)
        return self.linear(out, b + "attn_output")

    def gated(self, gate: Array, up: Array) -> Array:
        return {"gemma3": geglu, "gemma4": geglu, "gpt-oss": clamped_swiglu}.get(self.arch, swiglu)(gate, up)

    def feed_forward(self, x: Array, b: str) -> Array:
        up = self.linear(x, b + "ffn_up")
        gate, up = (self.linear(x, b + "ffn_gate"), up) if b + "ffn_gate.weight" in self else np.split(up, 2, -1)
        return self.linear(self.gated(gate, up), b + "ffn_down")

    def route(self, x: Array, b: str) -> tuple[Array, Array]:
        """(experts, weights) of one token."""
        deepseek = self.mla or self.arch == "glm4moe"
        if self.arch == "gemma4":  # the router has its own norm
            x = rms_norm(x, self[b + "ffn_gate_inp.scale"], self.eps) / np.sqrt(len(x))
        logits = self.linear(x, b + "ffn_gate_inp")
        kind = 3 if self.arch == "gpt-oss" else 1
        if deepseek or self.arch == "lfm2moe":
            kind = self.get("expert_gating_func", 0)
        if self.arch == "glm4moe":
            kind = kind or 2
        if kind == 0:  # llama.cpp: files from before the key
            kind = 2 if self.layers in (47, 48) and self["token_embd.weight"].shape[0] == 154880 else 1
        gate = {1: softmax, 2: sigmoid, 3: lambda z: z, 4: lambda z: np.sqrt(np.logaddexp(0, z))}[kind]
        p = gate(logits)
        score = p + self[b + "exp_probs_b.bias"] if b + "exp_probs_b.bias" in self else p
        groups = self.get("expert_group_count", 1)
        if groups > 1:
            by_group = score.reshape(groups, -1)
            best = topk(np.sort(by_group, -1)[:, -2:].sum(-1), self.get("expert_group_used_count"))
            masked = np.full_like(by_group, -np.inf)
            masked[best] = by_group[best]
            score = masked.reshape(-1)
        chosen = topk(score, self.get("expert_used_count"))
        weights = softmax(p[chosen]) if kind == 3 else p[chosen]
        if (
            self.get("expert_weights_norm", self.arch == "kimi-linear")
            if deepseek
            else self.arch not in ("olmoe", "gpt-oss")
        ):
            weights = weights / max(weights.sum(), 2.0**-14)
        scale = self.get("expert_weights_scale", 0.0) if deepseek else 0.0
        self.routing.append((chosen, score))
        if b + "ffn_down_exps.scale" in self:
            weights = weights * self[b + "ffn_down_exps.scale"][chosen]
        return chosen, weights * scale if scale else weights

    def experts(self, x: Array, b: str) -> Array:
        if self.arch == "gemma4":
            dense = self.normed(self.feed_forward(self.normed(x, b + "ffn_norm"), b), b + "post_ffw_norm_1")
        routed, x = x, self.normed(x, b + "pre_ffw_norm_2")
        out = np.zeros_like(x)
        for t, xt in enumerate(x):
            for e, w in zip(*self.route(routed[t], b)):
                if b + "ffn_gate_up_exps.weight" in self:
                    gate, up = np.split(self[b + "ffn_gate_up_exps.weight"][e] @ xt, 2)
                else:
                    gate, up = self[b + "ffn_gate_exps.weight"][e] @ xt, self[b + "ffn_up_exps.weight"][e] @ xt
                down_bias: Array | float = 0.0
                if b + "ffn_gate_exps.bias" in self:
                    gate, up = gate + self[b + "ffn_gate_exps.bias"][e], up + self[b + "ffn_up_exps.bias"][e]
                    down_bias = self[b + "ffn_down_exps.bias"][e]
                out[t] += w * (self[b + "ffn_down_exps.weight"][e] @ self.gated(gate, up) + down_bias)
        if b + "ffn_gate_shexp.weight" in self:
            gate, up = self.linear(x, b + "ffn_gate_shexp"), self.linear(x, b + "ffn_up_shexp")
            shared = self.linear(swiglu(gate, up), b + "ffn_down_shexp")
            if b + "ffn_gate_inp_shexp.weight" in self:
                shared = shared * sigmoid(x @ self[b + "ffn_gate_inp_shexp.weight"])[:, None]
            out += shared
        if self.arch == "gemma4":
            out = dense + self.normed(out, b + "post_ffw_norm_2")
        return out

    def normed(self, x: Array, name: str) -> Array:
        """RMSNorm with the gain `name`; x where the file has none."""
        return rms_norm(x, self[f"{name}.weight"], self.eps) if f"{name}.weight" in self else x

    def layer(self, x: Array, i: int, of_layer: Array | None = None) -> Array:
        part = self.get("residual_scale", 0) or 1
        post = self.arch in ("olmo2", "glm4", "gemma3", "gemma4")
        b = f"blk.{i}."
        h = self.normed(x, b + "attn_norm")
        if b + "ssm_out.weight" in self:
            h = self.delta_rule(h, i)
        elif b + "ssm_f_a.weight" in self:
            h = self.kda(h, b)
        elif b + "shortconv.conv.weight" in self:
            h = self.short_convolution(h, b + "shortconv.")
        else:
            h = self.latent_attention(h, i) if self.mla else self.attention(h, i)
        x = x + part * (self.normed(h, b + "post_attention_norm") if post else h)
        routed = b + "ffn_gate_inp.weight" in self
        after = self.arch in ("glm4moe", "gpt-oss") or self.arch in DELTA_RULE
        name = b + ("post_attention_norm" if after else "ffn_norm")
        h = x if routed and self.arch == "gemma4" else self.normed(x, name)
        h = self.experts(h, b) if routed else self.feed_forward(h, b)
        x = x + part * (self.normed(h, b + "post_ffw_norm") if post else h)
        if of_layer is not None:
            h = self.linear(self.gated(self.linear(x, b + "inp_gate"), of_layer), b + "proj")
            x = x + self.normed(h, b + "post_norm")
        return x * self[b + "layer_output_scale.weight"] if b + "layer_output_scale.weight" in self else x

    def hidden(self, ids: Sequence[int]) -> Array:
        """The normed output of the last layer."""
        x = self["token_embd.weight"][list(ids)] * (self.get("embedding_scale", 0) or 1)  # llama.cpp: 0 scales nothing
        if self.arch in ("gemma3", "gemma4"):
            x = x * np.sqrt(x.shape[-1])
        inputs = self.layer_inputs(ids, x) if "per_layer_token_embd.weight" in self else None
        for i in range(self.layers):
            x = self.layer(x, i, inputs[:, i] if inputs is not None else None)
        last = "output_norm" if "output_norm.weight" in self else "token_embd_norm"
        return rms_norm(x, self[f"{last}.weight"], self.eps)

    def head(self, x: Array, name: str = "") -> Array:
        if name not in self:
            name = "output.weight" if "output.weight" in self else "token_embd.weight"
        logits = x @ self[name].T / self.get("logit_scale", 1)
        cap = self.get("final_logit_softcapping", 0)
        return cap * np.tanh(logits / cap) if cap else logits

    def __call__(self, ids: Sequence[int]) -> Array:
        return self.head(self.hidden(ids))

    def mtp(self, ids: Sequence[int]) -> Array:
        """The logits of the block behind the last layer. llama.cpp: src/models/deepseek2.cpp, graph_mtp;
        common/speculative.cpp pairs each token with the output in front of it, the first with zeros."""
        b = f"blk.{self.layers}.nextn."
        h = np.roll(self.hidden(ids), 1, axis=0)
        h[0] = 0
        own = {n: name for n in ("embed_tokens", "shared_head_norm") if (name := f"{b}{n}.weight") in self}
        e = self[own.get("embed_tokens", "token_embd.weight")][list(ids)]
        joined = np.concatenate([self.normed(e, b + "enorm"), self.normed(h, b + "hnorm")], -1)
        x = self.layer(self.linear(joined, b + "eh_proj"), self.layers)
        x = rms_norm(x, self[own.get("shared_head_norm", "output_norm.weight")], self.eps)
        return self.head(x, b + "shared_head_head.weight")


def forward(path: str | Path, ids: Sequence[int]) -> Array:
    """Logits, float64 (len(ids), vocabulary), of the model in the GGUF at `path`."""
    return Model(Path(path))(ids)
