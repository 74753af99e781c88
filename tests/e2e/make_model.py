"""Writes the demo's model: a Qwen3 of two layers with random weights, about 1 MB.

    python make_model.py TOKENIZER_DIRECTORY OUT_DIRECTORY

Its answers are noise, but its KV cache is as real as that of any other model, and that is what kvatlas is about.
Ends with an error when transformers would use another tokenizer than the one in the directory.
"""

import json
import pathlib
import shutil
import sys

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

MAX_POSITIONS = 8192


def main() -> None:
    source, out = (pathlib.Path(arg) for arg in sys.argv[1:3])
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out / name)

    vocabulary = len(json.loads((source / "tokenizer.json").read_text())["model"]["vocab"])
    config = Qwen3Config(
        vocab_size=(vocabulary + 63) // 64 * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)

    loaded = json.loads(AutoTokenizer.from_pretrained(out)._tokenizer.to_str())
    written = json.loads((source / "tokenizer.json").read_text())
    different = [part for part in written if part != "version" and loaded[part] != written[part]]
    if different:
        sys.exit(f"transformers changes the tokenizer in {source}: {', '.join(different)} differ once loaded")


if __name__ == "__main__":
    main()
