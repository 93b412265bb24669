"""The exported checkpoint: a plain float model reads it and recites, the tokenizer is bytes, nothing is overwritten."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stalegraph.cli import main
from stalegraph.errors import UsageError
from stalegraph.reciter import expected
from stalegraph.vllm.export import byte_letters, export, tokenizer
from stalegraph.vllm.releases import ARCHITECTURES

PROMPT = "Frost settled on the wires — żółw, 龍 — and the last tram had not yet left the lamps of the square. ".encode()


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x, theta):
    """x (tokens, heads, 64): pairs (2j, 2j + 1) turned by position * theta^(-2j/64), as complex numbers."""
    angle = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(0, 64, 2) / 64)
    turned = (
        torch.view_as_complex(x.unflatten(-1, (32, 2)).contiguous())
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


def plain_logits(folder, ids):
    """DeepSeek-V2's dense forward pass from the files alone, unabsorbed, float32, no cache; the last token's logits."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    heads, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    x = w["model.embed_tokens.weight"][ids]
    mask = torch.full((len(ids), len(ids)), -math.inf).triu(1)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, w[at + "input_layernorm.weight"])
        q = (h @ w[at + "self_attn.q_proj.weight"].T).view(len(ids), heads, nope + rope)
        kv = h @ w[at + "self_attn.kv_a_proj_with_mqa.weight"].T
        up = norm(kv[:, :rank], w[at + "self_attn.kv_a_layernorm.weight"]) @ w[at + "self_attn.kv_b_proj.weight"].T
        up = up.view(len(ids), heads, nope + value)
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], config["rope_theta"])], -1)
        turned = rotate(kv[:, None, rank:], config["rope_theta"]).expand(-1, heads, -1)
        k = torch.cat([up[..., :nope], turned], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (nope + rope) ** -0.5 + mask
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), up[..., nope:])
        x = x + attended.flatten(1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, lift = (h @ w[at + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * lift) @ w[at + "mlp.down_proj.weight"].T
    return norm(x[-1], w["model.norm.weight"]) @ w["lm_head.weight"].T


def recite(folder, prompt, tokens):
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(plain_logits(folder, torch.tensor(ids)).argmax()))
    return bytes(ids[len(prompt) :])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layers", (1, 3))
def test_a_plain_model_recites_from_the_files(tmp_path, architecture, layers):
    folder = export(tmp_path / "model", PROMPT, architecture=architecture, layers=layers)
    assert recite(folder, PROMPT, 12) == expected(PROMPT, 12)


def test_that_check_can_fail(tmp_path):
    """A prompt one byte shorter than the checkpoint was made for is not recited."""
    folder = export(tmp_path / "model", PROMPT)
    assert recite(folder, PROMPT[:-1], 4) != expected(PROMPT[:-1], 4)


@pytest.mark.parametrize("architecture, kind", list(zip(ARCHITECTURES, ("deepseek_v2", "deepseek_v3"))))
def test_the_config_is_dense_mla_that_both_transformers_read(tmp_path, architecture, kind):
    config = json.loads(
        (export(tmp_path / "model", PROMPT, architecture=architecture, layers=2) / "config.json").read_text()
    )
    assert config["architectures"] == [architecture] and config["model_type"] == kind
    assert config["first_k_dense_replace"] >= config["num_hidden_layers"] == 2
    assert config["kv_lora_rank"] == 512 and config["q_lora_rank"] is None
    counts = [config[name] for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")]
    assert all(isinstance(count, int) for count in counts)  # transformers 5 refuses None


def test_layers_behind_the_first_add_nothing(tmp_path):
    weights = load_file(export(tmp_path / "model", PROMPT, layers=2) / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert weights[f"model.layers.1.{name}.weight"].count_nonzero() == 0
    assert weights["model.layers.0.self_attn.o_proj.weight"].count_nonzero() > 0


def test_every_byte_has_one_letter_and_its_own_id():
    letters = byte_letters()
    assert len(set(letters)) == 256 and letters[ord("A")] == "A" and letters[0x20] == "Ġ" and letters[0x0A] == "Ċ"
    vocabulary = tokenizer()["model"]["vocab"]
    assert [vocabulary[letter] for letter in letters] == list(range(256)) and tokenizer()["model"]["merges"] == []


def test_the_tokenizer_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = export(tmp_path / "model", PROMPT)
    tok = transformers.AutoTokenizer.from_pretrained(folder)
    text = "".join(map(chr, [*range(0x2FF), 0x20AC, 0x1F600]))
    assert tok(text).input_ids == list(text.encode()) and tok.decode(list(text.encode())) == text
    assert tok.convert_tokens_to_ids(tok.convert_ids_to_tokens(list(range(256)))) == list(range(256))


def test_transformers_recites(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = export(tmp_path / "model", PROMPT)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    said = model.generate(torch.tensor([list(PROMPT)]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert bytes(said[0, len(PROMPT) :].tolist()) == expected(PROMPT, 20)


def test_an_existing_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        export(tmp_path / "model", PROMPT)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    import safetensors.torch

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError):
        export(tmp_path / "model", PROMPT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options, named",
    [
        (["--architecture", "LlamaForCausalLM"], "architecture"),
        (["--layers", "0"], "layers"),
        (["--layers", "two"], "layers"),
        (["--prompt-file", "missing.txt"], "prompt-file"),
        (["--prompt-file", "empty.txt"], "prompt"),
        (["--prompt-file", "long.txt"], "4096"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys, options, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.txt").write_bytes(PROMPT)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "long.txt").write_bytes(b"x" * 4097)
    assert main(["export", "model", "--prompt-file", "ok.txt", *options]) == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_the_command_says_where_and_how_to_serve(tmp_path, capsys):
    (tmp_path / "p.txt").write_bytes(PROMPT)
    assert main(["export", str(tmp_path / "model"), "--prompt-file", str(tmp_path / "p.txt")]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "model") and "vllm serve" in said.err
    assert (tmp_path / "model" / "prompt.txt").read_bytes() == PROMPT
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    served = said.err.partition("serve it: ")[2].partition(";")[0].replace(str(tmp_path / "model"), "build/reciter")
    assert f"$ {served}\n" in readme
