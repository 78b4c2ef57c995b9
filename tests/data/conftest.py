"""Small tokenizers with the chat templates that `data` must cope with."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chat_server import ChatServer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode import Target

TEXT = [
    "What is a tree? A tree is a tall plant with a trunk, branches and leaves.",
    "Write a haiku about rain. Rain on the old roof, a slow song of silver drops, sleep comes on soft feet.",
    "Output the result of 3 + 4. The result is 7. def add(a, b):\n    return a + b",
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# no generation prompt; the answer is stripped and gets a space on both sides
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token }}[INST] {{ message['content'] | trim }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}{% endfor %}"
)
# like Qwen3: thoughts before the last user turn are dropped, the last answer always has some
THINKING = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% if loop.last and '</think>' not in text %}"
    "{% set text = '<think>\n\n</think>\n\n' + text %}{% elif not loop.last %}"
    "{% set text = text.split('</think>\n\n')[-1] %}"
    "{% endif %}{% endif %}<|im_start|>{{ message['role'] }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def create_byte_level(template: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    return create_byte_level(CHATML)


@pytest.fixture(scope="session")
def thinking_tokenizer() -> PreTrainedTokenizerFast:
    return create_byte_level(THINKING)


@pytest.fixture(scope="session")
def llama2_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([*TEXT, "[INST] [/INST] x"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = LLAMA2
    return fast


@pytest.fixture(scope="session")
def small_target(chatml_tokenizer: PreTrainedTokenizerFast) -> Target:
    """A random target of 192 positions that ends some of its answers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(chatml_tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=192, initializer_range=0.3,
        eos_token_id=chatml_tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).double(), chatml_tokenizer, name="small")


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (objects, or lines as they are) to a JSONL file and return its path."""

    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def chat_server(chatml_tokenizer: PreTrainedTokenizerFast) -> Iterator[ChatServer]:
    def count_tokens(messages: list[dict[str, str]]) -> int:
        text = chatml_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(chatml_tokenizer(text, add_special_tokens=False)["input_ids"])

    server = ChatServer(count_tokens)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def saved_target(small_target: Target, tmp_path: Path) -> Path:
    small_target.model.save_pretrained(tmp_path / "target")
    small_target.tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"
