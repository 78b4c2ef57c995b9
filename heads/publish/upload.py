"""One commit to the Hugging Face Hub, and errors that say what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from heads.hub import failures
from heads.publish.card import MARK
from heads.publish.stage import CARD, stage

OURS = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.pt", "*.gguf", "*.txt")
"""Files that publications write; those of an earlier one would be read beside the new ones."""
EMPTY = (".gitattributes", "LICENSE", CARD)
"""What a repository may have from the beginning."""


@dataclass(frozen=True)
class Published:
    """What there is to say of a publication."""

    url: str
    files: list[str]
    notes: list[str]


def publish(
    folder: str | Path,
    repo: str,
    *,
    to: str | None,
    options: Mapping[str, Any],
    private: bool = False,
    license: str | None = None,
    card: str | Path | None = None,
    token: str | None = None,
) -> Published:
    """Publish a head or a draft model; see `heads.push_to_hub`, also for errors."""
    with tempfile.TemporaryDirectory() as made:
        notes = stage(folder, made, repo, to=to, options=options, license=license, card=card)
        files, message = listed(made), "Publish a head" if to is None else f"Publish a head as {to}"
        url = upload(Path(made), repo, files, message=message, private=private, token=token)
    return Published(url, files, notes)


def listed(folder: str | Path) -> list[str]:
    """Return the names of the files of a folder."""
    found = Path(folder).rglob("*")
    return sorted(file.relative_to(folder).as_posix() for file in found if file.is_file())


def upload(folder: Path, repo: str, files: list[str], *, message: str, private: bool, token: str | None) -> str:
    """Make the repository if there is none, commit all files and delete what an earlier publication left.

    Args:
        folder: What is to be uploaded.
        repo: Name of the repository.
        files: Those of the folder.
        message: Of the commit.
        private: See `heads.push_to_hub`.
        token: Likewise.

    Returns:
        The repository's address.

    Raises:
        ValueError: If the hub cannot be reached or refuses it, or the repository holds something else.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi  # slow to import

    with _clear_errors(repo):
        api = HfApi(token=token)
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        info = api.model_info(repo)
    there = {sibling.rfilename for sibling in info.siblings or []}
    tags = (info.card_data.tags if info.card_data else None) or []
    if (others := sorted(there - set(EMPTY))) and MARK not in tags:
        raise ValueError(
            f"{repo} holds what was not published with Gorgon ({', '.join(others[:5])}); choose another name, or add "
            f"the tag {MARK} to the metadata of its {CARD} if all of it may be replaced"
        )
    if private and not info.private:
        raise ValueError(f"{repo} is there already and is public; make it private in its settings, or choose another")
    stale = [name for name in sorted(there - set(files)) if any(fnmatch(name, pattern) for pattern in OURS)]
    with _clear_errors(repo):
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(name, folder / name) for name in files),
            *(CommitOperationDelete(name) for name in stale),
        ]
        api.create_commit(repo, operations, commit_message=message, parent_commit=info.sha)
    return str(url)


@contextmanager
def _clear_errors(repo: str) -> Iterator[None]:
    """Turn what the client raises into what to do.

    Raises:
        ValueError: In its place.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except failures() as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        reasons = {
            401: "the hub does not know who you are; log in with `hf auth login`, or set HF_TOKEN",
            403: "you may not write there; log in with a token that may (`hf auth login`), or choose another name",
            412: "somebody else has changed it meanwhile; run the same again",
        }
        reason = reasons.get(status, f"{' '.join(str(error).split())}; run the same again when that is mended")
        raise ValueError(f"cannot publish {repo}: {reason}. Your folder is as it was") from error
