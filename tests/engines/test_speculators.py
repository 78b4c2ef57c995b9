"""The speculators library loads and converts our exports, and drafts what we draft."""

import engine_drafts
import pytest
import torch
from safetensors.torch import load_file

import heads
from heads import load_head

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
EAGLE3 = {"max_depth": 4, "unroll": 2, "feature_layers": (2, 3, 4)}
HEADS = {
    "small": {"draft_vocab_size": 160},
    "all": {"norm_before_residual": True},
    "layers": {"feature_layers": (1, 4, 6), "draft_vocab_size": 160},
}


def drafts(lab, head, run, *, layers, convert=None, converted=None):
    texts = [prompt + text for prompt, text in zip(lab.prompts, run.texts, strict=True)]
    behind = len(lab.prompts[0])
    steps = [[(place + behind, drafts) for place, drafts in row] for row in run.steps]
    job = {"model": lab.model, "head": str(head), "texts": texts, "steps": steps, "layers": layers}
    return engine_drafts.run_job("speculators_drafts.py", {**job, "convert": convert, "converted": str(converted)})


@pytest.mark.parametrize("name", HEADS)
def test_the_library_drafts_what_we_draft_from_our_folder_and_from_its_own_conversion(lab, tmp_path, name):
    options = EAGLE3 | HEADS[name]
    head = lab.trained("eagle3", f"speculators-{name}", **options)
    ours = lab.ours(head, 4)
    expected = [[drafts for _, drafts in row] for row in ours.steps]
    assert ours.tokens_per_step > 1.1
    layers = list(options["feature_layers"])
    assert drafts(lab, lab.export(head, "speculators"), ours, layers=layers) == expected

    said = {"norm_before_residual": options.get("norm_before_residual", False)}  # which it does not read
    said |= {"eagle_aux_hidden_state_layer_ids": layers}  # nor these
    theirs = tmp_path / "theirs"
    found = drafts(lab, lab.export(head, "eagle3"), ours, layers=layers, convert=said, converted=theirs)
    assert found == expected
    heads.adopt(theirs, tmp_path / "back", target=lab.model)
    weights = [load_file(folder / "model.safetensors") for folder in (head, tmp_path / "back")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
    assert load_head(tmp_path / "back", lab.target).feature_layers == tuple(layers)
