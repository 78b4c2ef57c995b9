"""The chat templates of the families that configs/ has recipes for: what is supervised, and what is refused."""

from pathlib import Path

import pytest
import transformers.utils.chat_template_utils as jinja
from masks import create_conversation, supervised_runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.conversations import encode_conversation
from data.questions import encode_prompt

TEMPLATES = Path(__file__).parents[1] / "assets" / "templates"
SPECIAL = {
    "llama-3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "qwen3": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
    "mistral-7b-v0.3": ["<s>", "</s>", "[INST]", "[/INST]"],
    "smollm2": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
}
"""Of each family, with the tokens that begin a text and end a turn first."""
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "What is a tree?"}
ANSWER = {"role": "assistant", "content": "A tree is a tall plant."}
HAIKU = {"role": "user", "content": "Write a haiku."}
RAIN = {"role": "assistant", "content": "Rain. é 🌧"}
THOUGHTS = "<think>\nIt is a plant.\nTall, too.\n</think>\n\nA tall plant."


def create_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tiny tokenizer of the family's kind, with its template and special tokens."""
    special, byte_level = SPECIAL[family], family != "mistral-7b-v0.3"
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [USER["content"], ANSWER["content"], HAIKU["content"], RAIN["content"][:5], THOUGHTS, SYSTEM["content"]]
    tokenizer.train_from_iterator(texts, trainer)
    first, end, *others = SPECIAL[family]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=first, eos_token=end, additional_special_tokens=others
    )
    if family == "qwen3":
        fast.add_tokens(["<think>", "</think>"])  # which are not special there
    fast.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return fast


@pytest.fixture(scope="module", params=SPECIAL)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    return create_tokenizer(family)


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedTokenizerFast:
    return create_tokenizer("qwen3")


def test_supervised_is_what_the_target_says_and_the_end_of_its_turn(family, tokenizer):
    end = SPECIAL[family][1]
    thoughts = "<think>\n\n</think>\n\n" if family == "qwen3" else ""  # the target has to write these itself
    runs = supervised_runs(create_conversation([USER, ANSWER]), tokenizer)
    assert runs == [f"{thoughts}A tree is a tall plant.{end}"]
    runs = supervised_runs(create_conversation([USER, ANSWER, HAIKU, RAIN]), tokenizer, turns="last")
    assert runs == [f"{thoughts}Rain. é 🌧{end}"]


def test_all_turns_are_supervised_where_the_template_keeps_them(family, tokenizer):
    conversation = create_conversation([USER, ANSWER, HAIKU, RAIN])
    if family == "qwen3":
        with pytest.raises(ValueError, match=r"turn 2 differently once more turns follow.*--data\.turns=last"):
            supervised_runs(conversation, tokenizer)
    else:
        end = SPECIAL[family][1]
        assert supervised_runs(conversation, tokenizer) == [f"A tree is a tall plant.{end}", f"Rain. é 🌧{end}"]


def test_a_cut_answer_has_no_end(family, tokenizer):
    runs = supervised_runs(create_conversation([USER, ANSWER], finish_reason="length"), tokenizer)
    assert runs == ["A tree is a tall plant."]


def test_a_system_message_is_not_supervised_and_refused_where_the_template_forgets_it(family, tokenizer):
    conversation = create_conversation([SYSTEM, USER, ANSWER])
    if family == "mistral-7b-v0.3":
        with pytest.raises(ValueError, match=r"generation prompt .* does not begin turn 3"):
            supervised_runs(conversation, tokenizer, turns="last")
    else:
        (run,) = supervised_runs(conversation, tokenizer)
        assert run.endswith(f"A tree is a tall plant.{SPECIAL[family][1]}")
        assert "kind" not in run


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_the_text_up_to_the_answer_is_the_prompt_that_generation_sees(family, tokenizer, finish_reason):
    prompt = encode_prompt(create_conversation([USER]), tokenizer)
    encoded = encode_conversation(
        create_conversation([USER, ANSWER], finish_reason=finish_reason), tokenizer, max_length=1000
    )
    assert encoded.token_ids[: len(prompt)] == prompt
    assert encoded.loss_mask.index(True) == len(prompt)


def test_the_date_in_a_template_is_not_that_of_the_day_it_is_used(monkeypatch):
    tokenizer, conversation = create_tokenizer("llama-3"), create_conversation([USER, ANSWER])
    today = encode_conversation(conversation, tokenizer, max_length=1000)

    class Tomorrow:
        @staticmethod
        def now():
            raise AssertionError("the clock was asked")

    monkeypatch.setattr(jinja, "datetime", Tomorrow)
    jinja._compile_jinja_template.cache_clear()
    assert encode_conversation(conversation, tokenizer, max_length=1000) == today
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(today.token_ids)
    with pytest.raises(AssertionError, match="clock"):
        tokenizer.apply_chat_template([USER], tokenize=False)


def test_thoughts_are_supervised_with_the_answer(qwen3):
    answer = {"role": "assistant", "content": THOUGHTS}
    assert supervised_runs(create_conversation([USER, answer]), qwen3) == [f"{THOUGHTS}<|im_end|>"]
    runs = supervised_runs(create_conversation([USER, answer, HAIKU, RAIN]), qwen3, turns="last")
    assert runs == ["<think>\n\n</think>\n\nRain. é 🌧<|im_end|>"]


@pytest.mark.parametrize("length", [8, 20, 45, 52, len(THOUGHTS)])
def test_thoughts_that_were_cut_stand_as_they_were_written(qwen3, length):
    answer = {"role": "assistant", "content": THOUGHTS[:length]}
    conversation = create_conversation([USER, answer], finish_reason="length")
    assert supervised_runs(conversation, qwen3, turns="last") == [THOUGHTS[:length]]
    encoded = encode_conversation(conversation, qwen3, max_length=1000)
    prompt = qwen3.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert qwen3.decode(encoded.token_ids).startswith(prompt + THOUGHTS[:length])


def test_a_template_told_not_to_think_supervises_the_answer_alone(qwen3, monkeypatch):
    monkeypatch.setattr(qwen3, "chat_template", "{%- set enable_thinking = false %}\n" + qwen3.chat_template)
    for messages in ([USER, ANSWER], [HAIKU, RAIN, USER, ANSWER]):
        runs = supervised_runs(create_conversation(messages), qwen3, turns="last")
        assert runs == ["A tree is a tall plant.<|im_end|>"]
    cut = create_conversation([USER, ANSWER], finish_reason="length")
    assert supervised_runs(cut, qwen3) == ["A tree is a tall plant."]
