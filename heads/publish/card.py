"""The model card of a published head: metadata for the hub, then what it is, how it was made, measured, and is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.publish.contents import Contents
from heads.publish.tables import base_name, code, flat, measured_tables, plain, settings, table
from heads.publish.usage import usage

MARK = "gorgon"
"""The tag by which the next publication knows the repository."""
NAMES = {"medusa": "Medusa heads", "hydra": "Hydra heads", "eagle": "An EAGLE head", "eagle3": "An EAGLE-3 head"}
DRAFT_MODEL = "draft-model"


@dataclass(frozen=True)
class Publication:
    """What is published, as what, and where."""

    contents: Contents
    repo: str
    target: str
    """Name or folder of the target; empty if nobody knows it."""
    base_model: str | None
    """The target's name on the hub, if it has one."""
    to: str | None
    """Format; None for a head folder."""
    engine: str | None
    license: str | None
    notes: Sequence[str]
    """What is lost or differs in the format."""


def write_card(publication: Publication) -> str:
    """Return the card."""
    contents, to = publication.contents, publication.to
    lines = [*_metadata(publication), f"# {publication.repo.partition('/')[2]}", "", *_introduction(publication), ""]
    lines += ["## Use", ""]
    lines += usage(contents, publication.repo, target=publication.base_model, to=to, engine=publication.engine)
    if publication.notes:
        lines += [*(f"- {note}" for note in publication.notes), ""]
    if measured := measured_tables(contents.measured):
        lines += ["## Measured", "", *measured, ""]
    if contents.training:
        lines += ["## Training", "", *table(["setting", "value"], settings(contents.training)), ""]
    return "\n".join([*lines, "## Sizes", "", *_sizes(contents)]) + "\n"


def check_card(path: Path) -> None:
    """Make sure that a card of somebody's own can be published.

    Raises:
        ValueError: If it has no metadata, or not the tag.
    """
    import yaml
    from huggingface_hub import ModelCard  # slow to import

    try:
        data = ModelCard(path.read_text(encoding="utf-8")).data.to_dict()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:  # of UTF-8 and the metadata
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no model card ({reason}); mend the metadata between its lines of ---") from error
    tags = data.get("tags")
    if not isinstance(tags, list) or MARK not in tags:
        raise ValueError(
            f"the metadata of {path} must have `{MARK}` among the tags, by which the next publication knows that the "
            "repository is its own; a card made by --dry-run has it"
        )


def _kind(contents: Contents) -> str:
    return DRAFT_MODEL if contents.head is None else contents.head.kind


def _metadata(publication: Publication) -> list[str]:
    """Return YAML that the hub reads.

    Heads are "adapter" to it: weights beside a base model that is not changed, and useless without it. None of its
    relations (adapter, finetune, merge, quantized) is that of a draft model.
    """
    from huggingface_hub import ModelCardData  # slow to import

    contents, to = publication.contents, publication.to
    head = contents.head is not None
    tags = [MARK, "speculative-decoding", _kind(contents), *([to] if to not in (None, "hf") else [])]
    more: dict[str, Any] = {"base_model_relation": "adapter"} if head and publication.base_model else {}
    data = ModelCardData(
        library_name=MARK if head else "transformers",
        license=publication.license,
        base_model=publication.base_model,
        tags=list(dict.fromkeys(tags)),
        **more,
    )
    return ["---", *data.to_yaml().splitlines(), "---", ""]


def _introduction(publication: Publication) -> list[str]:
    contents, to = publication.contents, publication.to
    what = NAMES.get(_kind(contents), f"A {_kind(contents)} head") if contents.head else "A draft model"
    base = publication.base_model
    name = plain(base_name(publication.target)) or "its target"
    target = f"[{base}](https://huggingface.co/{base})" if base else name
    known = f" (fingerprint {code(contents.fingerprint)})" if contents.fingerprint else ""
    lines = [
        f"{what} with {contents.parameters:,} parameters for {target}{known}. Drafts several tokens at a time, of "
        "which the target keeps those that it would have written itself: its text comes faster, and stays its own."
    ]
    if to is None:
        return [*lines, "", "The files are a head folder, which `decode` loads and `heads.export` makes others of."]
    reader = f" for {publication.engine}" if publication.engine else ""
    return lines if to == "hf" else [*lines, "", f"The files are of the format `{to}`{reader}, made by `heads.export`."]


def _sizes(contents: Contents) -> list[str]:
    rows = settings(contents.config)
    tree = contents.tree
    if isinstance(tree, dict):
        rows.append(["draft tree", ", ".join(f"{name} {value:g}" for name, value in flat(tree))])
    elif tree is not None:
        rows.append(["draft tree", f"{len(tree)} nodes"])
    return table(["size or setting", "value"], rows)
