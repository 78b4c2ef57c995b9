"""Formats of heads that engines and other trainers read and write; one file for each, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heads.formats import eagle, eagle3, medusa, speculators

FORMATS: Mapping[str, Any] = {"eagle3": eagle3, "speculators": speculators, "medusa": medusa, "eagle": eagle}
"""Modules by the name that users know; each has `HEAD_TYPE`, `CONVENTION`, `to_engine` and `from_engine`."""
