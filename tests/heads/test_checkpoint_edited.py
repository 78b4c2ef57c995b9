"""Head folders that somebody edited: an error that names the folder and the key, never a head that drafts nonsense."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import create_head, head_class, load_head, read_notes, save_head
from train.new_head import target_sizes

VOCABULARY = torch.tensor([1, *range(20, 320, 7)])


@pytest.fixture
def folder(tiny_target, tmp_path):
    """A folder of an EAGLE-3 head, whose config has fields of all types."""
    config = head_class("eagle3").Config
    options = {"feature_layers": (1, 2), "draft_vocab_size": len(VOCABULARY)}
    head = create_head("eagle3", config(**options, **target_sizes(tiny_target, config)), tiny_target)
    head.set_vocabulary(VOCABULARY)
    save_head(head, tmp_path / "my-head", target=tiny_target)
    return tmp_path / "my-head"


def edit(folder, section, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[section] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def test_a_config_is_read_as_it_was_written(tiny_target, folder):
    config = load_head(folder, tiny_target).config
    assert (config.feature_layers, config.max_depth, config.losses) == ((1, 2), 8, {"kl": 1.0})
    edit(folder, "config", depth_decay=1, losses={"ce": 1, "kl": 0.5})  # whole numbers are numbers
    assert load_head(folder, tiny_target).config.depth_decay == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("feature_layers", value) for value in ("ab", ["1", "2"], [1, 2.0], 2, None, [True, 2], [[1], 2])),
        *(("rope_theta", value) for value in ("10000", None, True, [1e4])),
        *(("max_depth", value) for value in ("3", 3.0, True, None)),
        *(("own_lm_head", value) for value in (1, "true", None)),
        *(("losses", value) for value in ("kl", [["kl", 1]], {"kl": "1"}, {"kl": None}, None)),
        *(("draft_vocab_size", value) for value in ("44", 44.0, [44], True)),
        *(("hidden_size", value) for value in ("32", 32.0, {})),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_named_with_its_folder(tiny_target, folder, key, value):
    edit(folder, "config", **{key: value})
    with pytest.raises(ValueError, match=rf"my-head/config\.json .*: {key} must be of type .*, got") as error:
        load_head(folder, tiny_target)
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rope_theta", value) for value in (0, -1e4, float("nan"), float("inf"))),
        *((key, value) for key in ("head_dim", "num_key_value_heads", "intermediate_size") for value in (0, -8)),
        *(("feature_layers", value) for value in ([2, 1], [1, 1], [0, 2], [])),
        ("intermediate_size", 2**50),  # more than there is memory for
    ],
    ids=str,
)
def test_a_value_that_makes_no_head_is_refused_with_the_folder(tiny_target, folder, key, value):
    edit(folder, "config", **{key: value})
    with pytest.raises(ValueError, match=r"my-head") as error:
        load_head(folder, tiny_target)
    assert key in str(error.value) or value == 2**50


@pytest.mark.parametrize(
    "vocabulary",
    [
        *(VOCABULARY + 1000, VOCABULARY - 1000, torch.zeros_like(VOCABULARY), VOCABULARY.flip(0)),
        VOCABULARY.double() / 20,  # which become ids that repeat
    ],
    ids=["beyond", "negative", "all-the-same", "falling", "fractions"],
)
def test_a_draft_vocabulary_that_the_target_has_not_is_refused(tiny_target, folder, vocabulary):
    weights = load_file(folder / "model.safetensors") | {"vocabulary": vocabulary}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"my-head/model\.safetensors is damaged: draft ids must be distinct"):
        load_head(folder, tiny_target)


def test_checking_the_vocabulary_leaves_the_trained_projection_alone(tiny_target, folder):
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.startswith("projection"))
    weights[name] = torch.randn_like(weights[name])
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(load_head(folder, tiny_target).state_dict()[name], weights[name])


@pytest.mark.parametrize("fields", [{"name": 5}, {"name": None}, {"fingerprint": ["a"]}], ids=str)
def test_a_target_that_is_not_named_is_refused(folder, fields):
    edit(folder, "target", **fields)
    with pytest.raises(ValueError, match=r"my-head/config\.json: `target` must hold the name and the fingerprint"):
        read_notes(folder)


@pytest.mark.parametrize("old", ["head_decay", "step_decay"])
def test_fields_by_their_old_names_are_refused_with_the_new(tiny_target, folder, old):
    config = json.loads((folder / "config.json").read_text())
    config["config"][old] = config["config"].pop("depth_decay")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="are depth_decay now: rename it"):
        load_head(folder, tiny_target)


def test_weights_that_may_not_be_read_are_not_called_missing(tiny_target, folder, monkeypatch):
    open_path = Path.open

    def refuse(self, *arguments, **options):
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return open_path(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"model\.safetensors"):
        load_head(folder, tiny_target)
