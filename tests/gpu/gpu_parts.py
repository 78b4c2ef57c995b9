"""What `everything.py` runs: commands of the project in order of importance, at full size and at a tiny one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HEADS = {"medusa": "train/medusa.py", "eagle3": "train/eagle.py"}
"""Those of the target of random weights, and what trains them."""
CALIBRATION = Path("data/prompts/calibration.jsonl")


@dataclass(frozen=True)
class Part:
    """A command, and what it is to the others."""

    name: str
    kind: str
    """Section of the report."""
    command: tuple[str, ...]
    """Without the interpreter."""
    seconds: float
    """About what it takes at full size; with less time left it is dropped."""
    needs: tuple[str, ...] = ()
    """Parts that must be done before."""
    alone: bool = False
    """Whether it measures time, so that nothing may run beside it."""
    keeps: tuple[Path, ...] = ()
    """Files that it writes and that are worth keeping."""

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return 60 + 2 * self.seconds


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    size: str
    """Of the target of random weights."""
    conversations: int
    answer: int
    """Tokens of an answer."""
    together: int
    """Prompts answered at once."""
    longest: int
    """Tokens of a conversation."""
    steps: int
    """Of training."""
    timed_steps: int
    """Of training, at most, where its speed is measured."""
    batch: int
    rate: str
    vocabulary: int
    """Of EAGLE-3's drafts."""
    proved: int
    """Prompts whose texts are compared."""
    new: int
    """Tokens of a decoded text."""
    samples: int
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    nodes: int
    """Of the largest pass."""
    tuned: int
    """Prompts to tune on."""
    benched: int
    """Prompts of each file."""
    bench_rows: tuple[int, ...]


FULL = Scale(
    size="1b",
    conversations=256,
    answer=384,
    together=128,
    longest=1024,
    steps=60,
    timed_steps=1000,
    batch=16,
    rate="1e-3",
    vocabulary=32000,
    proved=4,
    new=48,
    samples=400,
    contexts=(256, 64, 1024, 4096),
    rows=(1, 2, 4, 8, 16),
    nodes=256,
    tuned=8,
    benched=4,
    bench_rows=(1, 8),
)
SMALL = Scale(
    size="small",
    conversations=24,
    answer=40,
    together=24,
    longest=256,
    steps=12,
    timed_steps=4,
    batch=4,
    rate="1e-2",
    vocabulary=128,
    proved=2,
    new=16,
    samples=100,
    contexts=(32,),
    rows=(1, 2),
    nodes=4,
    tuned=2,
    benched=2,
    bench_rows=(1, 2),
)


@dataclass(frozen=True)
class Place:
    """Where things are."""

    scratch: Path
    smollm2: Path | None = None
    data: Path | None = None
    """Conversations of SmolLM2's."""
    head: Path | None = None
    """A trained head of SmolLM2, in a folder that may be written to; None to train one on `data`."""
    prompts: tuple[Path, ...] = ()
    """For SmolLM2."""

    @property
    def target(self) -> Path:
        """The target of random weights."""
        return self.scratch / "target"

    @property
    def questions(self) -> Path:
        """Prompts for it."""
        return self.scratch / "prompts.jsonl"

    @property
    def answers(self) -> Path:
        """What it says to them."""
        return self.scratch / "answers.jsonl"

    @property
    def runs(self) -> Path:
        """Where heads are trained."""
        return self.scratch / "runs"


@dataclass(frozen=True)
class Pair:
    """A target and a head of it."""

    name: str
    target: Path
    head: Path
    tuning: Path
    """Prompts to tune on."""
    prompts: tuple[Path, ...]
    needs: tuple[str, ...]


def parts(scale: Scale, place: Place) -> list[Part]:
    """Return all parts, the most important first; each stands behind those that it needs."""
    random = Pair(
        "random", place.target, place.runs / "medusa/best", place.questions, (place.questions,), ("train medusa",)
    )
    pairs = [random]
    if place.smollm2 is not None:
        head, needs = place.head or place.runs / "smollm2/best", () if place.head else ("train smollm2",)
        pairs.append(Pair("smollm2", place.smollm2, head, CALIBRATION, place.prompts, needs))
    return [
        *_preparation(scale, place),
        *_exactness(scale, place, pairs),
        *_throughput(scale, place),
        *(_costs(scale, pair, compiled) for pair in pairs for compiled in (False, True)),
        *(_bench(scale, place, pairs[-1], compiled) for compiled in (False, True)),
        *_plans(scale, place),
    ]


def _preparation(scale: Scale, place: Place) -> Iterator[Part]:
    yield Part("machine", "machine", ("tests/gpu/gpu_machine.py",), 20)
    make = ("tests/gpu/gpu_target.py", str(place.target), "--size", scale.size)
    make += ("--prompts", str(place.questions), "--num", str(scale.conversations))
    yield Part("target", "preparation", make, 40)
    if place.smollm2 is not None and place.head is None:
        yield _training_of_smollm2(place)
    yield Part("tests", "tests", ("-m", "pytest", "-q", "-m", "gpu", "tests/gpu"), 30)
    answer = ("-m", "data.distill", "--target", str(place.target), "--prompts", str(place.questions))
    answer += ("--out", str(place.answers), "--max-new-tokens", str(scale.answer))
    answer += ("--batch-size", str(scale.together), "--dtype", "bfloat16")
    yield Part("answers", "preparation", answer, 60, ("target",))
    for kind in HEADS:
        command = _training(scale, place, kind, f"--run.name={kind}", f"--optim.steps={scale.steps}")
        yield Part(f"train {kind}", "training", command, 60, ("answers",), keeps=(place.runs / kind / "metrics.jsonl",))


