"""The manifest: the immutable description of one run, and the only thing its members must agree on.

People read and write it as TOML; peers get it signed, see `signed_manifest`.
"""

from __future__ import annotations

import json
import tomllib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from protocol.codecs.near_codecs import BITS, kept_apart
from protocol.errors import ManifestError, legible
from protocol.ground import MOST_COUNT
from protocol.records.identity import is_peer_id
from protocol.run.cut import starts_of
from protocol.run.manifest_advice import advice
from protocol.run.model import Count, Model, Positive, Section
from protocol.run.start import Start

EXTRA = "extra_forbidden"  # pydantic's word for a setting that there is not
WORD = "literal_error"  # and for a word that is none of those that a setting may have
MOST_NAMED = 3  # unknown settings
SIGNED = b"\x93\xc4\x20"  # the first bytes of a signed manifest: three parts, of which the first is a key of 32 bytes
BYTES = "bytes"  # data.tokenizer where each byte is a token
MOST_LETTERS = 64  # of a run's name
MOST_REPLICAS = 10_000  # of a stage: what a replica of another one can be given
PRESETS = ("tiny", "llama-5m", "llama-20m", "llama-60m", "llama-125m", "llama-1.3b", "llama-6.8b")

Codec = Literal["fp32", "fp16", "bf16", "int8"]
BoundaryCodec = Literal["fp32", "fp16", "bf16", "int8", "eden4", "eden2"]  # between two stages
# of z also modulo a few bits, for replicas that are near: `protocol.codecs.lattice`
GossipCodec = Literal["fp32", "fp16", "bf16", "int8", "mod4", "mod3", "mod2"]
MOST_TEMPLATE_BYTES = (
    24 * 1024
)  # of a chat template: the manifest's other settings need the rest of its 64 KiB
GOSSIP_CODECS: tuple[str, ...] = get_args(GossipCodec)


def _is_peer(text: str) -> str:
    if not is_peer_id(text):
        raise ValueError("not a peer id (12D3Koo…)")
    return text


def gamma_bound(alpha: float, group_size: int = 2, kept_apart: float = 0.0) -> float:
    """The pull γ must stay below this for the replicas' spread to stay bounded in mean square (docs/noloco.md).

    2n(1 − α²) / (n(1 − α) + 2α) for groups of n replicas out of many; for pairs it is 2(1 − α²). Where a pair's
    rounding puts back ρ² = `kept_apart` of its square distance, 2(1 − α²) / (1 + ρ²(1 + α)).
    """
    if kept_apart:
        return 2 * (1 - alpha**2) / (1 + kept_apart * (1 + alpha))
    n = group_size
    return 2 * n * (1 - alpha**2) / (n * (1 - alpha) + 2 * alpha)


class Data(Section):
    """The text that stage-0 replicas draw sequences from, and how it becomes tokens.

    "local" leaves the text to each volunteer's --data. A manifest never names paths: it comes from others, and
    must not be able to make a volunteer read their files.
    """

    source: Literal["python-stdlib", "local"] = "python-stdlib"
    # "bytes", or the hash of the run's tokenizer.json: volunteers get the file from other members
    tokenizer: Annotated[str, Field(pattern=r"^(bytes|sha256:[0-9a-f]{64})$")] = BYTES
    end_of_text: Annotated[str, Field(max_length=128)] = ""  # the tokenizer's token between documents
    sequence_tokens: Annotated[int, Field(ge=2, le=1_048_576)]
    # The fraction of documents that nobody trains on. The hash of a document's text decides, so that all agree.
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    # bytes; longer texts are cut at line ends
    longest_document: Annotated[int, Field(ge=256, le=2**24)] = 16_384
    # tokens whose sequences are shuffled among each other, so that those of a step come from many documents; a
    # replica of stage 0 holds them twice, in 4 bytes each
    shuffle_window: Annotated[int, Field(ge=1, le=2**28)] = 2**23

    @model_validator(mode="after")
    def _texts_end(self) -> Self:
        if (self.tokenizer == BYTES) == bool(self.end_of_text):
            raise ValueError(
                "data.end_of_text names a token of data.tokenizer: give both, or neither for byte tokens"
            )
        return self


