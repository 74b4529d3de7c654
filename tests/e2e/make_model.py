"""Writes a tiny Llama with random weights, a tokenizer and a chat template into a folder.

Runs in the interpreter that has vLLM. The tokenizer learns from Python source texts, so nothing
is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
HEAD = 32  # smallest size of vLLM's attention on CPUs
MARKS = ["<end>", "<system>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['reasoning'] }}"
    "{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def main(folder: Path) -> None:
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = bytes_of_text
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([__file__, torch.__file__], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * HEAD,
        intermediate_size=8 * HEAD,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
