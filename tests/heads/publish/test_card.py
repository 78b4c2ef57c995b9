"""The card: exact text, metadata that the hub takes, commands that exist, and nothing of the publisher's machine."""

import importlib
import json
import shlex

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData

import heads
from heads import HeadNotes
from heads.export.write import formats_of
from heads.publish.contents import read_contents
from heads.publish.stage import stage
from heads.publish.tables import base_name, measured_tables

OPTIONS = dict.fromkeys(("target", "engine", "tokens", "dtype", "llama_cpp"))
BACK = ["heads.adopt", "decode"]
VARIANTS = {
    "medusa": {},
    "medusa-own": {"own_lm_head": True},
    "medusa-own-small": {"own_lm_head": True, "draft_vocab_size": 5},
    "hydra": {},
    "eagle": {},
    "eagle-small": {"draft_vocab_size": 5},
    "eagle-bias": {"fc_bias": True},
    "eagle3": {},
    "eagle3-two": {"feature_layers": (2, 3)},
    "eagle3-before": {"norm_before_residual": True, "draft_vocab_size": 5},
}
MEDUSA = """\
# head

Medusa heads with 2,112 parameters for [someone/tiny](https://huggingface.co/someone/tiny) (fingerprint \
`FINGERPRINT`). Drafts several tokens at a time, of which the target keeps those that it would have written itself: \
its text comes faster, and stays its own.

The files are a head folder, which `decode` loads and `heads.export` makes others of.

## Use

```bash
python -m decode someone/tiny PROMPT --head jane/head
```

For other engines, export it first:

```bash
python -m heads.export jane/head exported --to medusa
# vLLM
vllm serve someone/tiny --speculative-config '{"method": "medusa", "model": "exported", "num_speculative_tokens": 2}'
```

## Measured

| drafts | temperature | tokens per step | speed-up | depth 1 | depth 2 |
| --- | --- | --- | --- | --- | --- |
| tree | 0 | 2.37 (2.07 to 2.71) | 1.36 | 0.72 | 0.54 (0.43 to 0.64) |
| chain | 0 | 1.50 |  |  |  |
| tree | 0.7 | 1.70 |  |  |  |

In brackets: the 95 % interval over prompts. Speed-up is over plain decoding, both with Gorgon's `decode` on the \
machine that trained. Depth d: how many of the drafts at depth d were accepted, where the one before was. Temperature \
0 is greedy.

Texts that differed from plain decoding's: 0.

## Training

| setting | value |
| --- | --- |
| `data.source` | answers.jsonl |
| `data.eval_prompts` | chat.jsonl, someone/prompts |
| `optim.lr` | 0.003 |
| `optim.epochs` | 2 |
| `vocabulary.size` | 5 |
| `vocabulary.coverage` | 0.9467 |

## Sizes

| size or setting | value |
| --- | --- |
| `hidden_size` | 32 |
| `vocab_size` | 320 |
| `draft_vocab_size` | 5 |
| `depth_decay` | 0.8 |
| `num_heads` | 2 |
| `num_layers` | 1 |
| `own_lm_head` | no |
| `losses.ce` | 0.2 |
| `losses.kl` | 0.8 |
| `chunk_size` | 256 |
| draft tree | depth 3, width 2, size 6 |
"""


@pytest.fixture
def stage_card(tmp_path):
    """Stage a publication as jane/head and return its card."""

    def make(folder, *, to=None, license=None, **options) -> str:
        out = tmp_path / "out" / f"{folder.name}-{to}-{'-'.join(map(str, options.values())).replace('/', '_')}"
        stage(folder, out, "jane/head", to=to, options={**OPTIONS, **options}, license=license)
        return (out / "README.md").read_text()

    return make


