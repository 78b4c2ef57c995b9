"""vLLM loads every format, writes the target's text, and drafts what we draft."""

import engine_drafts
import pytest

import heads

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
EAGLE = {"max_depth": 4}
EAGLE3 = {"max_depth": 4, "unroll": 2, "feature_layers": (2, 3, 4)}
HEADS = {
    "medusa": ("medusa", "medusa", {"num_heads": 4}),
    "medusa-own": ("medusa", "medusa", {"num_heads": 3, "num_layers": 2, "own_lm_head": True}),
    "eagle": ("eagle", "eagle", EAGLE),
    "eagle3": ("eagle3", "eagle3", {**EAGLE3, "draft_vocab_size": 160}),
    "eagle3-all": ("eagle3", "eagle3", {**EAGLE3, "own_lm_head": False, "norm_before_residual": True}),
    "eagle3-layers": ("eagle3", "eagle3", {**EAGLE3, "feature_layers": (1, 4, 7)}),
    "speculators": ("eagle3", "speculators", {**EAGLE3, "draft_vocab_size": 160}),
}
"""Type, format and options of each head."""


ROWS = [1, 5]
"""Prompts decoded together."""


def assert_same(lab, ours, model, speculative):
    runs = engine_drafts.vllm(model, lab.prompts, speculative=speculative, rows=ROWS, max_new_tokens=len(lab.texts[0]))
    assert ours.texts == lab.texts
    for theirs in runs:
        assert theirs.texts == lab.texts
        assert theirs.steps == ours.steps
    assert ours.tokens_per_step > 1.1


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head_drafts_in_vllm_what_it_drafts_here_at_every_step(lab, name):
    kind, to, options = HEADS[name]
    head = lab.trained(kind, name, **options)
    tokens = options.get("num_heads", 4)
    out = lab.export(head, to, **({"engine": "vllm"} if to == "eagle" else {}))
    method = "eagle3" if to == "speculators" else to
    speculative = {"method": method, "model": str(out), "num_speculative_tokens": tokens}
    assert_same(lab, lab.ours(head, tokens), lab.model, speculative)


def test_a_draft_model_drafts_in_vllm_what_it_drafts_here_at_every_step(lab):
    model = lab.trained_model("draft")
    speculative = {"method": "draft_model", "model": str(lab.export(model, "hf")), "num_speculative_tokens": 3}
    assert_same(lab, lab.ours(model, 3), lab.model, speculative)


def test_a_speculators_folder_is_served_by_its_name_alone(lab):
    head = lab.trained("eagle3", "alone", **EAGLE3)
    assert_same(lab, lab.ours(head, 2), str(lab.export(head, "speculators", tokens=2)), None)


@pytest.mark.parametrize(("kind", "options"), [("medusa", {"num_heads": 3}), ("eagle", {"max_depth": 3})])
def test_where_vllm_has_no_draft_vocabulary_it_drafts_from_all_tokens_as_the_export_says(lab, kind, options):
    head, engine = lab.trained(kind, f"{kind}-small", draft_vocab_size=160, **options), {}
    if kind == "eagle":
        engine = {"engine": "vllm"}
    out = lab.export(head, kind, **engine)
    assert any("from all tokens" in note for note in heads.export(head, out, to=kind, target=lab.model, **engine))
    speculative = {"method": kind, "model": str(out), "num_speculative_tokens": 3}
    assert_same(lab, lab.ours(head, 3, all_tokens=True), lab.model, speculative)
    assert lab.ours(head, 3).steps != lab.ours(head, 3, all_tokens=True).steps
