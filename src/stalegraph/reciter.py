"""A model whose right answer is known: it repeats its prompt of L bytes for ever, through MLA attention alone.

One DeepSeek-V2 layer whose weights are computed, not trained. Keys carry only position, so that a query at position m
looks at m - (L - 1); values carry the byte found there. If attention reads wrong keys, or a schedule leaves some out,
the text is wrong. Shapes are those that FlashMLA's FP8 dense decode needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalegraph import ops
from stalegraph.errors import UsageError

VOCAB = 256  # one token a byte
HIDDEN = 1024
LATENT = 512  # kv_lora_rank
ROPE = 64  # qk_rope_head_dim
NOPE = 128  # qk_nope_head_dim
VALUE = 128  # v_head_dim
ROPE_THETA = 1000.0
KEY_SIZE = 8.0  # entries of k_pe and q_pe; with ROPE_THETA it puts about 6 nats between neighbouring positions
SOFTMAX_SCALE = (NOPE + ROPE) ** -0.5
CONSTANT = 256  # the residual dim that is always 1
OUTPUT = 512  # residual dims 512 to 767 receive the byte that attention found
INTERMEDIATE = 256
EPSILON = 1e-6
MAX_PROMPT = 4096  # bytes
MAX_POSITIONS = 8192
HEADS = (16, 32, 64, 128)


def check_prompt(prompt: bytes) -> bytes:
    """`prompt` itself, if it is 1 to 4,096 bytes."""
    if not isinstance(prompt, (bytes, bytearray)):
        raise UsageError(f"prompt is {type(prompt).__name__}; allowed: bytes")
    if not 1 <= len(prompt) <= MAX_PROMPT:
        raise UsageError(f"prompt has {len(prompt)} bytes; allowed: 1 to {MAX_PROMPT}")
    return bytes(prompt)


def expected(prompt: bytes, tokens: int) -> bytes:
    """The right continuation: byte t of it is byte t of the prompt, repeated.

    >>> expected(b"abc", 7)
    b'abcabca'
    """
    return (prompt * (tokens // len(prompt) + 1))[:tokens]


def rotations(prompt: bytes, batch: int) -> list[bytes]:
    """One prompt a request: the text begun at evenly spread places, so that requests say different bytes at a step."""
    starts = [request * len(prompt) // batch for request in range(batch)]
    return [prompt[start:] + prompt[:start] for start in starts]


@dataclass(frozen=True)
class Said:
    """What one request said: `right` marks each byte, `first_wrong` is the index of the first wrong one or None."""

    text: bytes
    expected: bytes

    @property
    def right(self) -> list[bool]:
        return [got == want for got, want in zip(self.text, self.expected)]

    @property
    def first_wrong(self) -> int | None:
        return next((at for at, right in enumerate(self.right) if not right), None)

    @property
    def accuracy(self) -> float:
        """Fraction of right bytes, those never said counted as wrong."""
        return sum(self.right) / len(self.expected) if self.expected else 1.0


def mark(text: bytes, want: bytes) -> list[tuple[bytes, bool]]:
    """`text` cut into runs of right and of wrong bytes: (run, is right)."""
    runs: list[tuple[bytes, bool]] = []
    for at, byte in enumerate(text):
        right = at < len(want) and byte == want[at]
        if runs and runs[-1][1] == right:
            runs[-1] = (runs[-1][0] + bytes([byte]), right)
        else:
            runs.append((bytes([byte]), right))
    return runs


def _frequencies() -> torch.Tensor:
    return ROPE_THETA ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)


class Reciter:
    """The reciter for prompts of `prompt_length` bytes; weights are torch tensors on `device`.

    `layers` above 1 appends layers that add nothing to the residual, for a deeper checkpoint.
    """

    def __init__(self, prompt_length: int, num_heads: int = 16, *, layers: int = 1, dtype=torch.bfloat16, device="cpu"):
        if not isinstance(prompt_length, int) or not 1 <= prompt_length <= MAX_PROMPT:
            raise UsageError(f"prompt_length is {prompt_length!r}; allowed: 1 to {MAX_PROMPT} bytes")
        if not isinstance(num_heads, int) or num_heads not in HEADS:
            raise UsageError(f"num_heads is {num_heads!r}; allowed: {', '.join(map(str, HEADS))}")
        if not isinstance(layers, int) or layers < 1:
            raise UsageError(f"layers is {layers!r}; allowed: an integer of at least 1")
        self.prompt_length = prompt_length
        self.num_heads = num_heads
        self.layers = layers
        self.dtype = dtype
        self.device = device

    # weights
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every weight under its Hugging Face DeepSeek-V2 name, shapes (out, in), in `dtype`."""
        heads, norm = self.num_heads, (1 / HIDDEN * 2) ** 0.5
        eye = torch.eye(VOCAB, dtype=torch.float64)
        embed = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
        embed[:, :VOCAB], embed[:, CONSTANT] = eye, 1
        head = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
        head[:, OUTPUT : OUTPUT + VOCAB] = eye
        weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
        weights["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
        angle = -(self.prompt_length - 1) * _frequencies()
        look_back = torch.stack([angle.cos(), angle.sin()], 1).flatten() * KEY_SIZE
        half = torch.arange(VALUE)
        for layer in range(self.layers):
            q = torch.zeros(heads, NOPE + ROPE, HIDDEN, dtype=torch.float64)
            q[:, NOPE:, CONSTANT] = look_back
            kv_a = torch.zeros(LATENT + ROPE, HIDDEN, dtype=torch.float64)
            kv_a[:VOCAB, :VOCAB] = eye
            kv_a[LATENT::2, CONSTANT] = KEY_SIZE
            kv_b = torch.zeros(heads, NOPE + VALUE, LATENT, dtype=torch.float64)
            out = torch.zeros(HIDDEN, heads, VALUE, dtype=torch.float64)
            for each in range(heads):  # even heads carry bytes 0 to 127, odd heads the rest
                byte = half + VALUE * (each % 2)
                kv_b[each, NOPE + half, byte] = 1
                if layer == 0:
                    out[OUTPUT + byte, each, half] = 2 / heads
            prefix = f"model.layers.{layer}."
            weights |= {
                prefix + "input_layernorm.weight": torch.full((HIDDEN,), norm, dtype=torch.float64),
                prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.float64),
                prefix + "self_attn.q_proj.weight": q.view(-1, HIDDEN),
                prefix + "self_attn.kv_a_proj_with_mqa.weight": kv_a,
                prefix + "self_attn.kv_a_layernorm.weight": torch.full((LATENT,), LATENT**-0.5, dtype=torch.float64),
                prefix + "self_attn.kv_b_proj.weight": kv_b.view(-1, LATENT),
                prefix + "self_attn.o_proj.weight": out.view(HIDDEN, -1),
                prefix + "mlp.gate_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN, dtype=torch.float64),
                prefix + "mlp.up_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN, dtype=torch.float64),
                prefix + "mlp.down_proj.weight": torch.zeros(HIDDEN, INTERMEDIATE, dtype=torch.float64),
            }
        return {name: weight.to(self.dtype) for name, weight in weights.items()}

    def config(self, architecture: str = "DeepseekV2ForCausalLM") -> dict:
        """The Hugging Face config that goes with `state_dict()`; dense in every layer, no query compression."""
        v3 = architecture == "DeepseekV3ForCausalLM"
        return {
            "architectures": [architecture],
            "model_type": "deepseek_v3" if v3 else "deepseek_v2",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "moe_intermediate_size": INTERMEDIATE,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "q_lora_rank": None,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
            "n_routed_experts": 8 if v3 else None,
            "n_shared_experts": 1 if v3 else None,
            "num_experts_per_tok": 2 if v3 else None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": self.layers,
            "moe_layer_freq": 1,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "max_position_embeddings": MAX_POSITIONS,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
        }

    def load(self) -> None:
        """Put the first layer's weights on the device, kv_b_proj split for absorption as vLLM does."""
        weights = {
            name.replace("model.layers.0.", "").replace("self_attn.", ""): weight
            for name, weight in Reciter(self.prompt_length, self.num_heads, dtype=self.dtype).state_dict().items()
        }
        up = weights["kv_b_proj.weight"].view(self.num_heads, NOPE + VALUE, LATENT)
        position = torch.arange(MAX_POSITIONS, dtype=torch.float64)[:, None] * _frequencies()
        on_device = lambda tensor: torch.empty_like(tensor, device=self.device).copy_(tensor)  # noqa: E731
        self.embed = on_device(weights["model.embed_tokens.weight"])
        self.input_norm = on_device(weights["input_layernorm.weight"])
        self.q_proj = on_device(weights["q_proj.weight"].t().contiguous())
        self.kv_a_proj = on_device(weights["kv_a_proj_with_mqa.weight"].t().contiguous())
        self.latent_norm = on_device(weights["kv_a_layernorm.weight"])
        self.w_uk = on_device(up[:, :NOPE].contiguous())  # (heads, 128, 512)
        self.w_uv = on_device(up[:, NOPE:].transpose(1, 2).contiguous())  # (heads, 512, 128)
        self.o_proj = on_device(weights["o_proj.weight"].t().contiguous())
        self.final_norm = on_device(weights["model.norm.weight"])
        self.lm_head = on_device(weights["lm_head.weight"].t().contiguous())
        self.cos = on_device(position.cos().to(self.dtype))
        self.sin = on_device(position.sin().to(self.dtype))
        self.one = on_device(torch.ones(1))

    # the step
    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Residual stream (batch, 1024) of token_ids (batch,)."""
        return torch.nn.functional.embedding(token_ids, self.embed)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What attention's projections read, (batch, 1024)."""
        return torch.nn.functional.rms_norm(hidden, (HIDDEN,), self.input_norm, EPSILON)

    def keys(self, normed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the cache stores for each token: latent then rotary key, (batch, 576) float8_e4m3fn."""
        both = normed @ self.kv_a_proj
        latent = torch.nn.functional.rms_norm(both[:, :LATENT], (LATENT,), self.latent_norm, EPSILON)
        return torch.cat([latent, self.rotate(both[:, None, LATENT:], positions)[:, 0]], 1).to(torch.float8_e4m3fn)

    def queries(self, normed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Absorbed queries (batch, 1, heads, 576) float8_e4m3fn."""
        q = (normed @ self.q_proj).view(-1, self.num_heads, NOPE + ROPE)
        rotated = self.rotate(q[:, :, NOPE:], positions)
        latent = torch.bmm(q[:, :, :NOPE].transpose(0, 1), self.w_uk).transpose(0, 1)
        return torch.cat([latent.to(torch.float8_e4m3fn), rotated.to(torch.float8_e4m3fn)], 2)[:, None]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of pairs (2j, 2j + 1) of x (batch, heads, 64), as DeepSeek-V2 lays them out."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(2)

    def attention(self, q, cache, metadata) -> torch.Tensor:
        """(batch, heads, 512) bfloat16: FP8 decode over the paged cache under the step's metadata."""
        out, _ = ops.flash_mla_with_kvcache_fp8(
            q, cache, metadata.block_table, metadata.seq_lens, LATENT, metadata.tile_scheduler_metadata,
            metadata.num_splits, SOFTMAX_SCALE, True, self.one, self.one,
        )  # fmt: skip
        return out[:, 0]

    def logits(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 256) from the residual stream and attention's result."""
        values = torch.bmm(attended.to(self.dtype).transpose(0, 1), self.w_uv).transpose(0, 1)
        hidden = hidden + values.reshape(values.shape[0], -1) @ self.o_proj
        return torch.nn.functional.rms_norm(hidden, (HIDDEN,), self.final_norm, EPSILON) @ self.lm_head
