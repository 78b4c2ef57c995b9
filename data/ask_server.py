"""Answers by a server, many prompts at once.

The server renders the messages with its own chat template. Whether that is the target's can be checked: each reply
says how many tokens the prompt had, which must be what the target's tokenizer and template make of it. Equal counts
are no proof, but another template, a system prompt of the server's own, or a BOS token written twice shows.

What the request leaves open a server takes from its own defaults (llama.cpp: top-k 40, min-p 0.05) or from the model's
generation_config.json (vLLM, SGLang), so that every way of changing the distribution is switched off by name. Thoughts
that a server splits off (`--reasoning-parser`) would be missing in the answers, and are refused.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from tqdm import tqdm

from data.answers import AnswerFile
from data.conversations import Conversation
from data.distill_config import DistillConfig, Tally
from data.questions import prompt_seed, to_row
from data.server import PassingError, PromptError, Server, ServerError, StoppedError

PLAIN: dict[str, object] = {
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0
}  # fmt: skip
ENDS = {"stop": "stop", "eos_token": "stop", "length": "length"}
"""Why an answer ended, in the server's words and in ours."""
FAILURES_IN_A_ROW = 8
"""So many prompts (or as many as are asked at once) that fail one after the other are the server's fault."""


@dataclass(frozen=True)
class Reply:
    """One answer."""

    prompt: Conversation
    text: str
    is_cut: bool
    new_tokens: int
    prompt_tokens: int | None
    """None if the server does not say."""


@dataclass(frozen=True)
class Failure:
    """A prompt without one."""

    name: str
    message: str


def ask_all(
    prompts: Sequence[Conversation],
    lengths: Mapping[str, int],
    answers: AnswerFile,
    server: Server,
    model: Mapping[str, Any],
    config: DistillConfig,
    tally: Tally,
    progress: "tqdm[NoReturn]",
) -> None:
    """Ask the prompts, `config.concurrency` at a time, and write each answer as it comes.

    Args:
        prompts: What is asked.
        lengths: Tokens of each prompt by the target's own template.
        answers: Where the rows go, in the order in which answers come.
        server: Who is asked.
        model: What it says of the model, from `find_model`.
        config: How to answer.
        tally: Counted in, so that the counts are there also when this ends in an error.
        progress: Shown.

    Raises:
        ServerError: If the server is gone, is not the one that it should be, or fails many prompts in a row. Answers
            that have come are on disk.
    """
    waiting: SimpleQueue[Conversation] = SimpleQueue()
    outcomes: SimpleQueue[Reply | Failure | Exception] = SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)

    def ask(prompt: Conversation) -> Reply:
        return server.persist(lambda: _ask(prompt, lengths[prompt.id], server, model, config))

    for _ in range(min(config.concurrency, len(prompts))):
        # daemons: what is still asked when the run is stopped is not waited for
        threading.Thread(target=_work, args=(waiting, outcomes, ask, server), daemon=True).start()
    start, left, in_a_row = time.perf_counter(), len(prompts), 0
    try:
        while left:
            came = [outcomes.get(), *_drain(outcomes)]
            left -= len(came)
            replies = _keep(came, answers, lengths, tally)
            progress.set_postfix_str(f"{tally.new_tokens / (time.perf_counter() - start):.1f} tokens/s", refresh=False)
            progress.update(len(replies))
            in_a_row = 0 if replies else in_a_row + len(came)
            for error in came:
                if isinstance(error, Exception):
                    raise error
            if in_a_row >= max(FAILURES_IN_A_ROW, config.concurrency):
                last = list(tally.failed.values())[-1]
                raise ServerError(f"{in_a_row} prompts failed one after the other, the last with {last}")
    finally:
        server.stopped.set()
        _keep(_drain(outcomes), answers, lengths, tally)


