"""What every section of a manifest is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
