"""The benchmark compares every text with plain decoding's, and says so when one differs."""

import json
from pathlib import Path

import pytest
import torch

from decode import Sampling, generate
from decode.bench import compare, main, profile, summarise
from decode.measure import Answer, Result, write_report
from decode.methods import HF_PACKED, methods, select
from decode.results import Stats
from heads import HeadNotes, save_head


@pytest.fixture
def folder(tiny_target, tiny_head, tmp_path):
    save_head(tiny_head, tmp_path / "head", target=tiny_target, notes=HeadNotes(tree=((0,), (1,), (0, 0))))
    return tmp_path / "head"


def test_all_methods_give_plain_text_and_are_counted(tiny_target, folder):
    sampling = Sampling(seed=0)
    runs = methods(tiny_target, [str(folder)], sampling=sampling, max_new_tokens=12, lookup=3)
    assert list(runs) == [
        *("plain", "prompt lookup", "medusa tree 4", "medusa chain 3", "medusa chain 4"),
        "transformers",  # float64 layers are not packed, so there is one way to run it
    ]
    sets = {"a": [[5, 6, 7], [8, 9]], "b": [[10, 11, 12, 13]]}
    results = compare(tiny_target, runs, sets, sampling)
    rows = summarise(results)
    assert len(rows) == len(runs) * 3
    assert all(row["unexcused"] == row["near_ties"] == 0 for row in rows)
    everything = [row for row in rows if row["prompts"] == "all"]
    assert all(row["identical"] == "3/3" for row in everything)
    plain = everything[0]
    assert plain["tokens_per_step"] == 1.0
    assert plain["speed-up over plain"] == 1.0
    for shares in profile(results).values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)


def test_the_order_of_the_methods_rotates_from_prompt_to_prompt(tiny_target):
    order = []

    def method(name):
        def run(ids):
            order.append(name)
            return [5], Stats(tokens=1)

        return run

    runs = {name: method(name) for name in ("plain", "other", "third")}
    compare(tiny_target, runs, {"a": [[5], [6], [7], [8]]}, Sampling(seed=0))
    assert " ".join(order[3:]) == "plain other third other third plain third plain other plain other third"


def test_a_wrong_text_is_reported_and_not_excused(tiny_target):
    def right(ids):
        out = generate(tiny_target, ids, max_new_tokens=6)
        return out.token_ids, out.stats

    def wrong(ids):
        tokens, stats = right(ids)
        return [*tokens[:2], (tokens[2] + 1) % 320, *tokens[3:]], stats

    results = compare(tiny_target, {"plain": right, "wrong": wrong}, {"a": [[5, 6, 7]]}, Sampling(seed=0))
    assert [result.unexcused for result in results] == [0, 1]
    assert "token 2" in results[1].differences[0]
    assert "NOT a tie" in results[1].differences[0]


def test_rates_are_over_all_tokens_and_seconds():
    slow = Result("plain", "a", [Answer(2.0, 4, Stats(tokens=4, steps=3, seconds=2.0))] * 2)
    fast = Result("fast", "a", [Answer(1.0, 4, Stats(tokens=4, steps=1, seconds=1.0))] * 2)
    rows = summarise([slow, fast])
    assert [(row["tokens_per_step"], row["speed-up over plain"]) for row in rows] == [(1, 1), (3, 2)]
    assert HF_PACKED not in str(rows)


def test_methods_are_chosen_by_the_beginnings_of_their_names():
    runs = dict.fromkeys(("plain", "prompt lookup", "medusa chain 2", "medusa tree 4"))
    assert list(select(runs, None)) == list(runs)
    assert list(select(runs, ["medusa tree", "prompt"])) == ["plain", "prompt lookup", "medusa tree 4"]
    with pytest.raises(ValueError, match="no method begins with"):
        select(runs, ["eagle"])


def test_the_command_writes_its_numbers_and_refuses_bad_input(tiny_target, tiny_tokenizer, tmp_path, capsys):
    model = tmp_path / "target"
    tiny_target.model.save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"turns": ["one two"]}\n')
    arguments = [str(model), "--prompts", str(prompts), "--max-new-tokens", "8", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path / "out" / "bench.json")]) == 0
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert report["command"].startswith("python -m decode.bench")
    assert report["machine"]["torch"] == torch.__version__
    assert {row["method"] for row in report["rows"]} == {"plain", "prompt lookup", "transformers"}
    assert "| plain " in capsys.readouterr().out
    assert main([*arguments, "--out", str(tmp_path)]) == 2  # before anything is decoded
    assert main([*arguments, "--num", "-1"]) == 2
    assert main([*arguments, "--out", "/dev/full"]) == 2
    assert '"raw": [' in capsys.readouterr().out
    model_with_a_short_context = tiny_target.model.config.max_position_embeddings
    tiny_target.model.config.max_position_embeddings = 10
    tiny_target.model.save_pretrained(tmp_path / "short")
    tiny_target.model.config.max_position_embeddings = model_with_a_short_context
    tiny_tokenizer.save_pretrained(tmp_path / "short")
    capsys.readouterr()
    assert main([*arguments, "--draft-model", str(tmp_path / "short")]) == 2
    assert "the draft model was made for 10" in capsys.readouterr().err
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": \n')
    assert main(arguments) == 2
    assert "prompts.jsonl:2" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_printed(capsys):
    assert not write_report(Path("/dev/full"), {"rows": [1, 2]})  # a device that is always full
    out, err = capsys.readouterr()
    assert json.loads(out) == {"rows": [1, 2]}
    assert "cannot write /dev/full" in err


def test_two_heads_with_trees_of_one_size_are_both_measured(tiny_target, tiny_head, folder, tmp_path):
    other = tmp_path / "other"
    save_head(tiny_head, other, target=tiny_target, notes=HeadNotes(tree=((0,), (0, 0), (0, 0, 0))))
    runs = methods(tiny_target, [str(folder), str(other)], sampling=Sampling(seed=0), max_new_tokens=5, lookup=3)
    assert [name for name in runs if "4" in name] == ["medusa tree 4", "medusa chain 4", f"medusa chain 4 of {other}"]
