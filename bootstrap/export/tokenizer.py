"""The tokenizer that goes with an export, so that transformers needs nothing of ours to make text of tokens."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from protocol.manifest import Manifest

END_OF_TEXT = "\0"  # byte 0, which no text holds


def run_tokenizer(manifest: Manifest) -> PreTrainedTokenizerFast:
    """The run's tokenizer as transformers knows it; it says how many tokens the model was trained on at once."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token=END_OF_TEXT,  # a text begins where another one ends
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=manifest.data.sequence_tokens,
        clean_up_tokenization_spaces=False,
    )


def byte_tokenizer() -> tokenizers.Tokenizer:
    """256 tokens, and each byte is its own id: any text becomes its UTF-8, any ids the text of their bytes.

    Byte 0 is a special token under its own name; the other bytes have the printable names that GPT-2 gave them.
    """
    names: dict[int, str] = {**bytes_to_unicode(), 0: END_OF_TEXT}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer
