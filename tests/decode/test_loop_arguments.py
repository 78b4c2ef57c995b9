"""What cannot be honoured is a ValueError before anything is decoded; prompts of every kind are understood."""

import pytest

from decode import Chain, PromptLookup, Sampling, StaticTree, Target, generate, stream
from decode.session import Session
from heads import create_head, save_head
from heads.medusa import MedusaConfig


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """Names of the target passes that a session makes."""
    made: list[str] = []
    prefill, score = Session.prefill, Session.score
    monkeypatch.setattr(Session, "prefill", lambda *args: (made.append("prefill"), prefill(*args))[1])
    monkeypatch.setattr(Session, "score", lambda *args: (made.append("score"), score(*args))[1])
    return made


GOOD = [5, 6, 7]
BAD = {
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    "negative limit": ({"max_new_tokens": -5}, "max_new_tokens must be at least 1"),
    "empty batch": ({"prompts": []}, "empty"),
    "empty text": ({"prompts": ""}, "empty"),
    "blank text": ({"prompts": " \n "}, "empty"),
    "empty row": ({"prompts": [[5], []]}, "empty"),
    "empty text in a batch": ({"prompts": ["one", ""]}, "empty"),
    "long prompt": ({"prompts": [GOOD, [5] * 256]}, "prompt 1 has 256 tokens, but the target's context is 256"),
    "longer prompt": ({"prompts": [5] * 300}, "prompt 0 has 300 tokens"),
    "id too large": ({"prompts": [5, 320]}, r"token ids must be in \[0, 320\), got \[320\]"),
    "negative id": ({"prompts": [[5], [-1]]}, r"got \[-1\]"),
    "head and proposer": ({"head": "HEAD", "proposer": PromptLookup()}, "one of head, draft_model and proposer"),
    "grow without head": ({"grow": Chain(2)}, "neither was given"),
    "grow with proposer": ({"grow": Chain(2), "proposer": PromptLookup()}, "grow"),
    "deep tree": ({"head": "HEAD", "grow": Chain(4)}, "4 deep, but the head drafts 3"),
    "unknown rule": ({"accept": "sloppy"}, "accept must be one of .*'sloppy'"),
    "too few seeds": ({"prompts": [GOOD, GOOD], "sampling": Sampling(seed=[1])}, "1 seeds for 2 prompts"),
    "too many seeds": ({"sampling": Sampling(seed=[1, 2])}, "2 seeds for 1 prompts"),
    "no seeds": ({"sampling": Sampling(temperature=1.0, seed=[])}, "0 seeds for 1 prompts"),
    "empty stop string": ({"stop": ["a", ""]}, "stop string is empty"),
    "no head folder": ({"head": "no/such/folder"}, "not a head folder"),
}


@pytest.mark.parametrize("verb", [generate, stream])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named_before_any_pass(tiny_target, tiny_head, passes, name, verb):
    arguments, message = BAD[name]
    arguments = {"prompts": GOOD, **arguments}
    if arguments.get("head") == "HEAD":
        arguments["head"] = tiny_head
    prompts = arguments.pop("prompts")
    with pytest.raises(ValueError, match=message):
        verb(tiny_target, prompts, **arguments)
    assert not passes


def test_what_needs_a_tokenizer_says_so(tiny_target, passes):
    bare = Target(tiny_target.model)
    passes.clear()
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generate(bare, GOOD, stop=["x"])
    with pytest.raises(ValueError, match="text prompt needs a tokenizer"):
        generate(bare, "hello")
    assert not passes
    result = generate(bare, GOOD, max_new_tokens=3, eos_ids=())
    assert (result.text, len(result.token_ids)) == ("", 3)


def test_messages_need_a_chat_template(tiny_target, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="chat template"):
        generate(tiny_target, [{"role": "user", "content": "hi"}])
    assert generate(tiny_target, "the cat", max_new_tokens=1).prompt_ids == tiny_tokenizer("the cat")["input_ids"]


