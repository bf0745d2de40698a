"""The model of the measurement before and after: 50 million parameters, which a small machine trains and serves."""

from __future__ import annotations

from transformers import Qwen2Config

MAX_LEN = 1024


def config_of() -> Qwen2Config:
    """Of a Qwen2 with eight layers and a small vocabulary."""
    return Qwen2Config(
        vocab_size=97, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=MAX_LEN, tie_word_embeddings=False,
    )  # fmt: skip
