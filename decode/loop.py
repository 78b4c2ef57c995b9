"""The one decode loop: propose, score, accept, commit. Plain decoding is the same loop with trees of one node."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.accept import AcceptRule, Verdict
from decode.checks import check_state
from decode.propose import Proposer, Proposing
from decode.results import Delta, Generation, Stats
from decode.sampling import Sampler
from decode.session import Sessions, TargetOutput
from decode.stopping import Stopper
from decode.tree import TokenTree, chain_shape
from heads.transfer import to_device


@dataclass
class Row:
    """One prompt being decoded."""

    index: int
    sampler: Sampler
    stopper: Stopper
    stats: Stats
    prompt_ids: list[int]
    sent: int = 0
    """Characters of the text already yielded."""
    logprobs: list[float] | None = None
    """Log-probabilities of the new tokens, where they are asked for."""


class Decoding:
    """The state of one call: rows still running, the session, the proposer's state."""

    def __init__(
        self,
        target: Sessions,
        rows: list[Row],
        proposer: Proposer | None,
        rule: AcceptRule,
        *,
        live: bool,
        check: bool = False,
    ) -> None:
        """Open the session.

        Args:
            target: The target.
            rows: The prompts, in the order of the batch.
            proposer: Where trees come from; None for plain decoding.
            rule: Which nodes of a tree stay.
            live: Whether every delta carries its text, or only the last one of a row.
            check: Whether all state is checked after every step; see `decode.checks`.
        """
        self._target = target
        self._live = live
        self._check = check
        self._rows = rows
        self._rule = rule
        largest_tree = 1 if proposer is None else proposer.max_nodes
        capacity = max(len(row.prompt_ids) + row.stopper.limit for row in rows) + largest_tree
        self._session = target.session(len(rows), capacity, () if proposer is None else proposer.feature_layers)
        self._proposing: Proposing | None = (
            None if proposer is None else proposer.begin(len(rows), shared_noise=rule.shares_noise)
        )
        self._parts: dict[str, float] = {}
        self._start = time.perf_counter()

    def run(self) -> Iterator[Delta]:
        """Yield deltas until every row has ended."""
        yield from self._first()
        while self._rows:
            yield from self._step()

    @torch.inference_mode()  # on functions that return, not on generators, which would leave the mode on in the caller
    def _first(self) -> list[Delta]:
        with self._timed("prefill"):
            out = self._session.prefill([row.prompt_ids for row in self._rows])
        with self._timed("accept"):
            last = self._root_trees()
            verdicts = self._rule(last, out.logits, [row.sampler for row in self._rows])
        lengths = [len(row.prompt_ids) for row in self._rows]
        return self._emit(verdicts, [row.prompt_ids for row in self._rows], out, lengths)

    @torch.inference_mode()
    def _step(self) -> list[Delta]:
        with self._timed("propose"):
            trees = self._propose()
        with self._timed("score"):
            out = self._session.score(trees)
        with self._timed("accept"):
            verdicts = self._rule(trees, out.logits, [row.sampler for row in self._rows])
        with self._timed("commit"):
            self._session.commit([verdict.path for verdict in verdicts])
            committed, states, lengths = self._committed(verdicts, out)
        rows = self._rows
        before = [row.stats.tokens for row in rows]
        deltas = self._emit(verdicts, committed, states, lengths)
        for row, tree, (path, _), tokens in zip(rows, trees, verdicts, before, strict=True):
            kept = path[: row.stats.tokens - tokens + 1]  # an end inside the block drops what was accepted behind it
            row.stats.count(len(kept), had_children=kept == path and bool(tree.shape.children[path[-1]]))
        return deltas

    def _propose(self) -> list[TokenTree]:
        if self._proposing is None:
            return self._root_trees()
        roots = to_device([row.sampler.context[-1] for row in self._rows], self._target.device)
        trees = self._proposing.propose(roots, [row.sampler for row in self._rows])
        # a path of depth d emits d + 1 tokens: deeper nodes could only be thrown away
        return [tree.cut(row.stopper.remaining - 1) for row, tree in zip(self._rows, trees, strict=True)]

    def _root_trees(self) -> list[TokenTree]:
        """Return each row's tree of its last token alone."""
        roots = to_device([row.sampler.context[-1:] for row in self._rows], self._target.device)
        return [TokenTree(root, chain_shape(1)) for root in roots]

    def _committed(
        self, verdicts: Sequence[Verdict], out: TargetOutput
    ) -> tuple[list[list[int]], TargetOutput, list[int]]:
        """Return the tokens on each row's path (root first), the target's output there [B, L, …], and their numbers."""
        lengths = [len(verdict.path) for verdict in verdicts]
        longest = max(lengths)
        index = to_device([[*v.path, *[0] * (longest - len(v.path))] for v in verdicts], self._target.device)
        row = torch.arange(len(verdicts), device=self._target.device)[:, None]
        logits = out.logits[row, index] if self._rows[0].logprobs is not None else out.logits[:, :0]
        on_path = [[r.sampler.context[-1], *v.tokens[:-1]] for r, v in zip(self._rows, verdicts, strict=True)]
        features = None if out.features is None else out.features[row, index]
        return on_path, TargetOutput(logits, out.hidden[row, index], features), lengths

    def _emit(
        self,
        verdicts: Sequence[Verdict],
        committed: Sequence[Sequence[int]],
        states: TargetOutput,
        lengths: Sequence[int],
    ) -> list[Delta]:
        """Give each row its new tokens, tell the proposer, drop rows that ended, return what became final.

        `committed[b]` are the tokens of row b that gained a state in this pass; logits are those of its path.
        """
        deltas, rows = [], self._rows
        for row, verdict, logits in zip(rows, verdicts, states.logits, strict=True):
            taken = row.stopper.add(list(verdict.tokens))
            row.sampler.context += verdict.tokens
            row.stats.tokens += len(taken)
            if row.logprobs is not None:
                row.logprobs += _logprobs(logits, taken)
            deltas.append(self._delta(row, taken))
        self._sync(verdicts, committed, states, lengths)
        seconds = time.perf_counter() - self._start
        for row, delta in zip(rows, deltas, strict=True):
            row.stats.bursts.append((seconds, len(delta.token_ids)))
        return deltas

    def _sync(
        self,
        verdicts: Sequence[Verdict],
        committed: Sequence[Sequence[int]],
        states: TargetOutput,
        lengths: Sequence[int],
    ) -> None:
        """Tell the proposer what was committed, forget rows that have ended, and check what is left if asked to."""
        running = [b for b, row in enumerate(self._rows) if row.stopper.reason is None]
        if running and self._proposing is not None:
            with self._timed("propose"):
                tokens = [[*ids, verdict.next_token] for ids, verdict in zip(committed, verdicts, strict=True)]
                longest = max(map(len, tokens))
                token_ids = to_device([ids + [0] * (longest - len(ids)) for ids in tokens], self._target.device)
                self._proposing.sync(token_ids, states.hidden, lengths, states.features)
        if running and len(running) < len(self._rows):
            self._session.keep(running)
            if self._proposing is not None:
                self._proposing.keep(running)
        self._rows = [self._rows[b] for b in running]
        if self._check and running:
            samplers = [row.sampler for row in self._rows]
            sizes = [lengths[b] for b in running]
            features = None if states.features is None else states.features[running]
            hidden = states.hidden[running]
            check_state(self._target, self._session, self._proposing, samplers, hidden, sizes, features)

    def _delta(self, row: Row, taken: list[int]) -> Delta:
        reason = row.stopper.reason
        text = row.stopper.stable_text() if self._live or reason is not None else ""
        piece, row.sent = text[row.sent :], max(row.sent, len(text))
        if reason is None:
            return Delta(row.index, piece, taken, None)
        row.stats.seconds = time.perf_counter() - self._start
        row.stats.parts = self._parts
        result = Generation(
            text, row.stopper.token_ids, row.prompt_ids, reason, row.stats, row.sampler.seed, row.logprobs
        )
        return Delta(row.index, piece, taken, reason, result)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - start


def _logprobs(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return log p of each token under the raw logits of its row: [L, V] -> L floats, L at least the tokens."""
    used = logits[: len(token_ids)]
    scores = used.to(torch.promote_types(used.dtype, torch.float32)).log_softmax(-1)
    return scores.gather(-1, to_device(token_ids, used.device)[:, None])[:, 0].tolist()
