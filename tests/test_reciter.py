"""The reciter is right by construction: with a plain softmax over e4m3 data its text repeats the prompt."""

import pytest
import torch

from stalegraph.attention import mla_reference
from stalegraph.errors import UsageError
from stalegraph.reciter import HIDDEN, LATENT, ROPE, SOFTMAX_SCALE, Reciter, Said, expected, mark, rotations
from stalegraph.runs import PROMPT

ONE = torch.ones(1)


def recite_plainly(prompt: bytes, tokens: int, heads: int) -> bytes:
    return recite_with(Reciter(len(prompt), heads), prompt, tokens)


def recite_with(model: Reciter, prompt: bytes, tokens: int) -> bytes:
    """The text with no graph, no schedule and no kernel: one softmax a step over the e4m3 keys."""
    model.load()
    text = bytearray(prompt)
    pages = -(-(len(prompt) + tokens) // 64)
    cache = torch.zeros(pages, 64, 1, LATENT + ROPE, dtype=torch.uint8)
    known = torch.tensor(list(prompt))
    keys = model.keys(model.normed(model.hidden(known)), torch.arange(len(prompt)))
    cache.view(-1, LATENT + ROPE)[: len(prompt)] = keys.view(torch.uint8)
    table = torch.arange(pages, dtype=torch.int32)[None]
    for step in range(tokens):
        at = torch.tensor([len(text) - 1])
        hidden = model.hidden(torch.tensor([text[-1]]))
        normed = model.normed(hidden)
        cache.view(-1, LATENT + ROPE)[at] = model.keys(normed, at).view(torch.uint8)
        out, _ = mla_reference(
            model.queries(normed, at), cache.view(torch.float8_e4m3fn), table, at.int() + 1, SOFTMAX_SCALE, ONE, ONE
        )
        text.append(int(model.logits(hidden, out[:, 0].float()).argmax()))
    return bytes(text[len(prompt) :])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500, 4096])
def test_repeats_its_prompt(length):
    prompt = (PROMPT * 21)[:length]
    assert recite_plainly(prompt, 6, 16) == expected(prompt, 6)


@pytest.mark.parametrize("heads", [32, 64, 128])
def test_repeats_its_prompt_with_more_heads(heads):
    assert recite_plainly(PROMPT[:90], 3, heads) == expected(PROMPT[:90], 3)


def test_looking_elsewhere_says_something_else():
    """The text is right because of where attention looks: rotate queries for another length and it is wrong."""
    model, other = Reciter(90), Reciter(91)
    right, off = (one.state_dict()["model.layers.0.self_attn.q_proj.weight"] for one in (model, other))
    assert not torch.equal(right, off)
    model.prompt_length = 91
    assert recite_with(model, PROMPT[:90], 3) != expected(PROMPT[:90], 3)


def test_every_byte_value_can_be_said():
    prompt = bytes(range(256))
    assert recite_plainly(prompt, 20, 16) == expected(prompt, 20)
    turned = prompt[120:] + prompt[:120]
    assert recite_plainly(turned, 20, 16) == expected(turned, 20)


def test_weights_have_the_shapes_of_the_config():
    model = Reciter(100, 32, layers=2)
    config, weights = model.config(), model.state_dict()
    assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (32 * (128 + 64), HIDDEN)
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert not weights["model.layers.1.self_attn.o_proj.weight"].any() and config["num_hidden_layers"] == 2


def test_rotations_differ_and_keep_the_text():
    turned = rotations(b"abcdef", 3)
    assert turned == [b"abcdef", b"cdefab", b"efabcd"]


def test_marks_and_accuracy():
    said = Said(b"abXd", b"abcd")
    assert said.right == [True, True, False, True] and said.first_wrong == 2 and said.accuracy == 0.75
    assert mark(said.text, said.expected) == [(b"ab", True), (b"X", False), (b"d", True)]
    assert Said(b"ab", b"abcd").accuracy == 0.5  # bytes never said are wrong


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: Reciter(0), "prompt_length is 0; allowed: 1 to 4096 bytes"),
        (lambda: Reciter(4097), "prompt_length is 4097"),
        (lambda: Reciter(10, 17), "num_heads is 17; allowed: 16, 32, 64, 128"),
        (lambda: Reciter(10, 16.0), "num_heads is 16.0"),
        (lambda: Reciter(10, layers=0), "layers is 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(UsageError, match=message):
        call()
