"""Heads on the Hugging Face Hub: `heads.push_to_hub(...)`, `python -m heads.publish`."""

from __future__ import annotations

from pathlib import Path

import torch

from heads.publish.upload import publish


def push_to_hub(
    folder: str | Path,
    repo: str,
    *,
    to: str | None = None,
    target: str | Path | None = None,
    engine: str | None = None,
    tokens: int | None = None,
    dtype: torch.dtype | None = None,
    llama_cpp: str | Path | None = None,
    private: bool = False,
    license: str | None = None,
    card: str | Path | None = None,
    token: str | None = None,
) -> str:
    """Publish a head with a model card, in one commit, and return where it is.

    What an earlier publication left in the repository is replaced or deleted; the hub keeps it in the history.

    Args:
        folder: Head folder, or the folder of a draft model.
        repo: `USER/NAME` on the hub; made if missing.
        to: A format of `heads.export`, which is made and published in place of the head folder. A draft model is "hf".
        target: Folder or hub name of the target; by default as the head's folder names it. It is checked, and the card
            names it if it is on the hub.
        engine: Of the export; see `heads.export`.
        tokens: Of the export.
        dtype: Of the export.
        llama_cpp: Of the export.
        private: Make the repository a private one.
        license: Name of a license, for the card; none is written otherwise.
        card: A card of your own, a file of Markdown with the tag `gorgon` in its metadata.
        token: Of the hub; by default the one you are logged in with (`hf auth login`), or `HF_TOKEN`.

    Raises:
        ValueError: If the head is incomplete, damaged or of another target, cannot be exported like this, the
            repository holds something else, or the hub cannot be reached or refuses it. The folder is never changed.
    """
    options = {"target": target, "engine": engine, "tokens": tokens, "dtype": dtype, "llama_cpp": llama_cpp}
    return publish(folder, repo, to=to, options=options, private=private, license=license, card=card, token=token).url
