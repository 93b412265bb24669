"""The reciter as a Hugging Face checkpoint for vLLM and transformers: config, safetensors, a byte-level tokenizer."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from stalegraph.errors import UsageError
from stalegraph.reciter import MAX_POSITIONS, MAX_PROMPT, VOCAB, Reciter, check_prompt
from stalegraph.vllm.releases import ARCHITECTURES

MAX_LAYERS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where the checkpoint goes; must not exist yet")
    parser.add_argument("--prompt-file", required=True, metavar="F", help=f"text to recite, 1 to {MAX_PROMPT:,} bytes")
    parser.add_argument(
        "--architecture", default=ARCHITECTURES[0], help=f"{' or '.join(ARCHITECTURES)} (default: the first)"
    )
    parser.add_argument("--layers", default="1", metavar="N", help="decoder layers; those behind the first add nothing")


def main(args: argparse.Namespace) -> int:
    """Write the checkpoint and say how to serve it; 0, or UsageError with nothing written."""
    if not args.layers.isdigit():
        raise UsageError(f"layers is {args.layers!r}; allowed: 1 to {MAX_LAYERS}")
    prompt = read_prompt(args.prompt_file)
    path = export(args.folder, prompt, architecture=args.architecture, layers=int(args.layers))
    print(path)
    print(
        f"serve it: vllm serve {path} --kv-cache-dtype fp8 --block-size 64 --max-model-len {MAX_POSITIONS}; "
        f"it continues {path / 'prompt.txt'}",
        file=sys.stderr,
    )
    return 0


def read_prompt(name: str) -> bytes:
    """The bytes of a prompt file, checked; UsageError where there is none."""
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"prompt-file is {name!r}, which is no file; allowed: a file of 1 to {MAX_PROMPT} bytes")
    return check_prompt(path.read_bytes())


def export(
    folder, prompt: bytes, *, architecture: str = ARCHITECTURES[0], layers: int = 1, num_heads: int = 16
) -> Path:
    """Save the reciter of `prompt` to `folder`, which must not exist; whole or not at all. Returns the folder.

    The weights depend on the prompt's length alone: the checkpoint recites any text of that many bytes.
    """
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"DIR is {str(folder)!r}, which exists; allowed: a path that does not exist yet")
    if architecture not in ARCHITECTURES:
        raise UsageError(f"architecture is {architecture!r}; allowed: {', '.join(ARCHITECTURES)}")
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise UsageError(f"layers is {layers!r}; allowed: 1 to {MAX_LAYERS}")
    check_prompt(prompt)
    model = Reciter(len(prompt), num_heads, layers=layers)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        why = f"DIR is {str(folder)!r}, which cannot be made ({error.strerror}); allowed: a writable place"
        raise UsageError(why) from error
    try:
        _write(scratch, model, prompt, architecture)
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write(folder: Path, model: Reciter, prompt: bytes, architecture: str) -> None:
    from safetensors.torch import save_file

    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config.json", config(model, architecture)),
        ("generation_config.json", {"do_sample": False}),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "prompt.txt").write_bytes(prompt)


def config(model: Reciter, architecture: str) -> dict:
    """The reciter's config as transformers 4 and 5 both read it.

    transformers 5 refuses None for the counts of experts; no layer uses them, since all are dense
    (`first_k_dense_replace` is their number).
    """
    return model.config(architecture) | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}


def byte_letters() -> list[str]:
    """For each byte the letter that byte-level tokenizers write: itself where printable, else one from U+0100 on.

    The rule is GPT-2's, and the `tokenizers` library's ByteLevel has it built in.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(VOCAB) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(VOCAB)]


def tokenizer() -> dict:
    """A `tokenizers` file whose token ids are the bytes of the text's UTF-8; no merges, no special tokens."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(byte_letters())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict:
    """What transformers 4 and 5 need to know beside the tokenizer file."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
