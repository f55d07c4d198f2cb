"""A model that chats, as somebody has saved it with transformers: weights, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.pretrained import saved_model
from tests.unit.tokenizers_made_here import bpe

TURN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}\n"
)
CHAT = [{"role": "user", "content": "größer?"}, {"role": "assistant", "content": "Yes."}]


def saved_chat_model(directory: Path) -> None:
    """Save it there, of 320 tokens, 303 of which the tokenizer has."""
    saved_model(directory, vocab_size=320, max_position_embeddings=256)
    file = Tokenizer.from_str(bpe(303, ("<|endoftext|>", TURN, END)).decode())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=file,
        eos_token="<|endoftext|>",
        additional_special_tokens=[TURN, END],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
