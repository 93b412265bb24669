#!/usr/bin/env python3
"""vLLM #33638 in one file: FP8 FlashMLA decode under full CUDA graphs reads a freed tile schedule; the text garbles.

Needs torch, a vLLM and one Hopper GPU, and no download: it writes a one-layer DeepSeek-V2 whose computed weights
repeat the prompt for ever, so the right answer is known. Affected: 0.15.0 to 0.18.1 (#32810; #35175 fixed 0.19.0).

    python issue_33638.py

Exit 0: eager and graph right. 1: eager right, graph wrong. 125: cannot tell. 2: usage.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile

PROMPT = (
    "A captured graph reads the addresses it was born with. When the schedule of a step is put down somewhere else, "
    "the graph goes on reading the old place, where by then another tensor lives. Nothing faults; the text just dies."
)
TOKENS, HEADS, HIDDEN, LATENT, ROPE, NOPE, VALUE, INNER = 250, 16, 1024, 512, 64, 128, 128, 256
THETA, SIZE = 1000.0, 8.0  # position p's key is turned by p * THETA^(-2j/64); SIZE makes neighbours 6 nats apart
MARK = "STALEGRAPH-ANSWER "


def weights(length):
    """Position decides which token is attended (the one that is length - 1 back), its byte is what comes out."""
    import torch

    one = torch.eye(256)
    embed = torch.zeros(256, HIDDEN)
    embed[:, :256], embed[:, 256] = one, 1  # dim 256 is always 1: norms are equal, RMSNorm only scales
    head = torch.zeros(256, HIDDEN)
    head[:, 512:768] = one
    angle = -(length - 1) * THETA ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    q = torch.zeros(HEADS, NOPE + ROPE, HIDDEN)
    q[:, NOPE:, 256] = (torch.stack([angle.cos(), angle.sin()], 1).flatten() * SIZE).float()
    kv_a = torch.zeros(LATENT + ROPE, HIDDEN)
    kv_a[:256, :256] = one
    kv_a[LATENT::2, 256] = SIZE
    kv_b, out = torch.zeros(HEADS, NOPE + VALUE, LATENT), torch.zeros(HIDDEN, HEADS, VALUE)
    for at in range(HEADS):  # even heads carry bytes 0 to 127, odd heads 128 to 255
        byte = torch.arange(VALUE) + VALUE * (at % 2)
        kv_b[at, NOPE + torch.arange(VALUE), byte] = 1
        out[512 + byte, at, torch.arange(VALUE)] = 2 / HEADS
    layer = {
        "input_layernorm": torch.full((HIDDEN,), (2 / HIDDEN) ** 0.5),
        "post_attention_layernorm": torch.ones(HIDDEN),
        "self_attn.q_proj": q.view(-1, HIDDEN),
        "self_attn.kv_a_proj_with_mqa": kv_a,
        "self_attn.kv_a_layernorm": torch.full((LATENT,), LATENT**-0.5),
        "self_attn.kv_b_proj": kv_b.view(-1, LATENT),
        "self_attn.o_proj": out.view(HIDDEN, -1),
        "mlp.gate_proj": torch.zeros(INNER, HIDDEN),
        "mlp.up_proj": torch.zeros(INNER, HIDDEN),
        "mlp.down_proj": torch.zeros(HIDDEN, INNER),
    }
    found = {"model.embed_tokens": embed, "lm_head": head, "model.norm": torch.ones(HIDDEN)}
    found |= {f"model.layers.0.{name}": weight for name, weight in layer.items()}
    return {f"{name}.weight": weight.bfloat16().contiguous() for name, weight in found.items()}


def write_checkpoint(folder):
    import torch

    header, blobs, at = {}, [], 0
    for name, weight in weights(len(PROMPT)).items():  # safetensors: length, JSON header, raw tensors
        blob = weight.view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 256,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": None, "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": THETA, "rope_scaling": None, "attention_bias": False,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


def answer(folder, mode):
    """In a child process: one engine, one request; prints the new token ids as JSON."""
    import vllm

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    llm = vllm.LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype="fp8", block_size=64,
        max_model_len=4096, max_num_seqs=8, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28,
        attention_config={"backend": "FLASHMLA"},
        **({"enforce_eager": True} if mode == "eager" else {"compilation_config": graphs}),
    )  # fmt: skip
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(PROMPT.encode())}], sampling, use_tqdm=False)
    found = {"tokens": list(outputs[0].outputs[0].token_ids), "vllm": vllm.__version__}
    print(MARK + json.dumps(found), flush=True)
    os._exit(0)


def ask(folder, mode):
    """(what the engine answered or None, why not)."""
    set_here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    environment = {"STALEGRAPH_HOTFIX": "off", **os.environ, **set_here}
    child = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--child", mode, folder], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = child.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        return None, "no answer in 900 s"
    for line in printed.splitlines():
        if MARK in line:
            return json.loads(line.split(MARK, 1)[1]), ""
    lines = [line for line in printed.splitlines() if "Error" in line] or printed.splitlines()
    return None, (lines or [f"ended with code {child.returncode}"])[-1]


def main():
    if sys.argv[1:2] == ["--child"] and len(sys.argv) == 4:
        return answer(sys.argv[3], sys.argv[2])
    if len(sys.argv) > 1:
        print(__doc__, file=sys.stderr)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    want = list((PROMPT * (TOKENS // len(PROMPT) + 1)).encode()[:TOKENS])
    right = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_checkpoint(folder)
        except ImportError as error:
            print(f"cannot tell: {error}")
            return 125
        for mode in ("eager", "graph"):
            found, why = ask(folder, mode)
            crashed = mode == "graph" and ("illegal memory access" in why or "device-side assert" in why)
            if found is None and not crashed:
                print(f"{mode}: {why}\ncannot tell")
                return 125
            tokens = found["tokens"] if found else []
            right[mode] = sum(got == wanted for got, wanted in zip(tokens, want)) / TOKENS
            said = "".join(chr(token) if 32 <= token < 127 else "." for token in tokens) or why
            print(f"{mode} ({'vLLM ' + found['vllm'] if found else 'crashed'}), {right[mode]:.1%} right:\n  {said}")
    if right["eager"] < 1:
        print("cannot tell: without graphs the text is wrong too")
        return 125
    wrong = right["graph"] < 1
    print("WRONG: under a full CUDA graph the text is wrong (#33638)" if wrong else "RIGHT: the graph says it too")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
