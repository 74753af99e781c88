"""Trains the tokenizer of the demo model: byte-level BPE, ChatML special tokens, a ChatML chat template.

    python make.py [DIRECTORY]

writes tokenizer.json and tokenizer_config.json beside itself, or into DIRECTORY. It needs the package `tokenizers`.
The text is the one that every CPython ships as `pydoc_data.topics` (the language reference); the checked-in files
were made by CPython 3.11 with tokenizers 0.23. Training is deterministic: the same text gives the same files.
"""

import json
import pathlib
import sys

from pydoc_data import topics
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# How text is cut before the merges are applied: the pattern of the Qwen family, digits one by one.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = pathlib.Path(__file__).with_name("chat_template.jinja").read_text()


def main() -> None:
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # What transformers puts in by itself when it finds none: this way file and engine are the same to the letter.
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A:0 $B:1", special_tokens=[])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
    )
    tokenizer.train_from_iterator((text for _, text in sorted(topics.topics.items())), trainer)
    (out / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False) + "\n")
    config = {
        # The plain class: transformers takes tokenizer.json as it is instead of rebuilding it by model type.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