def commands(card: str) -> list[list[str]]:
    """The words of every command in a card."""
    blocks = card.split("```bash\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in lines]


def run(words: list[str]) -> str:
    """Parse a command as what it starts would, or look it up among those of other programs; and return its name."""
    if words[:2] == ["python", "-m"]:
        importlib.import_module(f"{words[2]}.__main__").parser().parse_args(words[3:])
        return words[2]
    if words[:2] == ["vllm", "serve"] and len(words) > 3:
        assert words[3] == "--speculative-config"
        config = json.loads(words[4])
        assert config["num_speculative_tokens"] >= 1
        return f"vllm {config['model']}"
    known = {"vllm serve", "sglang serve", "hf download", "python convert_hf_to_gguf.py", "llama-server -m"}
    assert " ".join(words[:2]) in known
    return " ".join(words[:2])


def test_the_card_of_known_heads_line_by_line(make_head, stage_card, target):
    folder = make_head(draft_vocab_size=5, num_heads=2, target_name="someone/tiny")
    metadata, card = stage_card(folder, license="mit").removeprefix("---\n").split("\n---\n\n")
    assert card == MEDUSA.replace("FINGERPRINT", target.fingerprint)
    assert sorted(metadata.splitlines()) == [
        *("- gorgon", "- medusa", "- speculative-decoding"),
        *("base_model: someone/tiny", "base_model_relation: adapter", "library_name: gorgon", "license: mit", "tags:"),
    ]


@pytest.mark.parametrize("to", [None, "eagle3"])
def test_the_hubs_library_reads_the_metadata(make_head, stage_card, to):
    data = ModelCard(stage_card(make_head("eagle3"), to=to)).data
    assert isinstance(data, ModelCardData)
    assert data.to_dict() == {"library_name": "gorgon", "tags": ["gorgon", "speculative-decoding", "eagle3"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formats_of_a_head_are_those_that_its_export_takes(make_head, model, tmp_path, variant):
    folder = make_head(variant.partition("-")[0], **VARIANTS[variant])
    if variant == "eagle-bias":
        weights = heads.load_head(folder, heads.publish.contents.RecordedTarget(folder))
        torch.nn.init.ones_(weights.fc.bias)
        heads.save_head(weights, folder, target=heads.publish.contents.RecordedTarget(folder))
    (tmp_path / "convert_hf_to_gguf.py").write_text(
        "import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('GGUF')"
    )
    taken = []
    for to in ("eagle3", "speculators", "gguf", "medusa", "eagle"):
        for engine in ("vllm", "sglang") if to == "eagle" else (None,):
            more = {"llama_cpp": tmp_path} if to == "gguf" else {}
            try:
                heads.export(folder, tmp_path / f"{to}-{engine}", to=to, engine=engine, target=model, **more)
            except ValueError:
                continue
            taken.append((to, engine))
    assert sorted(formats_of(read_contents(folder).head), key=str) == sorted(taken, key=str)


@pytest.mark.parametrize("named", ["someone/tiny", ""])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_command_of_a_head_folders_card_exists(make_head, stage_card, variant, named):
    folder = make_head(variant.partition("-")[0], target_name=named, **VARIANTS[variant])
    card = stage_card(folder)
    found = [run(words) for words in commands(card)]
    formats = formats_of(read_contents(folder).head)
    assert found.count("decode") == 1
    exports = [words for words in commands(card) if words[2:3] == ["heads.export"]]
    assert [words[words.index("--to") + 1] for words in exports] == [to for to, _ in formats]
    assert all(("--target" in words) == (named == "") for words in exports)
    assert ("No inference engine loads Hydra heads; " in card) == (variant == "hydra")
    assert ("`decode` loads it." in card) == (variant == "medusa-own-small")


@pytest.mark.parametrize(
    ("variant", "to", "options", "expected"),
    [
        ("medusa", "medusa", {}, ["vllm jane/head", *BACK]),
        (
            "eagle3",
            "eagle3",
            {},
            [
                *("vllm jane/head", "sglang serve", "python convert_hf_to_gguf.py", "python convert_hf_to_gguf.py"),
                *("llama-server -m", *BACK),
            ],
        ),
        ("eagle-small", "eagle", {"engine": "sglang"}, ["sglang serve", *BACK]),
        ("eagle", "eagle", {"engine": "vllm"}, ["vllm jane/head", *BACK]),
    ],
)
def test_an_export_is_served_by_its_name(make_head, stage_card, variant, to, options, expected):
    card = stage_card(make_head(variant.partition("-")[0], **VARIANTS[variant]), to=to, **options)
    assert [name for words in commands(card) if (name := run(words)) != "hf download"] == expected
    if variant == "eagle-small":
        assert "--speculative-draft-model-path jane/head" in card
        assert "--speculative-token-map jane/head/token_map.pt" in card
    if to == "eagle3":
        assert (
            "hf download jane/head --local-dir head\npython convert_hf_to_gguf.py head --target-model-dir TARGET"
            in card
        )
        assert "- OpenVINO GenAI takes the outputs of other layers" in card


def test_a_draft_models_card_serves_it_by_its_name(make_tiny_llama, tiny_tokenizer, stage_card, tmp_path):
    folder = tmp_path / "draft"
    make_tiny_llama().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    notes = {"target": {"name": "someone/tiny", "fingerprint": "f00"}, "training": {"seed": 1}, "measured": {}}
    (folder / "gorgon.json").write_text(json.dumps(notes))
    card = stage_card(folder)
    found = [run(words) for words in commands(card)]
    assert found == [
        *("decode", "vllm jane/head", "sglang serve", "hf download", "hf download"),
        *("python convert_hf_to_gguf.py", "python convert_hf_to_gguf.py", "llama-server -m"),
    ]
    parameters = sum(parameter.numel() for parameter in make_tiny_llama().parameters())
    assert f"A draft model with {parameters:,} parameters for [someone/tiny]" in card
    assert ModelCard(card).data.to_dict() == {
        "library_name": "transformers",
        "base_model": "someone/tiny",
        "tags": ["gorgon", "speculative-decoding", "draft-model"],
    }
    assert "| `seed` | 1 |" in card
    (folder / "gorgon.json").write_text('{"training": []}')
    with pytest.raises(ValueError, match=r"gorgon\.json: training must be objects"):
        read_contents(folder)


@pytest.mark.parametrize("to", [None, "medusa"])
def test_a_card_tells_nothing_of_the_publishers_folders(make_head, stage_card, model, to):
    notes = HeadNotes(training={"adopted from": "/home/jane/x/y", "deep": {"er": [r"C:\jane\file.txt", "~/z/w"]}})
    card = stage_card(make_head(notes=notes), to=to)
    assert "jane/x" not in card
    assert "C:" not in card
    assert "~" not in card
    assert str(model.parent) not in card
    assert model.name in card
    assert "| `deep.er` | file.txt, w |" in card


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b.jsonl", "b.jsonl"),
        ("/a/b/", "b"),
        ("a/b/c", "c"),
        ("data/mine.jsonl", "mine.jsonl"),
        ("models/tiny", "tiny"),
        ("../x", "x"),
        (r"C:\x\y", "y"),
        ("someone/dataset", "someone/dataset"),
        ("someone/dataset:train", "someone/dataset:train"),
        ("cosine", "cosine"),
        ("", ""),
    ],
)
def test_of_paths_the_end_is_shown(text, expected):
    assert base_name(text) == expected


def test_what_was_measured_on_several_sets_is_told_apart():
    measured = {
        "tokens_per_step": 2,
        "t1/tokens_per_step": 1.5,
        "a|b/chain/accept_rate/depth10": 0.25,
        "a|b/t1e-05/accept_rate/depth2": 0.5,
        "own/number": 3,
        "text": "x/y/z",
    }
    assert [line for line in measured_tables(measured) if line.startswith("|")] == [
        "| prompts | drafts | temperature | tokens per step | depth 2 | depth 10 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| all | tree | 0 | 2.00 |  |  |",
        "| all | tree | 1 | 1.50 |  |  |",
        r"| a\|b | chain | 0 |  |  | 0.25 |",
        r"| a\|b | tree | 1e-05 |  | 0.50 |  |",
        "| also measured | value |",
        "| --- | --- |",
        "| `own/number` | 3 |",
        "| `text` | z |",
    ]
    assert "In brackets" not in "".join(measured_tables(measured))
    assert measured_tables({}) == []
