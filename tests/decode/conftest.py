"""Oracles and proposers that the decode tests share."""

import importlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor

import heads
from decode import DraftModel, Sampling, Target, noise
from decode.sampling import Sampler, to_scores
from decode.tree import TokenTree, chain_shape, tree_shape
from heads import FeatureBatch, HeadNotes, create_head, head_class, save_head
from heads.medusa import MedusaConfig, MedusaHead
from train.new_head import target_sizes

PROMPTS = [
    [40, 41, 42, 43, 44, 40, 41],
    [300],
    [7, 8, 9, 7, 8],
    [120, 121, 120, 121, 120, 121, 120, 121, 120, 121, 120, 121],
    [5, 17],
]


class ParityBan(LogitsProcessor):
    """Bans tokens of the parity of the number of tokens so far and lowers the last two: all of the context matters."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, (int(input_ids.sum()) + input_ids.shape[1]) % 2 :: 2] = -torch.inf
        scores[:, input_ids[0, -2:]] -= 3.0
        return scores


class Forced(LogitsProcessor):
    """Makes the target say `tokens` after a prompt."""

    def __init__(self, tokens: list[int], prompt: list[int]) -> None:
        self.tokens, self.start = tokens, len(prompt)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(input_ids.shape[1] - self.start, len(self.tokens) - 1)
        return scores.index_fill(1, torch.tensor([self.tokens[place]]), 1e9)


SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_p=0.95),
    "penalty": Sampling(temperature=0.7, repetition_penalty=1.5),
    "greedy-penalty": Sampling(repetition_penalty=1.7),
    "min-p": Sampling(temperature=1.5, top_k=50, min_p=0.1),
    "processor": Sampling(temperature=0.9, processors=[ParityBan()]),
}


def slow_decode(
    target: Target,
    prompt: Sequence[int],
    sampling: Sampling,
    limit: int,
    *,
    seed: int = 0,
    row: int = 0,
    eos=frozenset(),
) -> list[int]:
    """New tokens by one full forward for each, without cache, trees or the loop."""
    text = list(prompt)
    processors = sampling.processor_list(row, len(prompt))
    for _ in range(limit):
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[:, -1]
        scores = to_scores(logits, torch.tensor([text]), processors)[0]
        if sampling.temperature > 0:
            key = noise.key(noise.key(seed, row), noise.TARGET, len(text))
            scores = scores.double() + noise.gumbel([key], torch.arange(len(scores)))[0]
        text.append(int(scores.argmax()))
        if text[-1] in eos:
            break
    return text[len(prompt) :]


@dataclass(frozen=True)
class Scripted:
    """Proposes from a function of the text so far: text -> token chain or (tokens, parents) of a tree."""

    propose: Callable[[list[int]], list[int] | tuple[list[int], tuple[int, ...]]]
    max_nodes: int = 12
    feature_layers: tuple[int, ...] = ()

    def begin(self, rows: int, *, shared_noise: bool) -> "Scripting":
        return Scripting(self)


@dataclass
class Scripting:
    """Checks what the loop tells a proposer: one more token than states, and the text of every row."""

    settings: Scripted
    texts: list[list[int]] = field(default_factory=list)

    def sync(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lengths: Sequence[int],
        features: torch.Tensor | None = None,
    ) -> None:
        assert token_ids.shape[1] == hidden.shape[1] + 1
        self.texts = self.texts or [[] for _ in lengths]
        assert len(self.texts) == len(lengths) == len(token_ids) == len(hidden)
        for text, ids, length in zip(self.texts, token_ids.tolist(), lengths, strict=True):
            if text:
                assert text[-1] == ids[0]  # the old root comes first
                text.pop()
            text += ids[: length + 1]

    def propose(self, roots: torch.Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        assert [row.context for row in rows] == self.texts
        assert roots.tolist() == [text[-1] for text in self.texts]
        trees = []
        for text in self.texts:
            proposed = self.settings.propose(text)
            tokens, shape = proposed if isinstance(proposed, tuple) else (proposed, None)
            tokens = [text[-1], *tokens]
            trees.append(
                TokenTree(torch.tensor(tokens), chain_shape(len(tokens)) if shape is None else tree_shape(shape))
            )
        return trees

    def keep(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]


def self_draft(texts: Sequence[Sequence[int]], depth: int) -> Scripted:
    """Propose the true continuation of whichever text (prompt and answer) the row is on."""

    def propose(text: list[int]) -> list[int]:
        whole = next((t for t in texts if list(t[: len(text)]) == text), [])  # nothing once a text has left the script
        return list(whole[len(text) : len(text) + depth])

    return Scripted(propose, depth + 1)


def anti_draft(texts: Sequence[Sequence[int]], depth: int, vocab_size: int = 320) -> Scripted:
    """Propose what is never the continuation."""
    right = self_draft(texts, depth)
    return Scripted(lambda text: [(token + 1) % vocab_size for token in right.propose(text)], depth + 1)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return PROMPTS


@pytest.fixture(scope="session")
def samplings() -> dict[str, Sampling]:
    return SAMPLINGS


@pytest.fixture(scope="session")
def good_head(tiny_target) -> MedusaHead:
    """A head trained for seconds on the target's own greedy texts: its drafts are often right."""
    torch.manual_seed(0)
    head = create_head(
        "medusa", MedusaConfig(hidden_size=32, vocab_size=320, num_heads=3, losses={"ce": 1.0}), tiny_target
    ).double()
    texts = [prompt + slow_decode(tiny_target, prompt, Sampling(), 40) for prompt in PROMPTS]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
    batch = FeatureBatch(ids, mask, tiny_target.encode(ids, [len(text) for text in texts]))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        head(batch).loss.div(100).backward()
        optimizer.step()
    return head.eval()


