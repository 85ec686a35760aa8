"""The largest values that a model file may contain, each with its reason; checked before anything of that size is
allocated.

Model files are untrusted. The module that first reads a dimension, count or length compares it with this table:
gguf.py in the header, config.py in the metadata, tokenizer.py in the vocabulary. The limits are larger than in any
published model; `fit` computes how much memory a file within them needs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Values from `least` to `most` are accepted; `why` names what `most` leaves room above, or what would break."""

    most: float
    why: str
    least: float = 0


# --- the header of a file: counts and bytes ---

HEADER_BYTES = Bounds(1 << 27, "the largest vocabularies with their merges take 16 MB")
KEYS = Bounds(1 << 14, "published files have up to 100 metadata keys")
TENSORS = Bounds(1 << 16, "DeepSeek-V3 has 1,100")
NAME_BYTES = Bounds(256, "keys and tensor names; ggml allows tensors 64")
STRING_BYTES = Bounds(1 << 20, "the longest published chat template has 20,000 characters")
ITEM_BYTES = Bounds(1 << 12, "strings in arrays; the longest published token has some 500 bytes")
ITEMS = Bounds(1 << 21, "elements of an array; Gemma 3 has 514,906 merges")
STRINGS = Bounds(1 << 22, "strings in all arrays together, 60 bytes of memory each at least")
DIMENSIONS = Bounds(4, "ggml has no more", least=1)
SIDE = Bounds(2**31 - 1, "one side of a tensor; kernels count in 32 bits", least=1)
ALIGNMENT = Bounds(1 << 20, "ggml writes 32", least=1)
PARTS = Bounds(1 << 10, "the largest published splits have some 200 parts", least=1)

# --- the vocabulary ---

VOCABULARY = Bounds(1 << 20, "Gemma 3 has 262,144 tokens", least=1)
MARKS = Bounds(1 << 14, "control and user-defined tokens, of which Gemma 3 has 6,400; a prompt is searched for each")
MARK_CHARS = Bounds(256, "of one such token; the longest published ones have 40")
MARKS_CHARS = Bounds(1 << 18, "of all such tokens together; each of their beginnings is kept for matching")

# --- <architecture>.<key> of the metadata ---

_WIDTH = Bounds(1 << 17, "Llama 3.1 405B has 16,384", least=1)
_HEADS = Bounds(1 << 12, "DeepSeek-V3 has 128", least=1)
_HEAD_DIM = Bounds(1 << 13, "DeepSeek-V3's latent heads have 576", least=1)
_RANK = Bounds(1 << 14, "DeepSeek-V3 has 1,536")
_FF = Bounds(1 << 19, "Llama 3.1 405B has 53,248")
_EXPERTS = Bounds(1 << 12, "Kimi K2 has 384")
_CONTEXT = Bounds(1 << 24, "Llama 4 Scout has 10,485,760", least=1)
_FACTOR = Bounds(1e6, "published scaling factors go to 64")

METADATA: dict[str, Bounds] = {
    "block_count": Bounds(1 << 10, "Llama 3.1 405B has 126", least=1),
    "nextn_predict_layers": Bounds(64, "published models have 1"),
    "leading_dense_block_count": Bounds(1 << 10, "as many as there are layers"),
    "embedding_length": _WIDTH,
    "embedding_length_per_layer_input": _WIDTH,
    "feed_forward_length": _FF,
    "context_length": _CONTEXT,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.key_length": _HEAD_DIM,
    "attention.value_length": _HEAD_DIM,
    "attention.key_length_swa": _HEAD_DIM,
    "attention.value_length_swa": _HEAD_DIM,
    "attention.key_length_mla": _HEAD_DIM,
    "attention.value_length_mla": _HEAD_DIM,
    "attention.q_lora_rank": _RANK,
    "attention.kv_lora_rank": _RANK,
    "attention.shared_kv_layers": Bounds(1 << 10, "at most all layers"),
    "attention.sliding_window": _CONTEXT,
    "attention.temperature_scale": Bounds(1e3, "published models have 0.1"),
    "attention.temperature_length": _CONTEXT,
    "attention.layer_norm_rms_epsilon": Bounds(1.0, "published models have 1e-5 or 1e-6"),
    "rope.dimension_count": _HEAD_DIM,
    "rope.freq_base": Bounds(1e12, "published models have 1e4 to 1e8; at 1 and below nothing would turn", least=1.01),
    "rope.dimension_count_swa": _HEAD_DIM,
    "final_logit_softcapping": Bounds(1e6, "published models have 30"),
    "rope.freq_base_swa": Bounds(1e12, "as rope.freq_base", least=1.01),
    "rope.scaling.factor": _FACTOR,
    "rope.scale_linear": _FACTOR,
    "rope.scaling.original_context_length": _CONTEXT,
    "rope.scaling.attn_factor": Bounds(1e3, "published models have 1"),
    "rope.scaling.yarn_log_multiplier": Bounds(1e2, "published models have up to 0.1"),
    "expert_count": _EXPERTS,
    "expert_used_count": Bounds(64, "published models choose up to 22 per token", least=1),
    "expert_feed_forward_length": _FF,
    "expert_shared_feed_forward_length": _FF,
    "expert_shared_count": Bounds(64, "published models have up to 4"),
    "expert_group_count": _EXPERTS,
    "expert_group_used_count": _EXPERTS,
    "expert_gating_func": Bounds(255, "an enumeration"),
    "expert_weights_scale": Bounds(1e3, "published models have up to 2.5"),
    "full_attention_interval": Bounds(1 << 10, "published models have 4", least=1),
    "kda.gate_lower_bound": Bounds(0, "decays are at most 1", least=-100),
    "kda.head_dim": Bounds(1 << 10, "published models have 128", least=1),
    "shortconv.l_cache": Bounds(64, "published models have 3", least=1),
    "ssm.conv_kernel": Bounds(64, "published models have 4", least=1),
    "ssm.state_size": Bounds(1 << 10, "published models have 128", least=1),
    "ssm.inner_size": _WIDTH,
    "ssm.time_step_rank": _HEADS,
    "ssm.group_count": _HEADS,
}
OTHER = Bounds(1 << 20, "no published model has more")  # of a key that is not in METADATA
