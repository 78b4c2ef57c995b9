"""What a model card says on use: commands that can be copied, by the name on the hub."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from heads.base import Head
from heads.export.commands import serve_head, serve_model
from heads.export.write import NOBODY, formats_of
from heads.publish.contents import Contents

TARGET, PROMPT, EXPORTED = "TARGET", "PROMPT", "exported"
LLAMA_CPP = "llama.cpp"
ANY_ENGINE = "no format that inference engines read can hold this head; `decode` loads it"


def usage(contents: Contents, repo: str, *, target: str | None, to: str | None, engine: str | None) -> list[str]:
    """Return the lines of the card.

    Args:
        contents: What is published.
        repo: Its name on the hub.
        target: The target's name on the hub, or None if it has none.
        to: Format of what is published; None for a head folder, "hf" for a draft model.
        engine: The only engine that reads it, in a format that is for one.
    """
    named = TARGET if target is None else target
    lines = []
    if target is None:
        lines = [f"`{TARGET}` stands for the folder of the target, or its name on the hub.", ""]
    if contents.head is None:
        lines += _block(_decode(named, "--draft-model", repo))
        by_name, by_folder = serve_model(repo, named), serve_model("draft", TARGET if target is None else "target")
        fetch = [_download(repo, "draft"), *([] if target is None else [_download(target, "target")])]
        return lines + _block(*_commands(by_name, by_folder, fetch))
    if to is None:
        return lines + _block(_decode(named, "--head", repo)) + _exports(contents, repo, target)
    return lines + _exported(contents.head, repo, target, to, engine)


def file_name(repo: str, to: str | None) -> str:
    """Return the name of the only file of a format that has one; empty for folders."""
    return repo.partition("/")[2] + ".gguf" if to == "gguf" else ""


def _exports(contents: Contents, repo: str, target: str | None) -> list[str]:
    """Return how to export a head folder to each format that takes it, and to serve that."""
    head = contents.head
    assert head is not None
    formats = formats_of(head)
    if not formats:
        reason = NOBODY.get(head.kind, ANY_ENGINE)
        return [f"{reason[0].upper()}{reason[1:]}.", ""]
    lines = ["For other engines, export it first:", ""]
    for to, engine in formats:
        out = f"{EXPORTED}.gguf" if to == "gguf" else EXPORTED
        export = ["python", "-m", "heads.export", repo, out, "--to", to]
        export += [] if engine is None else ["--for", engine]
        export += [] if target is not None and target == contents.target else ["--target", target or TARGET]
        export += ["--llama-cpp", "llama.cpp"] if to == "gguf" else []
        lines += _block(shlex.join(export), *_serve(head, out, out, target, to, engine, []))
    return lines


def _exported(head: Head, repo: str, target: str | None, to: str, engine: str | None) -> list[str]:
    """Return how to serve an export, and how to have it back here."""
    file = file_name(repo, to)
    fetch = f"{shlex.join(['hf', 'download', repo, file])} --local-dir ." if file else _download(repo, "head")
    lines = _block(*_serve(head, repo, file or "head", target, to, engine, [fetch]))
    if file:
        return lines
    adopt = shlex.join(["python", "-m", "heads.adopt", repo, "adopted", "--target", target or TARGET])
    return [*lines, "With Gorgon:", "", *_block(adopt, _decode(target or TARGET, "--head", "adopted"))]


def _serve(
    head: Head, out: str, local: str, target: str | None, to: str, engine: str | None, fetch: Sequence[str]
) -> list[str]:
    """Return the engines' commands, for llama.cpp with what is to be fetched."""
    by_name = serve_head(to, head, out, target or TARGET, engine)
    by_folder = serve_head(to, head, local, TARGET if target is None else "target", engine)
    return _commands(by_name, by_folder, [*fetch, *([] if target is None else [_download(target, "target")])])


def _commands(
    by_name: Sequence[tuple[str, str]], by_folder: Sequence[tuple[str, str]], fetch: Sequence[str]
) -> list[str]:
    lines = []
    for (engine, named), (_, local) in zip(by_name, by_folder, strict=True):
        lines += [f"# {engine}", *([*fetch, local] if engine == LLAMA_CPP else [named])]  # which reads folders only
    return lines


def _download(repo: str, folder: str) -> str:
    return shlex.join(["hf", "download", repo, "--local-dir", folder])


def _decode(target: str, option: str, drafts: str) -> str:
    return shlex.join(["python", "-m", "decode", target, PROMPT, option, drafts])


def _block(*lines: str) -> list[str]:
    return ["```bash", *lines, "```", ""]
