"""Where the answers come from: the record beside them, and a dataset card made of it, as the Hugging Face Hub has them.

The card is `<out>.README.md`; in a dataset repository it goes by README.md. It names no folders of this machine.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data.answers import save_meta
from data.distill_config import LOCAL, REMOTE, DistillConfig
from heads.files import write_atomically
from heads.publish.tables import base_name, settings, table


def card_path(out: Path) -> Path:
    """Return where the card of `out` is."""
    return out.with_name(out.name + ".README.md")


def save_provenance(out: Path, meta: Mapping[str, Any]) -> None:
    """Write the record and the card of `out`; each is whole at any moment."""
    save_meta(out, meta)
    text = write_card(out, meta)
    write_atomically(card_path(out), lambda new: new.write_text(text, encoding="utf-8"))


def describe_run(config: DistillConfig, places: Mapping[str, object], processes: int) -> dict[str, object]:
    """Return what may change from one run into the same output to the next, for the record."""
    names = ("limit", "skip_long", *(LOCAL[:1] if config.server is None else REMOTE[1:]))
    own = {name: vars(config)[name] for name in names}
    versions = {"python": platform.python_version()} | dict(_versions("torch", "transformers", "gorgon"))
    shown = {**places, "prompts": str(config.prompts), "exclude": [str(source) for source in config.exclude]}
    return {"started": now(), **shown, **own, "processes": processes, "versions": versions}


def now() -> str:
    """Return date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions(*packages: str) -> Iterator[tuple[str, str]]:
    for package in packages:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def write_card(out: Path, meta: Mapping[str, Any]) -> str:
    """Return the card of `out`, of which `meta` is the record."""
    run, counts = meta["runs"][-1], meta["counts"]
    reasons = counts.get("finish_reasons", {})
    answered, wanted = sum(reasons.values()), counts["prompts"]
    by = f"by `{meta['settings']['server_model']}` on a server ({run['server']})" if "server" in run else "by decoding"
    prompts = base_name(run["prompts"])
    lines = [
        *_metadata(out), f"# {out.stem}", "",
        f"Answers of `{base_name(run['target'])}` to the prompts of `{prompts}`, made {by} with Gorgon's "
        f"`data.distill` to train heads that draft for it. {answered} of {wanted} prompts are answered"
        + (f": {', '.join(f'{count} {reason}' for reason, count in sorted(reasons.items()))}." if answered else "."),
        "", "\"stop\": the model ended its answer; \"length\": it was cut at `max_new_tokens`. The prompts keep the "
        "license that they have, and what the model says may be under its own.", "",
        "## How they were made", "", *table(["setting", "value"], settings(meta["settings"])), "",
    ]  # fmt: skip
    if wanted != answered or counts.get("too_long") or meta.get("failed"):
        rows = [["answered", str(answered)], ["not answered (yet)", str(wanted - answered)]]
        rows += [["left out as too long", str(counts.get("too_long", 0))]]
        rows += [["failed in the last run", str(len(meta.get("failed", {})))]]
        lines += ["## Prompts", "", *table(["prompts", "number"], rows), ""]
    return "\n".join([*lines, *_decontamination(meta), *_template(meta), *_runs(meta["runs"])]) + "\n"


def _metadata(out: Path) -> list[str]:
    from huggingface_hub import DatasetCardData  # slow to import

    data = DatasetCardData(
        tags=["gorgon", "distillation", "speculative-decoding"],
        task_categories=["text-generation"],
        configs=[{"config_name": "default", "data_files": out.name}],
    )
    return ["---", *data.to_yaml().splitlines(), "---", ""]


def _decontamination(meta: Mapping[str, Any]) -> list[str]:
    report = meta.get("decontamination")
    if not report:
        return ["## Decontamination", "", "The prompts were not compared with evaluation prompts.", ""]
    rows = [[f"`{name}`", *(str(count) for count in counts.values())] for name, counts in report["files"].items()]
    return [
        "## Decontamination", "",
        f"{len(report['left_out'])} prompts were left out before anything was asked, because a user turn is that of an "
        f"evaluation prompt but for case, punctuation and spaces, or has {report['words']} words in a row of one.", "",
        *table(["evaluation file", "prompts", "left out as equal", "left out for words in a row"], rows), "",
    ]  # fmt: skip


def _template(meta: Mapping[str, Any]) -> list[str]:
    checks = meta.get("template")
    if checks is None:
        return []
    unknown = sum(meta["counts"].get("finish_reasons", {}).values()) - checks["same"] - checks["other"]
    return [
        "## Chat template", "",
        f"The server rendered the prompts. Where it says how many tokens that made, {checks['same']} prompts had as "
        f"many as the target's own template makes of them, and {checks['other']} had not; of {unknown} it is not "
        "known.", "",
    ]  # fmt: skip


def _runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [[run["started"], ", ".join(f"{name} {number}" for name, number in run["versions"].items())] for run in runs]
    return ["## Runs", "", *table(["started (UTC)", "versions"], rows)]