def test_text_messages_and_ids_of_one_prompt_are_the_same(tiny_target, tiny_tokenizer):
    messages = [{"role": "user", "content": "the cat"}]
    rendered = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    ids = tiny_tokenizer(rendered, add_special_tokens=False)["input_ids"]
    kinds = ["the cat", messages, ids, tuple(ids)]
    for prompt in kinds:
        result = generate(tiny_target, prompt, max_new_tokens=4)
        assert result.prompt_ids == ids
    batch = generate(tiny_target, kinds, max_new_tokens=4)
    assert isinstance(batch, list)
    assert [result.prompt_ids for result in batch] == [ids] * 4
    assert len({tuple(result.token_ids) for result in batch}) == 1
    (one,) = generate(tiny_target, [ids], max_new_tokens=4)
    assert one.token_ids == batch[0].token_ids
    raw = generate(tiny_target, "the cat", raw=True, max_new_tokens=4)
    assert raw.prompt_ids == tiny_tokenizer("the cat")["input_ids"]


def test_results_come_in_the_order_of_the_batch_whatever_ends_first(tiny_target):
    prompts = [[i] for i in range(30, 38)]
    whole = generate(tiny_target, prompts, max_new_tokens=9, eos_ids=())
    ends = {result.token_ids[position] for position, result in enumerate(whole[:6])}
    results = generate(tiny_target, prompts, max_new_tokens=9, eos_ids=sorted(ends))
    assert [result.prompt_ids for result in results] == prompts
    assert len({len(result.token_ids) for result in results}) > 2
    last = [delta for delta in stream(tiny_target, prompts, max_new_tokens=9, eos_ids=sorted(ends)) if delta.result]
    assert sorted(delta.row for delta in last) == list(range(8))


def test_a_head_may_be_a_folder_and_brings_its_tree(tiny_target, tiny_head, tmp_path):
    from heads import HeadNotes

    save_head(tiny_head, tmp_path / "chain", target=tiny_target)
    save_head(tiny_head, tmp_path / "tree", target=tiny_target, notes=HeadNotes(tree=[[0], [1], [1, 0]]))
    plain = generate(tiny_target, GOOD, max_new_tokens=8, eos_ids=())
    for folder, depth in (("chain", 3), ("tree", 2)):
        for path in (tmp_path / folder, str(tmp_path / folder)):
            result = generate(tiny_target, GOOD, head=path, max_new_tokens=8, eos_ids=())
            assert result.token_ids == plain.token_ids
            assert 1 <= len(result.stats.offered) <= depth
    save_head(tiny_head, tmp_path / "deep", target=tiny_target, notes=HeadNotes(tree=[[0], [0, 0], [0, 0, 0], [0] * 4]))
    with pytest.raises(ValueError, match="4 deep, but the head drafts 3"):
        generate(tiny_target, GOOD, head=tmp_path / "deep")


def test_a_head_in_another_precision_than_the_target_drafts(tiny_target, prompts):
    config = MedusaConfig(hidden_size=32, vocab_size=320, num_heads=2)
    plain = [result.token_ids for result in generate(tiny_target, prompts, max_new_tokens=8, eos_ids=())]
    for own in (False, True):
        head = create_head("medusa", MedusaConfig(**{**vars(config), "own_lm_head": own}), tiny_target)
        results = generate(tiny_target, prompts, head=head.bfloat16(), max_new_tokens=8, eos_ids=())
        assert [result.token_ids for result in results] == plain


def test_a_tree_of_the_root_alone_is_plain_decoding(tiny_target, tiny_head, prompts):
    plain = generate(tiny_target, prompts, max_new_tokens=8, eos_ids=())
    bare = generate(tiny_target, prompts, head=tiny_head, grow=StaticTree(()), max_new_tokens=8, eos_ids=())
    assert [result.token_ids for result in bare] == [result.token_ids for result in plain]
    assert all(result.stats.steps == 7 and not result.stats.offered for result in bare)
