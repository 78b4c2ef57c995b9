"""Prompts that match an evaluation prompt, left out: who trains on them measures memory.

A prompt matches if one of its user turns is, word for word, a turn of an evaluation prompt, or holds 13 words in a row
that one holds (Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C; of shorter evaluation prompts,
all words in a row, but at least 8). Case, punctuation and white space do not count. As there, what many have in
common is nobody's content: 13 words that more than 10 evaluation prompts hold are their instruction, and no match.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.conversations import Conversation, read_rows

LONGEST = 13
SHORTEST = 8
"""Words in a row that make a match."""
COMMON = 10
"""What more evaluation prompts have in common is their instruction."""
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""Languages without spaces count by the character."""


@dataclass(frozen=True)
class Match:
    """Why a prompt is left out."""

    prompt: str
    """Its id."""
    place: str
    """File and line of the evaluation prompt."""
    kind: str
    """"exact" or "overlap"."""


@dataclass(frozen=True)
class Exclusion:
    """What was compared and left out."""

    sha256: str | None = None
    """Of all evaluation prompts; None if there are none."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Prompts of each evaluation file."""
    matches: list[Match] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Return the report that goes into the provenance."""
        shown = _short_names(list(self.sizes))
        files = {}
        for file, size in self.sizes.items():
            kinds = Counter(match.kind for match in self.matches if _file_of(match.place) == file)
            files[shown[file]] = {"prompts": size, "exact": kinds["exact"], "overlap": kinds["overlap"]}
        left_out = {
            match.prompt: f"{match.kind}, {shown[_file_of(match.place)]}:{match.place.rpartition(':')[2]}"
            for match in self.matches
        }
        return {"words": LONGEST, "files": files, "left_out": left_out}


def _file_of(place: str) -> str:
    """Return the file of a place, or the name on the hub, spelt as one path is."""
    return str(Path(place.rpartition(":")[0]))


def _short_names(files: Sequence[str]) -> dict[str, str]:
    """Return each file's name without its folders, and with a number if others before it are called so too."""
    seen: Counter[str] = Counter()
    shown = {}
    for file in files:
        name = Path(file).name
        seen[name] += 1
        shown[file] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return shown


def exclude(prompts: Sequence[Conversation], sources: Sequence[str | Path]) -> tuple[list[Conversation], Exclusion]:
    """Return the prompts that match no evaluation prompt, as they are and in their order, and a report.

    Args:
        prompts: What would be answered.
        sources: Evaluation prompts: JSONL or Parquet files, folders or names on the hub, with `messages`,
            `conversations`, `turns`, `prompt` or `question` in each row; all user turns count.

    Raises:
        ValueError: If a source cannot be read, or no prompt is left.
    """
    if not sources:
        return list(prompts), Exclusion()
    turns = [(str(source), place, text) for source in sources for place, text in _read_turns(source)]
    exact: dict[tuple[str, ...], str] = {}
    for _, place, text in turns:
        exact.setdefault(to_words(text), place)
    runs = _index_runs(exact)
    matches = []
    for prompt in tqdm(prompts, desc="compare with evaluation prompts", unit=" prompts", delay=2):
        texts = [to_words(message["content"]) for message in prompt.messages if message["role"] == "user"]
        found = next((exact[words] for words in texts if words and words in exact), None)
        if found is not None:
            matches.append(Match(prompt.id, found, "exact"))
        elif found := next((runs[n][run] for words in texts for n, run in _runs(words, runs) if run in runs[n]), None):
            matches.append(Match(prompt.id, found, "overlap"))
    matched = {match.prompt for match in matches}
    kept = [prompt for prompt in prompts if prompt.id not in matched]
    if not kept:
        raise ValueError(f"all {len(prompts)} prompts match evaluation prompts, such as {matches[0]}; use others")
    places = Counter(_file_of(place) for place in {place for _, place, _ in turns})
    sizes = {file: places[file] for file in (str(Path(source)) for source in sources)}
    digest = hashlib.sha256(json.dumps(sorted(text for *_, text in turns)).encode()).hexdigest()
    return kept, Exclusion(digest, sizes, matches)


def to_words(text: str) -> tuple[str, ...]:
    """Return the words of a text, without case, punctuation, and differences of form that Unicode allows."""
    return tuple(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _index_runs(texts: Mapping[tuple[str, ...], str]) -> dict[int, dict[int, str]]:
    """Return where runs of words were seen first: by their length, then by their hash."""
    counts: Counter[int] = Counter()
    runs: dict[int, dict[int, str]] = {}
    for words, place in texts.items():
        length = min(LONGEST, len(words))
        if length >= SHORTEST:
            found = runs.setdefault(length, {})
            own = {run for _, run in _runs(words, [length])}
            counts.update(own)
            for run in own:
                found.setdefault(run, place)
    return {n: {run: place for run, place in found.items() if counts[run] <= COMMON} for n, found in runs.items()}


def _runs(words: tuple[str, ...], lengths: Sequence[int] | Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Yield length and hash of all runs of so many words."""
    for length in lengths:
        for start in range(len(words) - length + 1):
            yield length, hash(words[start : start + length])


def _read_turns(source: str | Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of every user turn of a file of evaluation prompts."""
    for place, _, line in read_rows(source, None):
        try:
            row = json.loads(line) if isinstance(line, bytes) else line
            turns = _user_turns(row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # of JSON and UTF-8 too
            raise ValueError(
                f"{place}: expected `messages`, `conversations`, `turns`, `prompt` or `question` ({error!r}); mend or "
                "delete the line"
            ) from error
        yield from ((place, turn) for turn in turns)


def _user_turns(row: Any) -> list[str]:
    if row.get("messages") is not None:
        turns = [turn["content"] for turn in row["messages"] if turn["role"] == "user"]
    elif row.get("conversations") is not None:
        turns = [turn["value"] for turn in row["conversations"] if turn["from"] in ("human", "user")]
    else:
        key = next((key for key in ("turns", "prompt", "question") if row.get(key) is not None), None)
        if key is None:
            raise ValueError(f"got the keys {sorted(map(str, row))}")
        turns = row[key] if isinstance(row[key], list) else [row[key]]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"turns must be texts, got {json.dumps(turns)[:80]}")
    return turns
