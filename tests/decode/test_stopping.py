"""Where a row ends, token by token, against decoding the whole text anew each time."""

import random

import pytest

from decode.stopping import Stopper

END, OTHER = 1, 0  # special tokens: no text


def slow(tokenizer, tokens, eos, stop, limit) -> tuple[int, str, str | None]:
    """Tokens taken, text and reason, from the definition."""

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    for taken in range(1, len(tokens) + 1):
        text = decode(tokens[:taken])
        if tokens[taken - 1] in eos:
            return taken, text, "eos"
        found = [text.find(s) for s in stop if s in text]
        if found:
            return taken, text[: min(found)], "stop"
        if taken == limit:
            return taken, text, "length"
    return len(tokens), decode(tokens), None


@pytest.mark.parametrize("seed", range(30))
def test_random_texts_in_random_blocks_end_where_the_definition_says(tiny_tokenizer, seed):
    chance = random.Random(seed)
    text = "".join(chance.choice("ab é😀猫the cat\n") for _ in range(40))
    tokens = tiny_tokenizer(text)["input_ids"]
    for _ in range(chance.randrange(4)):
        tokens.insert(
            chance.randrange(len(tokens)), chance.choice([END, OTHER, *range(130, 200)])
        )  # broken characters too
    stop = [text[i : i + chance.randint(1, 6)] for i in (chance.randrange(39) for _ in range(chance.randrange(3)))]
    eos = frozenset({END} if seed % 2 else {END, tokens[17], 99})
    limit = chance.choice([1, 5, len(tokens), 100])
    taken, wanted, reason = slow(tiny_tokenizer, tokens, eos, stop, limit)
    stopper = Stopper(tiny_tokenizer, eos, stop, limit)
    place, pieces = 0, ""
    while place < len(tokens) and stopper.reason is None:
        block = tokens[place : place + chance.randint(1, 6)]
        accepted = stopper.add(block)
        assert accepted == block[: len(accepted)]
        assert len(accepted) == len(block) or stopper.reason is not None
        place += len(block)
        assert stopper.remaining == limit - len(stopper.token_ids) >= 0
        stable = stopper.stable_text()
        assert stable.startswith(pieces)  # what was given out stays
        pieces = stable
    assert stopper.token_ids == tokens[:taken]
    assert stopper.reason == reason
    assert stopper.text() == wanted
    if reason is not None:
        assert pieces == wanted


def test_a_stop_string_is_found_across_special_tokens(tiny_tokenizer):
    """Special tokens have no text: letters that are far apart in tokens can be neighbours in the text."""
    letters = [tiny_tokenizer(letter)["input_ids"][0] for letter in "xyz"]
    for between in range(12):
        stopper = Stopper(tiny_tokenizer, frozenset(), ["xyz"], 100)
        stopper.add([letters[0], *[OTHER] * between, letters[1], *[OTHER] * between, letters[2], letters[0]])
        assert (stopper.text(), stopper.reason) == ("", "stop"), between


def test_beginnings_of_stop_strings_and_of_characters_are_held_back(tiny_tokenizer):
    stopper = Stopper(tiny_tokenizer, frozenset({END}), ["<end>", "é!"], 100)
    stable = ""
    for token, held in zip(tiny_tokenizer("a<en<e")["input_ids"], ["", "<", "<e", "<en", "<", "<e"], strict=True):
        stopper.add([token])
        assert stopper.stable_text() == stopper.text().removesuffix(held)
        stable = stopper.stable_text()
    assert stable == "a<en"
    for token in tiny_tokenizer("😀é")["input_ids"]:
        stopper.add([token])
        assert "\N{REPLACEMENT CHARACTER}" not in stopper.stable_text()
    assert stopper.stable_text() == "a<en<e😀"
    stopper.add([END])
    assert stopper.stable_text() == "a<en<e😀é"
    assert stopper.reason == "eos"


def test_text_that_is_no_utf8_is_given_in_the_end(tiny_tokenizer):
    broken = tiny_tokenizer("😀")["input_ids"][:2]
    stopper = Stopper(tiny_tokenizer, frozenset(), [], 2)
    stopper.add(broken[:1])
    assert stopper.stable_text() == ""
    stopper.add(broken[1:])
    assert stopper.reason == "length"
    assert stopper.stable_text() == tiny_tokenizer.decode(broken)


def test_nothing_after_the_end_is_taken(tiny_tokenizer):
    stopper = Stopper(tiny_tokenizer, frozenset({END, 7}), [], 5)
    assert stopper.add([50, 51, 7, END, 52]) == [50, 51, 7]
    stopper = Stopper(tiny_tokenizer, frozenset({END}), [], 2)
    assert stopper.add([50, 51, END]) == [50, 51]
    assert stopper.reason == "length"
    stopper = Stopper(tiny_tokenizer, frozenset({END}), [], 2)
    assert stopper.add([50, END]) == [50, END]
    assert stopper.reason == "eos"


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string():
    stopper = Stopper(None, frozenset({END}), [], 3)
    assert stopper.add([5, 6, END]) == [5, 6, END]
    assert (stopper.text(), stopper.stable_text(), stopper.reason) == ("", "", "eos")
    with pytest.raises(ValueError, match="need a tokenizer"):
        Stopper(None, frozenset(), ["x"], 3)


def test_empty_stop_strings_are_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="empty"):
        Stopper(tiny_tokenizer, frozenset(), ["ok", ""], 3)