def _keep(
    came: Sequence[Reply | Failure | Exception], answers: AnswerFile, lengths: Mapping[str, int], tally: Tally
) -> list[Reply]:
    """Write the replies to disk and count all that came."""
    replies = [each for each in came if isinstance(each, Reply)]
    if replies:
        answers.append([to_row(reply.prompt, reply.text, is_cut=reply.is_cut) for reply in replies])
    tally.new_answers += len(replies)
    tally.new_tokens += sum(reply.new_tokens for reply in replies)
    same = [reply.prompt_tokens == lengths[reply.prompt.id] for reply in replies if reply.prompt_tokens is not None]
    tally.same_lengths += sum(same)
    tally.other_lengths += len(same) - sum(same)
    tally.failed.update((each.name, each.message) for each in came if isinstance(each, Failure))
    return replies


def _drain(outcomes: "SimpleQueue[Reply | Failure | Exception]") -> list[Reply | Failure | Exception]:
    came = []
    while True:
        try:
            came.append(outcomes.get_nowait())
        except Empty:
            return came


def _work(
    waiting: "SimpleQueue[Conversation]",
    outcomes: "SimpleQueue[Reply | Failure | Exception]",
    ask: Callable[[Conversation], Reply],
    server: Server,
) -> None:
    """Ask one prompt after the other until none waits."""
    while not server.stopped.is_set():
        try:
            prompt = waiting.get_nowait()
        except Empty:
            return
        try:
            outcomes.put(ask(prompt))
        except PromptError as error:
            outcomes.put(Failure(prompt.id, str(error)))
        except StoppedError:
            return
        except Exception as error:  # the main thread raises it
            outcomes.put(error)
            return


def _ask(prompt: Conversation, length: int, server: Server, model: Mapping[str, Any], config: DistillConfig) -> Reply:
    """Ask one prompt once; refuse an answer that is not what the target itself would have said."""
    is_tgi = model.get("owned_by") == model["id"] and model.get("created") == 0
    body = PLAIN | {
        "model": "tgi" if is_tgi else model["id"],  # TGI takes any other name for an adapter's
        "messages": prompt.messages,
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": prompt_seed(config.seed, prompt.id) & 0x7FFFFFFF,  # llama.cpp's have 32 bits
    }
    if is_tgi and config.top_p == 1:
        del body["top_p"]  # must be below 1 there
    content = server.request("/chat/completions", body)
    try:
        reply = _read_reply(prompt, content)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise PassingError(f"{server.url}: the reply holds no answer: {json.dumps(content)[:300]}") from error
    if content.get("model") not in (None, model["id"]):
        raise ServerError(
            f"{server.url}: answered by {content['model']!r}, not {model['id']!r}; if that is another name of the same "
            "model, pass it as --server-model, else start the server with the right one"
        )
    if reply.prompt_tokens not in (None, length) and not config.any_template:
        raise ServerError(
            f"{server.url}: {model['id']} makes {reply.prompt_tokens} tokens of prompt {prompt.id!r}, the template of "
            f"{config.target} makes {length}: the server has another chat template or tokenizer, adds a system prompt "
            "or a second BOS token; start it with the target's template, or go on nevertheless with --any-template"
        )
    return reply


def _read_reply(prompt: Conversation, content: Any) -> Reply:
    choice = content["choices"][0]
    message, reason, usage = choice["message"], choice["finish_reason"], content.get("usage") or {}
    if message.get("reasoning_content") or message.get("reasoning"):
        raise ServerError(
            f"the server splits thoughts off the answer to {prompt.id!r}, which would lack them; start it without a "
            "reasoning parser (llama.cpp: --reasoning-format none)"
        )
    if reason is None or reason in ("abort", "error"):
        raise PassingError(f"the server broke off ({reason})")
    text = message["content"]
    if reason not in ENDS or not isinstance(text, str) or any("\ud800" <= each <= "\udfff" for each in text):
        raise PromptError(f"no answer in text that ended by itself or at the limit, got {json.dumps(choice)[:300]}")
    return Reply(
        prompt, text, ENDS[reason] == "length", usage.get("completion_tokens") or 0, usage.get("prompt_tokens")
    )
