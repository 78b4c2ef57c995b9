"""Folders by their names on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
PAGES = ("datasets", "models", "spaces")
"""Nobody's names on the hub, but pages of it; folders are often called so."""


def is_hub_name(name: str | Path) -> bool:
    """Return whether it has the form USER/NAME, and nothing of that name is here."""
    found = NAME.fullmatch(str(name)) is not None and not str(name).startswith(".")
    return found and str(name).partition("/")[0] not in PAGES and not Path(name).exists()


def find_folder(name: str | Path, *, what: str, files: Sequence[str]) -> Path:
    """Return a folder that is here, or that of a repository on the hub, of which some files are downloaded.

    Args:
        name: Folder, or name on the hub.
        what: What it should be, for the error.
        files: Patterns of the files to download.

    Raises:
        ValueError: If it is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # slow to import, and a folder needs it not
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except failures() as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if isinstance(error, RepositoryNotFoundError):
            reason = "it has none of this name, or a private one that needs `hf auth login`"
        elif isinstance(error, HfHubHTTPError):
            reason = f"it answers {error.response.status_code}: {reason}"
        raise ValueError(f"{name} is neither a {what} folder nor a {what} that the hub has ({reason})") from error


def failures() -> tuple[type[Exception], ...]:
    """Return what the hub's client raises where a name, a file, the network or the hub is not as it should be."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the library below, whichever it is

    return OSError, ValueError, HTTPError


def find_head(name: str | Path, *files: str) -> Path:
    """Return the folder of a head; one that is not here and is named USER/NAME is asked for on the hub.

    Args:
        name: Folder, which is returned whatever it holds, or name on the hub.
        files: Patterns of the files to download.

    Raises:
        ValueError: If it is the name of nothing on the hub.
    """
    return find_folder(name, what="head", files=files) if is_hub_name(name) else Path(name)