FILES = sorted(path.stem for path in Path(heads.__file__).parent.glob("*.py"))
KINDS = [name for name in FILES if "HEAD" in vars(importlib.import_module(f"heads.{name}"))]
OPTIONS = {"medusa": {"num_heads": 3}, "eagle3": {"feature_layers": (1, 2)}}
FEW = [0, 2, 3, 5, 8, 9, 13, 15]


@pytest.fixture(scope="session")
def small_target(make_tiny_llama) -> Target:
    """A target of 16 tokens: drafts of heads that have learned nothing are now right and now wrong."""
    return Target(make_tiny_llama(vocab_size=16), name="small")


@pytest.fixture(scope="session", params=[*KINDS, *(f"{kind} of few tokens" for kind in KINDS), "model", "itself"])
def any_drafts(request, small_target, make_tiny_llama):
    """A head of each kind, with the whole vocabulary and with a draft vocabulary, a draft model, and the target."""
    if request.param in ("model", "itself"):
        seed = {"model": 5, "itself": 0}[request.param]
        return DraftModel(Target(make_tiny_llama(vocab_size=16, seed=seed)), small_target)
    kind, _, few = request.param.partition(" ")
    config = head_class(kind).Config
    options = {**OPTIONS.get(kind, {}), **target_sizes(small_target, config)}
    torch.manual_seed(1)
    head = create_head(kind, config(**options, draft_vocab_size=len(FEW) if few else None), small_target)
    if few:
        head.set_vocabulary(torch.tensor(FEW))
    for parameter in head.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    return head.double().eval()


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value of Pearson's test; cells with an expectation below 5 are pooled."""
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    wanted = torch.cat([expected[~small], expected[small].sum()[None]]).double()
    if wanted[-1] == 0:
        assert observed[-1] == 0
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.fixture(scope="session")
def oracles() -> SimpleNamespace:
    """The functions above, for test files (test folders are no packages)."""
    return SimpleNamespace(
        slow_decode=slow_decode,
        Forced=Forced,
        Scripted=Scripted,
        self_draft=self_draft,
        anti_draft=anti_draft,
        chi_square_p=chi_square_p,
    )


class Full(io.StringIO):
    """A standard output on a disk that is full."""

    def flush(self) -> None:
        if self.getvalue():  # libraries flush what they have not written to
            raise OSError(28, "No space left on device")


@pytest.fixture
def fill_stdout(monkeypatch):
    """A function from whose call on standard output is full (a fixture alone would be undone by pytest's own)."""
    return lambda: monkeypatch.setattr("sys.stdout", Full())


def save_medusa(path: Path, target: Target, tree=None) -> None:
    head = create_head("medusa", MedusaConfig(hidden_size=32, vocab_size=320, num_heads=2), target)
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    save_head(head, path, target=target, notes=HeadNotes(tree=tree))


@pytest.fixture(scope="session")
def bench_files(tiny_tokenizer, make_tiny_llama, tmp_path_factory) -> SimpleNamespace:
    """A saved target, two Medusa heads for it (one has a tree), two files of prompts, and commands for `bench`."""
    path = tmp_path_factory.mktemp("bench")
    make_tiny_llama().save_pretrained(path / "target")
    tiny_tokenizer.save_pretrained(path / "target")
    target = Target.from_pretrained(str(path / "target"), device="cpu")
    for name, tree in (("a", ((0,), (1,), (0, 0))), ("b", None)):
        save_medusa(path / name, target, tree)
    sets = {"x": ["the cat", "one two three"], "y": ["four sat on"]}
    for name, prompts in sets.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def command(*extra, heads=("a",), new_tokens=10) -> list[str]:
        folders = [path / name for name in heads]
        arguments = [path / "target", *(["--head", *folders] if folders else [])]
        arguments += ["--prompts", path / "x.jsonl", path / "y.jsonl", "--max-new-tokens", new_tokens]
        return list(map(str, [*arguments, "--device", "cpu", *extra]))

    return SimpleNamespace(path=path, target=target, sets=sets, command=command, save_medusa=save_medusa)
