"""A target of random weights with a tokenizer of its own, and prompts for it.

    python tests/gpu/gpu_target.py FOLDER --prompts FILE --num 256

The tokenizer's tokens are words w0, w1, …, one each, so that what the target says reads back as the tokens that it
said. Its answers mean nothing, but most soon repeat themselves, which drafts can guess.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|unknown|>"]
ROLES = ["system", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "1b": {  # Llama-3.2-1B's
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    "small": {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    },
}
GAINS = {"1b": 0.7, "small": 0.8}
"""Of the layers' random products. Above 0.9 texts are chaotic, and no draft can guess; far below they are one word."""
LOGITS = 2.26
"""Standard deviation of the logits: some words are far likelier than others."""
LENGTHS = {"1b": (32, 512), "small": (4, 16)}
"""Fewest and most words of a prompt."""


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with a ChatML template; <|im_end|> ends a text."""
    words = [*SPECIAL, *ROLES]
    words += [f"w{number}" for number in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[1],
        unk_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_target(folder: Path, size: str) -> None:
    """Write a Llama of random weights in bfloat16, the same on every machine, and its tokenizer."""
    width = SHAPES[size]["hidden_size"]
    config = LlamaConfig(
        **SHAPES[size],
        initializer_range=GAINS[size] / width**0.5,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    embedding = model.get_input_embeddings().weight  # the lm_head's, too
    embedding.data.normal_(std=LOGITS / width**0.5)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model.save_pretrained(folder)
    make_tokenizer(config.vocab_size).save_pretrained(folder)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights in {folder}")


def write_prompts(path: Path, size: str, num: int) -> None:
    """Write prompts of random words, of lengths that are spread evenly over their logarithms."""
    chance = random.Random(0)
    fewest, most = LENGTHS[size]
    words = SHAPES[size]["vocab_size"] - len(SPECIAL) - len(ROLES)
    lines = []
    for number in range(num):
        length = round(fewest * (most / fewest) ** chance.random())
        text = " ".join(f"w{chance.randrange(words)}" for _ in range(length))
        lines.append(json.dumps({"id": f"g{number}", "messages": [{"role": "user", "content": text}]}) + "\n")
    path.write_text("".join(lines))


def main() -> None:
    """Run the command."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path)
    p.add_argument("--size", choices=SHAPES, default="1b")
    p.add_argument("--prompts", type=Path, required=True, help="file to write")
    p.add_argument("--num", type=int, default=256, help="prompts (default 256)")
    args = p.parse_args()
    write_prompts(args.prompts, args.size, args.num)
    make_target(args.folder, args.size)


if __name__ == "__main__":
    main()
