"""Tiny targets and a tiny tokenizer, made on the spot: nothing is downloaded."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads: xdist workers share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode import Target
from heads import create_head
from heads.medusa import MedusaConfig, MedusaHead

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens with a ChatML template; <|im_end|> (id 1) ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat", "user assistant system", "one two three four"] * 4, trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def tiny_llama(
    *, vocab_size: int = 320, seed: int = 0, dtype: torch.dtype = torch.float64, **options
) -> LlamaForCausalLM:
    """A random two-layer Llama with grouped K/V heads, sharp enough that greedy texts differ by prompt."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **options,
    )
    return LlamaForCausalLM(config).to(dtype)


@pytest.fixture(scope="session")
def make_tiny_llama():
    """`tiny_llama`, for tests that need another one."""
    return tiny_llama


@pytest.fixture(scope="session")
def tiny_target(tiny_tokenizer) -> Target:
    """A float64 target on the CPU."""
    return Target(tiny_llama(), tiny_tokenizer, name="tiny")


@pytest.fixture
def tiny_head(tiny_target) -> MedusaHead:
    """An untrained Medusa head with random weights, so that its drafts are now right and now wrong."""
    config = MedusaConfig(hidden_size=32, vocab_size=320, num_heads=3)
    head = create_head("medusa", config, tiny_target)
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return head.double()
