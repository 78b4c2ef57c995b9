"""A folder that holds exactly what is to be published: a head, an export or a draft model, and its card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.checkpoint import CONFIG, TUNED, WEIGHTS
from heads.export.write import FILES, FLAGS, write
from heads.files import write_atomically
from heads.formats.folder import writing
from heads.formats.target_files import TargetFiles
from heads.hub import NAME, find_head, is_hub_name
from heads.publish.card import Publication, check_card, write_card
from heads.publish.contents import DRAFT_NOTES, Contents, read_contents
from heads.publish.tables import paths
from heads.publish.usage import file_name

CARD = "README.md"


def stage(
    folder: str | Path,
    out: str | Path,
    repo: str,
    *,
    to: str | None,
    options: Mapping[str, Any],
    license: str | None = None,
    card: str | Path | None = None,
) -> list[str]:
    """Write what is to be published to the folder `out`, and return what there is to say of it, in sentences.

    Args:
        folder: Head folder, or the folder of a draft model; or a name on the hub.
        out: Folder; made if missing, and must be empty.
        repo: `USER/NAME` on the hub.
        to: Format of `heads.export`; None for the head folder itself, or a draft model.
        options: Those of `heads.export`.
        license: For the card.
        card: A card to take in place of one that is written.

    Raises:
        ValueError: See `heads.push_to_hub`.
    """
    out = Path(out)
    _check_name(repo)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another folder, or empty this one")
    if card is not None:
        check_card(Path(card))
    source = find_head(folder, *FILES)
    contents = read_contents(source)
    to = "hf" if to is None and contents.head is None else to
    target = str(contents.target if options["target"] is None else options["target"])
    base_model = target if is_hub_name(target) else None
    _check(contents, to, options, target, base_model)
    lost, left = (_copy_head(source, out), []) if to is None else _export(source, out, repo, to, options)
    publication = Publication(contents, repo, target, base_model, to, options["engine"], license, lost)
    text = write_card(publication) if card is None else Path(card).read_text(encoding="utf-8")
    notes = [*lost, *left, *_notes(publication, folder)]
    if (out / CARD).exists() and card is None:
        notes.append(f"the card takes the place of {folder}/{CARD}; to keep it, add the tag gorgon there and --card")
    write_atomically(out / CARD, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return notes


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    reason = "" if NAME.fullmatch(repo) else "a user, a slash and a name"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        reason = reason or str(error)
    if reason:
        raise ValueError(
            f"{repo!r} is no name of a repository; give USER/NAME, such as jane/llama-3-8b-eagle3 ({reason})"
        )


def _check(contents: Contents, to: str | None, options: Mapping[str, Any], target: str, base_model: str | None) -> None:
    """Refuse what would mislead the readers of what is published."""
    if to is None:
        for name, value in options.items():
            if value is not None and name != "target":
                raise ValueError(f"{name} ({FLAGS[name]}) is for an export; choose a format (--to), or leave it out")
    if to == "speculators" and base_model is None:
        raise ValueError(
            f"in the format speculators, vLLM takes the target from {CONFIG}, and {target} is no name on the hub; give "
            "one with --target"
        )
    given = options["target"]
    if given is not None and contents.fingerprint and (found := TargetFiles(given).fingerprint) != contents.fingerprint:
        raise ValueError(
            f"the head was trained for {contents.target} (fingerprint {contents.fingerprint}), but {given} has other "
            f"weights (fingerprint {found}); give the head's own target"
        )


def _copy_head(source: Path, out: Path) -> list[str]:
    with writing(out):
        for name in (WEIGHTS, TUNED, CONFIG):
            if (source / name).is_file():
                write_atomically(out / name, lambda temporary, file=source / name: shutil.copyfile(file, temporary))  # type: ignore[misc]
    return []


def _export(source: Path, out: Path, repo: str, to: str, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what the readers of the card should know, and what only the publisher."""
    out.mkdir(parents=True, exist_ok=True)
    file = file_name(repo, to)
    written = write(source, out / file if file else out, to=to, options=options, name=repo)
    return written.notes, written.left


def _notes(publication: Publication, folder: str | Path) -> list[str]:
    """Return what the publisher, and nobody else, should know."""
    contents, to = publication.contents, publication.to
    notes = []
    if publication.base_model is None:
        notes.append(
            f"the card names no base model: {publication.target or 'nothing'} is recorded as the target, which is no "
            "name on the hub; if it is there, give its name with --target"
        )
    if to not in (None, "hf"):
        return notes
    file = CONFIG if to is None else DRAFT_NOTES
    if contents.target and not is_hub_name(contents.target):
        notes.append(
            f"{file} goes up as it is and calls the target {contents.target}, which others do not have; to change "
            f"that, edit target.name in {Path(folder) / file}, or train with the hub's name as --target.name"
        )
    if found := paths(contents.training):
        notes.append(f"{file} goes up as it is, with paths of which the card shows the end only: {', '.join(found)}")
    return notes
