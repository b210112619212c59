"""What every section of the configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of configuration fields: immutable, and without room for unknown keys.

    Values are taken strictly (`true` is not the number 1, "64" is not 64). The description of
    each field says what it expects; error messages and help texts repeat it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
