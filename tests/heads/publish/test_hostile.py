"""What others wrote into a head's notes does not become Markdown, and nothing goes up that is nobody's business."""

import pytest

from heads import HeadNotes
from heads.publish.__main__ import main

NOTES = HeadNotes(
    training={
        "data.source": "a\n\n# Free money\n| x |",
        "a`b\n# c": "<img src=x> ![y](z) `code`",
        "data.mix": ["one|two", "three\nfour"],
    },
    measured={"t1.2.3/tokens_per_step": 2.0, "x\n# y/tokens_per_step": 1.5, "tokens_per_step": 2.5},
    tree={"depth": 3, "width|\n# no": 2},
)


def card_of(folder):
    return (folder / "README.md").read_text()


def test_notes_are_text_in_one_line_each(make_head, tmp_path):
    folder = make_head(notes=NOTES, target_name="[x]\n# theirs")
    assert main([str(folder), "jane/head", "--dry-run", str(tmp_path / "out")]) == 0
    lines = card_of(tmp_path / "out").splitlines()
    assert [line for line in lines if line.startswith("#") and line != "# vLLM"] == [
        "# head",
        "## Use",
        "## Measured",
        "## Training",
        "## Sizes",
    ]
    assert any(r"for \[x\] # theirs (fingerprint `" in line for line in lines)
    assert r"| `data.source` | a # Free money \| x \| |" in lines
    assert r"| `a b # c` | \<img src=x\> !\[y\](z) \`code\` |" in lines
    assert r"| `data.mix` | one\|two, three four |" in lines
    assert any(r"width\| # no 2" in line for line in lines)
    assert "| `x # y/tokens_per_step` | 1.5 |" in lines
    assert "| t1.2.3 | tree | 0 | 2.00 |" in lines  # no temperature: a name


@pytest.mark.parametrize(
    "name", ["jane/-head", "jane/head.", "jane/a--b", "jane/a..b", "jane/head.git", "jane/" + "x" * 97]
)
def test_names_that_the_hub_refuses_are_refused_before(make_head, tmp_path, capsys, name):
    assert main([str(make_head()), name, "--dry-run", str(tmp_path / "out")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"{name!r} is no name of a repository; give USER/NAME" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("tags: 5", "is no model card"),
        ("tags: notgorgon", "among the tags"),
        ("- gorgon", "is no model card"),
        ("1: 2", "is no model card"),
        ("tags: [gorgon\nx: {", "is no model card"),
    ],
)
def test_cards_of_ones_own_with_other_metadata_are_one_line(make_head, tmp_path, capsys, metadata, message):
    (tmp_path / "card.md").write_text(f"---\n{metadata}\n---\n# Mine\n")
    command = [str(make_head()), "jane/head", "--dry-run", str(tmp_path / "out"), "--card", str(tmp_path / "card.md")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_what_lies_beside_a_draft_model_stays_and_only_the_publisher_is_told(make_tiny_llama, tmp_path, capsys):
    folder, out = tmp_path / "draft", tmp_path / "out"
    make_tiny_llama().save_pretrained(folder)
    (folder / "checkpoint-7").mkdir()
    (folder / "link.txt").symlink_to(tmp_path / "key.txt")
    for name in ("optimizer.pt", "secrets.json", "checkpoint-7/model.safetensors", "../key.txt"):
        (folder / name).write_text("x")
    assert main([str(folder), "jane/draft", "--dry-run", str(out)]) == 0
    names = sorted(file.name for file in out.iterdir())
    assert names == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    left = "not copied, as no engine reads it of a model: checkpoint-7/, link.txt, optimizer.pt, secrets.json"
    assert f"note: {left}\n" in capsys.readouterr().out
    assert "secrets" not in card_of(out)


def test_ctrl_c_and_a_full_standard_output_are_one_line(make_head, tmp_path, monkeypatch, capsys):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("heads.publish.__main__.stage", stop)
    assert main([str(make_head()), "jane/head", "--dry-run", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "\nstopped\n"
    monkeypatch.undo()

    class Full:
        def write(self, text):
            raise OSError("No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert main([str(make_head()), "jane/head", "--dry-run", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: No space left on device\n"