def _training_of_smollm2(place: Place) -> Part:
    command = ("train/medusa.py", "--config", "configs/medusa/smollm2-135m.yaml", f"--target.name={place.smollm2}")
    command += (f"--data.source={place.data}", f"--run.dir={place.runs}", "--run.name=smollm2")
    command += ("--optim.epochs=null", "--optim.steps=400", "--run.eval_every=0")
    return Part("train smollm2", "training", command, 120, keeps=(place.runs / "smollm2/metrics.jsonl",))


def _training(scale: Scale, place: Place, kind: str, *more: str) -> tuple[str, ...]:
    return (
        HEADS[kind],
        f"--target.name={place.target}",
        "--target.dtype=bfloat16",
        f"--data.source={place.answers}",
        f"--data.max_length={scale.longest}",
        f"--run.dir={place.runs}",
        f"--optim.lr={scale.rate}",
        f"--optim.batch_size={scale.batch}",
        *([f"--head.draft_vocab_size={scale.vocabulary}"] if kind == "eagle3" else []),
        "--eval.num_prompts=2",
        f"--eval.max_new_tokens={scale.new}",
        "--precision=bf16",
        *more,
    )


def _exactness(scale: Scale, place: Place, pairs: list[Pair]) -> Iterator[Part]:
    for pair in pairs[1:]:
        for dtype in ("float32", "bfloat16"):
            drafts = ("--head", str(pair.head))
            part = _prove(scale, place, f"{pair.name} {dtype}", pair.target, pair.prompts[0], dtype, *drafts)
            yield replace(part, needs=pair.needs)
    for dtype in ("bfloat16", "float32"):
        for kind in HEADS:
            drafts = ("--head", str(place.runs / kind / "best"))
            part = _prove(scale, place, f"{kind} {dtype}", place.target, place.questions, dtype, *drafts)
            yield replace(part, needs=(f"train {kind}",))
    part = _prove(scale, place, "lookup", place.target, place.questions, "bfloat16", "--lookup", "8")
    yield replace(part, needs=("target",))


def _prove(scale: Scale, place: Place, name: str, target: Path, prompts: Path, dtype: str, *drafts: str) -> Part:
    file = place.scratch / f"prove-{name.replace(' ', '-')}.json"
    command = ("-m", "decode.prove", str(target), *drafts, "--prompts", str(prompts), "--num", str(scale.proved))
    command += ("--max-new-tokens", str(scale.new), "--samples", str(scale.samples), "--dtype", dtype)
    return Part(f"prove {name}", "exactness", (*command, "--out", str(file)), 60, keeps=(file,))


def _throughput(scale: Scale, place: Place) -> Iterator[Part]:
    for kind in HEADS:
        more = (f"--run.name={kind}-throughput", f"--optim.steps={scale.timed_steps}", "--throughput")
        command = _training(scale, place, kind, *more)
        yield Part(f"throughput {kind}", "throughput", command, 60, ("answers",), alone=True)


def _costs(scale: Scale, pair: Pair, compiled: bool) -> Part:
    command = ("-m", "decode.tune", str(pair.target), "--head", str(pair.head), "--prompts", str(pair.tuning))
    command += ("--num", str(scale.tuned), "--max-new-tokens", str(scale.new), "--temperature", "0")
    command += ("--rows", *map(str, scale.rows), "--context", *map(str, scale.contexts))
    command += ("--most-nodes", str(scale.nodes), "--check", "2", "--dtype", "bfloat16")
    name, more, seconds = ("compiled", ("--compile",), 150) if compiled else ("plain", (), 90)
    plan = pair.head / "tuned.json"
    return Part(f"costs {pair.name} {name}", "costs", (*command, *more), seconds, pair.needs, alone=True, keeps=(plan,))


def _bench(scale: Scale, place: Place, pair: Pair, compiled: bool) -> Part:
    name, more, seconds = ("compiled", ("--compile",), 150) if compiled else ("plain", (), 110)
    out = place.scratch / f"bench-{name}"
    command = ("-m", "decode.bench", str(pair.target), "--head", str(pair.head))
    command += ("--prompts", *map(str, pair.prompts), "--num", str(scale.benched), "--max-new-tokens", str(scale.new))
    command += ("--temperature", "0", "1", "--rows", *map(str, scale.bench_rows), "--dtype", "bfloat16")
    command += ("--out", str(out), *more)
    return Part(f"bench {name}", "bench", command, seconds, pair.needs, alone=True, keeps=(out / "comparison.json",))


def _plans(scale: Scale, place: Place) -> Iterator[Part]:
    for kind in HEADS:
        command = _training(scale, place, kind, f"--run.name={kind}-plan", f"--optim.steps={scale.steps}", "--plan")
        yield Part(f"plan {kind}", "training", command, 30, ("answers",))
