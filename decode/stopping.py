"""Where a row ends: end-of-text tokens, stop strings, limits. The one place that cuts inside an accepted block."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from decode.results import FinishReason

_MARGIN = 4  # tokens of a tail that may decode differently without what stands before them


class Stopper:
    """Decides for one row after each token; also knows the text it has so far."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, eos_ids: frozenset[int], stop: Sequence[str], limit: int
    ) -> None:
        """Start a row that may take `limit` new tokens.

        Raises:
            ValueError: If stop strings are given without a tokenizer, or one is empty.
        """
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass Target(model, tokenizer)")
        if any(not text for text in stop):
            raise ValueError("a stop string is empty; it would end every text before its first token")
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        special = {token: entry.content for token, entry in added.items() if entry.special}
        hidden = [text for text in stop if any(content in text for content in special.values())]
        if hidden:
            raise ValueError(
                f"{hidden} hold special tokens, which texts do not show; pass their ids as eos_ids instead"
            )
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._stop = tuple(stop)
        self._tail = max((len(text.encode()) for text in stop), default=0) + _MARGIN
        self.limit = limit
        self._special = frozenset(special)
        self._visible: list[int] = []  # without special tokens, which have no text
        self.token_ids: list[int] = []
        self.reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """New tokens the row may still take."""
        return self.limit - len(self.token_ids)

    def add(self, block: Sequence[int]) -> list[int]:
        """Take the tokens of a block up to the one that ends the row, and return those taken."""
        taken = 0
        for token in block:
            self.token_ids.append(token)
            if token not in self._special:
                self._visible.append(token)
            taken += 1
            self.reason = self._check(token)
            if self.reason is not None:
                break
        return list(block[:taken])

    def _check(self, token: int) -> FinishReason | None:
        if token in self._eos_ids:
            return "eos"
        # a byte-level token holds at least one byte, so the tail covers every stop string that ends here
        if (
            self._stop
            and self._find(self._decode(self._visible[-self._tail :])) is not None
            and self.stop_at() is not None
        ):
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None

    def _find(self, text: str) -> int | None:
        places = [text.find(stop) for stop in self._stop if stop in text]
        return min(places, default=None)

    def stop_at(self) -> int | None:
        """Return where in the text the first stop string begins."""
        return self._find(self._decode(self.token_ids)) if self._stop else None

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def text(self) -> str:
        """Return the text so far, cut before a stop string."""
        return self._decode(self.token_ids)[: self.stop_at()]

    def stable_text(self) -> str:
        """Return the text that no later token can change: whole characters, no beginning of a stop string."""
        if self.reason is not None:
            return self.text()
        text = self.text().rstrip("\N{REPLACEMENT CHARACTER}")
        held = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - held]