class Inner(Section):
    """The inner optimizer and what one inner step consumes."""

    # "muon": Muon for the matrices of the layers, AdamW for embeddings, head, norms and biases
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive
    muon_learning_rate: Positive | None = None  # at the peak of the same schedule; learning_rate if not given
    min_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    warmup_steps: Annotated[int, Field(ge=0)]
    total_steps: Count
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    clip_norm: Positive = 1.0
    microbatches: Annotated[int, Field(ge=1, le=4_096)]  # admitted to one inner step of a replica
    sequences: Annotated[int, Field(ge=1, le=65_536)]  # in one microbatch
    # 1: forward passes of the next step may run before this one is applied, so that no stage waits for the last
    # gradients of a step; their backward passes then use the new weights. 0: nothing of the next step runs before.
    staleness: Literal[0, 1] = 0
    # the steps that the learning rate of a later stage's replica goes by: those that it has taken, or those of the
    # replicas of the first stage, which each microbatch carries
    clock: Literal["replica", "run"] = "replica"

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.warmup_steps >= self.total_steps:
            steps = f"inner.total_steps {self.total_steps}"
            raise ValueError(f"inner.warmup_steps {self.warmup_steps} must be below {steps}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError("inner.min_learning_rate must not exceed inner.learning_rate")
        if self.muon_learning_rate is not None and self.optimizer != "muon":
            raise ValueError('inner.muon_learning_rate needs inner.optimizer = "muon"')
        return self


MOST_FRAGMENTS = 64


class Outer(Section):
    """NoLoCo's outer step (arXiv 2506.10911): momentum α, progress gain β, pull γ, every k inner steps.

    `method` makes the baselines settings of the same run: "diloco" averages over all live replicas of a stage,
    "average" takes the pair's mean of the weights without momentum, "local" never averages.
    """

    method: Literal["noloco", "diloco", "average", "local"] = "noloco"
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    beta: Positive = 0.7
    gamma: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    inner_steps: Count = 50  # k
    # A replica may meet a partner from k·(1 − window) to k·(1 + window) inner steps after its last outer step.
    window: Annotated[float, Field(ge=0, le=0.9)] = 0.25
    # "steps": a round is k inner steps. "time": as many as fit into the time that the median replica of the
    # stage needs for k, at least k/4 and at most 4k, so that rounds of fast and slow replicas meet.
    pace: Literal["steps", "time"] = "steps"
    # How much of what averaging takes from the length of Δ each replica gives back, from 0, nothing, to 1: see
    # `node.rounds.gain`. Not written down in a manifest without it, so that earlier versions read that.
    gain: Annotated[float, Field(ge=0, le=1, exclude_if=lambda returned: returned == 0)] = 0.0
    # Into how many fragments the parameters of a stage are cut; each round averages one of them, see
    # `node.model.fragment`. Not written down in a manifest where it is 1, so that earlier versions read that.
    fragments: Annotated[int, Field(ge=1, le=MOST_FRAGMENTS, exclude_if=lambda count: count == 1)] = 1
    # "none": z goes at the end of the round. "phi-early": φ goes during the inner steps, once the pair is agreed,
    # and only Δ at the end.
    overlap: Literal["none", "phi-early"] = "none"
    # Clip what a partner changes to this many times the median of past distances; 0 trusts everybody.
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(α, β, γ) of the outer step: plain averaging is NoLoCo with α = 0, β = γ = 1."""
        if self.method in ("average", "local"):
            return 0.0, 1.0, 1.0
        return self.alpha, self.beta, self.gamma

    @property
    def cycle_steps(self) -> int:
        """Inner steps in which each fragment is averaged once."""
        return self.inner_steps * self.fragments

    @property
    def averages_pairs(self) -> bool:
        return self.method in ("noloco", "average")

    @property
    def sends_whole_weights(self) -> bool:
        """True if all that a round sends is one replica's weights to one other."""
        return self.averages_pairs and self.overlap == "none"

    @model_validator(mode="after")
    def _stable(self) -> Self:
        if self.gain and not (self.method == "noloco" and self.overlap == "none"):
            raise ValueError('outer.gain needs outer.method = "noloco" and outer.overlap = "none"')
        if self.fragments > 1 and not (self.sends_whole_weights and self.coefficients[0] == 0):
            raise ValueError(
                "outer.fragments needs averaging in pairs (outer.method noloco or average), outer.alpha = 0 and "
                'outer.overlap = "none"'
            )
        if self.method == "noloco":
            bound, why = gamma_bound(self.alpha), f"with pairs and alpha {self.alpha:g}"
            formula = "2(1 - alpha^2)"
        elif self.method == "diloco":
            bound, why = 2 * (1 + self.alpha), f"with all replicas in one group and alpha {self.alpha:g}"
            formula = "2(1 + alpha)"
        else:
            return self
        if not 0 < self.gamma < bound:
            raise ValueError(
                f"outer.gamma {self.gamma:g} is outside the stable range: {why} "
                f"it must lie between 0 and {bound:.3f} (= {formula}), or replicas drift apart without bound"
            )
        return self


class Wire(Section):
    """The codecs in which tensors travel; `protocol.codecs.codec` has bytes and errors of each.

    Between stages also in 4 or 2 bits per value after a rotation, "eden4" and "eden2": what is lost is expected to
    have 0.0096 and 0.133 of the squared norm (Lloyd-Max on a Gaussian, D = 0.0095 and 0.1175, as D/(1 − D)). What
    is averaged does not travel so: replicas would stay as far apart as it is rounded. Its "mod4", "mod3" and "mod2"
    round by what two replicas differ by.
    """

    activations: BoundaryCodec = "bf16"
    gradients: BoundaryCodec = "bf16"
    gossip: GossipCodec = "fp32"  # z, and φ where it goes early
    progress: Codec = "fp32"  # Δ where φ goes early


class Access(Section):
    """Access rules. What nobody names is open to all; revoked peers are shut out of any run that has rules."""

    # Strangers learn this manifest and nothing else: members and visitors show a token, see `protocol.access.tokens`.
    private: bool = False
    # who needs no token
    peers: Annotated[tuple[Annotated[str, AfterValidator(_is_peer)], ...], Field(max_length=512)] = ()

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        if self.peers and not self.private:
            raise ValueError("access.peers names who may enter a private run: set access.private")
        return self


STAGE_RETURN = (
    1_800.0  # seconds; not written down in a manifest that has it, so that earlier versions read it
)


class Limits(Section):
    """Times in seconds; deadlines begin with them, then adapt to what the swarm shows and never exceed them.

    A frame that is half sent may take longer: see `FRAME_SECONDS` in protocol/rpc/channel.py.
    """

    microbatch_deadline: Positive = 30.0
    gossip_deadline: Positive = 30.0
    record_lifetime: Annotated[float, Field(ge=3, le=3_600)] = 45.0
    clock_skew: Annotated[float, Field(gt=0, le=3)] = 3.0  # hivemind's DHT refuses peers beyond 3 s
    # for which a stage that has had steps waits for somebody who has its state, before it is begun anew
    stage_return: Annotated[
        float, Field(gt=0, le=30 * 86_400, exclude_if=lambda seconds: seconds == STAGE_RETURN)
    ] = STAGE_RETURN


class Manifest(Section):
    """One run. Every member computes the same weights, slices and schedules from it."""

    name: Annotated[
        str, Field(min_length=1, max_length=MOST_LETTERS, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    ]
    protocol: Literal[1] = 1
    stages: Annotated[int, Field(ge=1, le=1_024)]
    model: Model
    start: Start | None = None
    data: Data
    inner: Inner
    outer: Outer
    wire: Wire = Wire()
    limits: Limits = Limits()
    access: Access = Access()
    # "random": each microbatch goes to a random replica of the next stage, so that replicas mix. "fixed": always to
    # the same one while it lives, as separate pipelines would; a baseline.
    routing: Literal["random", "fixed"] = "random"
    # of the microbatches, sent to a second replica of the next stage to compare the answers; it costs as much work
    checked: Annotated[float, Field(ge=0, le=1)] = 0.01

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if self.stages > self.model.layers:
            raise ValueError(f"stages {self.stages} exceeds model.layers {self.model.layers}: lower it")
        if self.start is not None and len(self.start.digests) != self.stages:
            raise ValueError(
                f"start.digests has {len(self.start.digests)} entries for {self.stages} stages: give one for each"
            )
        if self.is_ring and self.inner.staleness:
            raise ValueError(
                "inner.staleness 1 cannot be had with model.tied_embeddings in several stages: a step would wait for "
                "microbatches that wait for it. Set it to 0"
            )
        if self.wire.gossip in BITS:
            self._require_near_codec_fits(self.wire.gossip)
        if self.data.tokenizer == BYTES and self.model.vocab_size < 256:
            raise ValueError(f"model.vocab_size {self.model.vocab_size} is too small for bytes: use 256")
        return self

    def _require_near_codec_fits(self, codec: str) -> None:
        if not self.outer.sends_whole_weights:
            raise ValueError(
                f'wire.gossip "{codec}" is for whole weights between two replicas: set outer.overlap to "none" and '
                'outer.method to "noloco" or "average", or wire.gossip to "int8"'
            )
        alpha, _, gamma = self.outer.coefficients
        bound = gamma_bound(alpha, kept_apart=kept_apart(codec))
        if gamma >= bound:
            raise ValueError(
                f'outer.gamma {gamma:g} is outside the stable range of wire.gossip "{codec}": with alpha {alpha:g} '
                f"it must be below {bound:.3f}, or rounding drives replicas apart. Lower it, or take more bits"
            )

    def layers_of(self, stage: int) -> range:
        """The decoder layers of `stage`, contiguous, so that no stage is slower than it must be; see `cut`."""
        starts = starts_of(self.model, self.data.sequence_tokens, self.stages)
        return range(starts[stage], starts[stage + 1])

    @property
    def is_ring(self) -> bool:
        """True if microbatches end where they began: the matrix of tied embeddings is in the first stage alone."""
        return self.model.tied_embeddings and self.stages > 1

    def stage_after(self, stage: int) -> int:
        """The stage that microbatches go to from `stage`: in a ring from the last one to the first.

        Without a ring nobody serves the one after the last.
        """
        return (stage + 1) % self.stages if self.is_ring else stage + 1

    @property
    def hops(self) -> int:
        """Forward passes of a microbatch by different peers: one for each stage, and the head's in a ring."""
        return self.stages + self.is_ring

    @property
    def head_stage(self) -> int:
        """The stage that computes logits and the loss."""
        return 0 if self.model.tied_embeddings else self.stages - 1

    @property
    def positions(self) -> int:
        """The number of tokens that the model's positions are made for."""
        return self.model.max_positions or self.data.sequence_tokens

    @property
    def tokens_per_microbatch(self) -> int:
        return self.inner.sequences * self.data.sequence_tokens

    def most_steps(self, stage: int) -> int:
        """Return the inner steps that a replica of `stage` can have done, to check what others claim.

        A replica of the first stage ends at `total_steps`. One of a later stage takes an inner step for as many
        microbatches, whoever draws them: alone in its stage it does the steps of all replicas of the first one.
        """
        feeders = MOST_REPLICAS if stage else 1
        return min(feeders * self.inner.total_steps, MOST_COUNT)


def manifest_from(contents: object) -> Manifest:
    """Validate untrusted contents. Raises `ManifestError` that names each bad setting."""
    try:
        return Manifest.model_validate(contents)
    except ValidationError as error:
        problems = [advice(problem, Manifest) for problem in error.errors()]
        raise ManifestError("The manifest cannot be used:\n  " + "\n  ".join(problems)) from None


def unknown_settings(contents: object) -> list[str]:
    """The first settings, as "outer.name", that this version does not know, or whose words it does not; legible."""
    try:
        Manifest.model_validate(contents)
    except ValidationError as error:
        places = (
            ".".join(map(str, problem["loc"])) + _word(problem["type"], problem["input"])
            for problem in error.errors()
            if problem["type"] == EXTRA or (problem["type"] == WORD and isinstance(problem["input"], str))
        )
        return [legible(place[:64]) for place in islice(places, MOST_NAMED)]
    return []


def _word(problem: str, told: object) -> str:
    return f' = "{str(told)[:32]}"' if problem == WORD else ""


def load_toml(path: Path) -> Manifest:
    """Read a manifest that a person wrote. Raises `ManifestError` that names file, place and reason."""
    return _named(toml_contents(path), str(path))


def toml_contents(path: Path) -> dict[str, object]:
    """The contents of a TOML file, unchecked. Raises `ManifestError` for what is not TOML."""
    try:
        raw = path.read_bytes()
        if raw.startswith(SIGNED):
            raise ManifestError(
                f"{path} is a run's signed manifest, not TOML: leave it as it is. noloco manifest check {path} shows "
                "it, and noloco-bootstrap --state-dir with its directory takes the run up."
            )
        return _parsed(raw.decode("utf-8-sig"), str(path))
    except OSError as error:
        raise ManifestError(f"Cannot read the manifest {path} ({error.strerror}). Check the path.") from None
    except UnicodeDecodeError:
        if b"\0" in raw and not raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise ManifestError(
                f"The manifest {path} is no text. Check the path: it is a TOML file."
            ) from None
        raise ManifestError(
            f"The manifest {path} is not UTF-8 text. Check the path, or save it as UTF-8."
        ) from None


def load_preset(name: str) -> Manifest:
    """One of `PRESETS`, shipped with the package."""
    if name not in PRESETS:
        raise ManifestError(f"There is no preset {name!r}. Choose one of: {', '.join(PRESETS)}.")
    where = f"preset {name}"
    return _named(_parsed(preset_text(name), where), where)


def preset_text(name: str) -> str:
    return resources.files("protocol").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")


def _parsed(text: str, where: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"{where} is not valid TOML: {error}. Correct that place.") from None


def _named(contents: dict[str, object], where: str) -> Manifest:
    try:
        return manifest_from(contents)
    except ManifestError as error:
        raise ManifestError(f"{where}: {error}") from None


def as_toml(manifest: Manifest) -> str:
    """Every setting as TOML, defaults included; `manifest.load_toml` reads the same manifest from it."""
    contents = manifest.model_dump(exclude_none=True)
    top = {name: value for name, value in contents.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in contents.items() if isinstance(value, dict)}
    blocks = [_settings(top), *(f"[{name}]\n{_settings(values)}" for name, values in sections.items())]
    return "\n".join(blocks)


def _settings(values: dict[str, object]) -> str:
    # JSON writes strings, numbers and lists of them as TOML does; tables within sections TOML writes inline
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=False)
