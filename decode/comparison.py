"""Every method on every batch of prompts, temperature and number of rows, in turn, with a log that continues."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from decode.comparison_log import ComparisonLog, Key
from decode.counting import Counting
from decode.draft_model import DraftModel
from decode.measure import Result, measure
from decode.methods import Run, Way, our_runs, their_runs
from decode.propose import Proposer
from decode.sampling import Sampling
from decode.target import Target

WARM_UP = 8
"""New tokens of each method before anything is measured."""


@dataclass(frozen=True)
class Comparison:
    """What is compared on what."""

    target: Target
    ways: Mapping[str, Way]
    """Of drafting, by name; "plain" must be there."""
    theirs: Sequence[str]
    """Names from `their_runs`, which are measured at temperature 0 with 1 row."""
    draft_model: DraftModel | None
    """For transformers' assisted decoding."""
    sets: Mapping[str, Sequence[list[int]]]
    """Prompt ids by prompt set."""
    samplings: Mapping[float, Sampling]
    """Settings with a seed, by temperature."""
    rows: Sequence[int]
    """Prompts in a batch; the last batch of a set may be smaller."""
    max_new_tokens: int

    def all_keys(self) -> list[Key]:
        """Return what is measured, in this order: numbers of rows and temperatures take turns on the same prompts."""
        order = list(self.sets)
        keys = [
            Key(name, number, temperature, rows)
            for name, prompts in self.sets.items()
            for rows in self.rows
            for number in range(-(-len(prompts) // rows))
            for temperature in self.samplings
        ]
        return sorted(keys, key=lambda key: (order.index(key.prompts), key.number * key.rows))

    def batch(self, key: Key) -> Sequence[list[int]]:
        """Return the prompts of a batch."""
        return self.sets[key.prompts][key.number * key.rows :][: key.rows]

    def run(self, log: ComparisonLog) -> list[Result]:
        """Decode what is not in the log, write it there, and return all results."""
        keys = self.all_keys()
        proposers = {setting: self._proposers(*setting) for setting in itertools.product(self.samplings, self.rows)}
        runs = {setting: self._runs(*setting, own, self.max_new_tokens) for setting, own in proposers.items()}
        todo = [key for key in keys if not runs[_setting(key)].keys() <= log.answers.get(key, {}).keys()]
        for setting in dict.fromkeys(map(_setting, todo)):
            self._warm_up(*setting, proposers[setting])
        turns: Counter[tuple[float, int]] = Counter()
        progress = tqdm(keys, desc="bench", unit="batch")
        for key in progress:
            turn = turns[_setting(key)]
            turns[_setting(key)] += 1
            if key not in todo:
                continue
            progress.set_postfix_str(f"{key.prompts}, T={key.temperature:g}, rows {key.rows}", refresh=False)
            sampling = self.samplings[key.temperature]
            answers = measure(self.target, runs[_setting(key)], self.batch(key), sampling, turn=turn)
            for name, counting in proposers[_setting(key)].items():
                if counting is not None:
                    answers[name] = replace(answers[name], counts=counting.take())
            log.append(key, answers)
        return [
            Result(method, name, *setting, [log.answers[key][method] for key in keys if _is_of(key, name, setting)])
            for setting in runs
            for name in self.sets
            for method in runs[setting]
        ]

    def _proposers(self, temperature: float, rows: int) -> dict[str, Counting | None]:
        made = {name: way(temperature, rows) for name, way in self.ways.items()}
        return {name: None if proposer is None else Counting(proposer) for name, proposer in made.items()}

    def _runs(
        self, temperature: float, rows: int, proposers: Mapping[str, Proposer | None], max_new_tokens: int
    ) -> dict[str, Run]:
        runs = our_runs(self.target, proposers, self.samplings[temperature], max_new_tokens)
        if theirs_run_at(temperature, rows):
            theirs = their_runs(self.target, self.draft_model, max_new_tokens)
            runs |= {name: theirs[name] for name in self.theirs}
        return runs

    def _warm_up(self, temperature: float, rows: int, proposers: Mapping[str, Counting | None]) -> None:
        batch = self.batch(Key(next(iter(self.sets)), 0, temperature, rows))
        for run in self._runs(temperature, rows, proposers, WARM_UP).values():
            run(batch)
        for counting in proposers.values():
            if counting is not None:
                counting.take()


def theirs_run_at(temperature: float, rows: int) -> bool:
    """Return whether transformers' own decoding is measured: it draws from another stream, and drafts for one row."""
    return temperature == 0 and rows == 1


def _setting(key: Key) -> tuple[float, int]:
    return key.temperature, key.rows


def _is_of(key: Key, prompts: str, setting: tuple[float, int]) -> bool:
    return key.prompts == prompts and _setting(key) == setting
