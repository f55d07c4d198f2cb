"""The manifest's [model]: a decoder of Llama's block shape, in the words of transformers' configurations."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Factor = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Positions = Annotated[int, Field(ge=1, le=2**30)]

# of each type: the settings that it needs, and those that it may have besides
ROPE_NEEDS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_MAY: dict[RopeType, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
ATTENTION_BIAS: tuple[Family, ...] = ("llama", "qwen3")  # that have the choice; Qwen2 always has its own
SLIDING: tuple[Family, ...] = ("mistral", "qwen2", "qwen3")

MOST_OVER_BYTES = 2_048  # tokens of a vocabulary where bytes are tokens: more of them nobody means


class Section(BaseModel):
    """The base of every section of a manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Rope(Section):
    """The stretching of rotary positions: `rope_parameters` of transformers without its theta."""

    type: RopeType = "default"
    factor: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] | None = None
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Factor | None = None
    mscale_all_dim: Factor | None = None
    truncate: bool | None = None

    @model_validator(mode="after")
    def _settings_fit_the_type(self) -> Self:
        needed = ROPE_NEEDS[self.type]
        allowed = {*needed, *ROPE_MAY.get(self.type, ())}
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f'model.rope.{name} is missing: type "{self.type}" needs it')
        for name in self.given():
            if name not in allowed:
                raise ValueError(f'model.rope.{name} has no meaning with type "{self.type}": remove it')
        if self.type == "llama3" and (self.high_freq_factor or 0) <= (self.low_freq_factor or 0):
            raise ValueError("model.rope.high_freq_factor must be above model.rope.low_freq_factor")
        return self

    def given(self) -> dict[str, float | int | bool]:
        """The settings that are there, beside the type."""
        contents = self.model_dump(exclude={"type"})
        return {name: value for name, value in contents.items() if value is not None}


class Model(Section):
    """Shapes, first weights and the details in which the families differ."""

    family: Family = "llama"
    vocab_size: Annotated[int, Field(ge=2, le=1_000_000)]
    hidden_size: Annotated[int, Field(ge=8, le=65_536)]
    layers: Annotated[int, Field(ge=1, le=1_024)]
    heads: Annotated[int, Field(ge=1, le=1_024)]
    kv_heads: Annotated[int, Field(ge=0, le=1_024)] = 0  # 0: as many as heads
    head_dim: Annotated[int, Field(ge=0, le=1_024)] = 0  # 0: hidden_size / heads
    intermediate_size: Annotated[int, Field(ge=8, le=1_048_576)]
    tied_embeddings: bool = False  # the head multiplies with the embedding's matrix
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Annotated[int, Field(ge=0, le=2**30)] = 0  # tokens that a token sees; 0: all before it
    full_layers: Annotated[int, Field(ge=0, le=1_024)] = 0  # the first ones, which see all tokens
    max_positions: Annotated[int, Field(ge=0, le=2**30)] = 0  # 0: those of a training sequence
    rope_theta: Positive = 10_000.0
    rope: Rope = Rope()
    norm_eps: Positive = 1e-5
    init_std: Positive = 0.02
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim {self.head_dim} must be even")
        hidden = f"model.hidden_size {self.hidden_size}"
        if not self.head_dim and self.hidden_size % (2 * self.heads):
            raise ValueError(f"{hidden} must be an even multiple of model.heads {self.heads}")
        if self.family == "llama" and self.hidden_size % self.heads:  # transformers' own condition
            raise ValueError(f"{hidden} must be a multiple of model.heads {self.heads}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"model.heads {self.heads} must be a multiple of model.kv_heads {self.kv_heads}")
        return self

    @model_validator(mode="after")
    def _family_fits(self) -> Self:
        has = {
            "attention_bias": self.attention_bias and self.family not in ATTENTION_BIAS,
            "mlp_bias": self.mlp_bias and self.family != "llama",
            "sliding_window": bool(self.sliding_window) and self.family not in SLIDING,
            "full_layers": bool(self.full_layers) and not (self.sliding_window and self.family[:4] == "qwen"),
        }
        for name, is_too_much in has.items():
            if is_too_much:
                raise ValueError(
                    f'model.{name} has no meaning in this model of family "{self.family}": remove it'
                )
        return self

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.heads

    @property
    def has_query_biases(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.attention_bias or self.family == "qwen2"

    @property
    def has_query_norms(self) -> bool:
        """True if queries and keys are normed."""
        return self.family == "qwen3"

    def slides(self, layer: int) -> bool:
        """Return whether attention in `layer` is bounded by the sliding window."""
        return bool(self.sliding_window) and layer >= self.full_layers

    @property
    def outgrows_bytes(self) -> bool:
        """True if bytes as tokens would use next to nothing of the vocabulary."""
        return self.vocab_size > MOST_OVER_BYTES

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_size, self.key_value_heads * self.head_size
        count = 2 * hidden * (queries + keys) + 3 * hidden * inner + 2 * hidden
        if self.has_query_norms:
            count += 2 * self.head_size
        if self.has_query_biases:
            count += queries + 2 * keys
        if self.attention_bias:
            count += hidden
        return count + (2 * inner + hidden if self.mlp_bias else 0)
