"""Lookup that chooses its length decodes the text of plain decoding, wherever texts and rows end."""

from dataclasses import replace

import pytest

from decode import AdaptiveLookup, VerifyCosts, generate
from decode.costs import Cost


def sloped(slope: float) -> VerifyCosts:
    return VerifyCosts([Cost(1, 256, nodes, 1.0 + slope * (nodes - 1), 0.0, 0.0) for nodes in (1, 2, 4, 8, 16, 32)])


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalty"])
def test_the_text_is_plain_decodings_with_ragged_rows_and_ends_inside_blocks(
    tiny_target, prompts, samplings, slope, name
):
    proposer = AdaptiveLookup(sloped(slope))
    options = {"sampling": replace(samplings[name], seed=3), "max_new_tokens": 60}
    for some, ends in ((prompts, None), (prompts, (5, 17, 107, 214)), ([prompts[3] * 4], ())):
        plain = generate(tiny_target, some, eos_ids=ends, **options)
        found = generate(tiny_target, some, eos_ids=ends, proposer=proposer, check=slope == 0.1, **options)
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert all(f.finish_reason == p.finish_reason for f, p in zip(found, plain, strict=True))
        assert max(len(result.stats.accept_rates) for result in found) <= 32
    if name == "greedy" and slope < 0.5:
        assert found[0].stats.tokens_per_step > 1.8
        assert len(found[0].stats.accept_rates) > 8


def test_stop_strings_inside_drafts_end_the_text_where_plain_decoding_does(tiny_target, prompts):
    whole = generate(tiny_target, prompts[3], max_new_tokens=60, eos_ids=()).text
    for start in (9, 20, 33):
        options = {"stop": whole[start : start + 2], "max_new_tokens": 60, "eos_ids": ()}
        plain = generate(tiny_target, prompts[3], **options)
        found = generate(tiny_target, prompts[3], proposer=AdaptiveLookup(sloped(0.0)), **options)
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
