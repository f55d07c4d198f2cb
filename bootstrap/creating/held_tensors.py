"""A checkpoint's tensors held against its config.json: each is used, or named; what its files hold is the truth."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

from bootstrap.export.checkpoint import HEAD, weights_of
from node.machine.kinds import Kind
from node.model.checkpoint_kinds import CONFIG
from node.model.pretrained import Pretrained
from protocol.errors import CheckpointError
from protocol.run.manifest import Manifest, manifest_from
from protocol.run.model import ATTENTION_BIAS, Model

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
MOST_NAMED = 3
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
# buffers, which the model computes
COMPUTED = re.compile(r".*\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")
# of parts beside the language model, without which its logits are the same
BESIDE = re.compile(
    r"(model\.)?(mtp|medusa_head|score|classifier|classification_head|qa_outputs|v_head|value_head|reward_head"
    r"|rm_head|vision_tower|vision_model|visual|image_newline|multi_modal_projector|mm_projector|audio_tower"
    r"|audio_projector|speech_encoder)(s|_layers)?\..*|model\.image_newline"
)
# of a model for another task than writing on, by its tensors and by its class in config.json
OTHER_HEAD = re.compile(
    r"(score|classifier|classification_head|qa_outputs|v_head|value_head|reward_head|rm_head)(s|_layers)?\..*"
)
OTHER_TASK = re.compile(
    r".*For(Sequence|Token)Classification|.*ForQuestionAnswering|.*(Reward|Value)\w*Model.*"
)
OTHER_HEADS = "the head of a classifier or of rewards"
# what the files are where their tensors have such names, and what helps
CAUSES = (
    Kind(
        "of an adapter that is not merged",
        r".*(\.lora_|\.base_layer\.|\.modules_to_save\.).*|base_model\..*",
        "merge_and_unload() of peft, then save_pretrained",
    ),
    Kind(
        "of a compiled model",
        r"_orig_mod\..*",
        "save model._orig_mod with save_pretrained",
    ),
    Kind(
        "of a model in a wrapper for training",
        r"module\..*|.*_fsdp_wrapped_module.*|.*_checkpoint_wrapped_module.*",
        "save the model inside it with save_pretrained",
    ),
    Kind(
        "of quantized weights, which cannot be trained",
        r".*(qweight|qzeros|scales?|g_idx|_scale_inv|\.SCB|absmax|quant_map|quant_state.*|weight_packed|weight_shape"
        r"|zero_point|mlp.*\.biases|_proj\.biases)",
        "use the model that it was made from",
    ),
    Kind(
        "of a mixture of experts, which cannot be trained here",
        r".*\.(experts|router|block_sparse_moe|mlp\.gate\.|shared_expert).*",
        "use another checkpoint",
    ),
    Kind(
        "norms of queries and keys",
        r".*\.[qk]_norm\..*",
        'model_type "qwen3" has them, correct it there',
    ),
    Kind(
        "of a model without its head",
        r"(layers|embed_tokens|norm)\..*",
        "save the whole one, as AutoModelForCausalLM loads it",
    ),
    Kind(
        "of a model within another one",
        r".*language_model\..*",
        "save the language model alone with save_pretrained",
    ),
)


def fitted(source: Pretrained, manifest: Manifest) -> Manifest:
    """The manifest with the model that the files hold, where a correction of config.json makes it so, with a warning.

    Raises `CheckpointError` for a tensor that the model has no place for. Reads the files' headers.
    """
    held = source.held()
    if manifest.model.tied_embeddings and HEAD in held and EMBEDDING in held:
        if not source.are_equal(HEAD, EMBEDDING):
            logger.warning(
                "%s of %s says tie_word_embeddings, but its files hold a head (%s) that differs from the embedding: "
                "the run trains both, without tied embeddings.",
                CONFIG,
                source.source,
                HEAD,
            )
            contents = manifest.model_dump()
            contents["model"]["tied_embeddings"] = False
            manifest = manifest_from(contents)
        else:
            del held[HEAD]
    wanted = weights_of(manifest).keys()
    _require_layers(source, held, manifest.model)
    if HEAD in held and HEAD not in wanted and EMBEDDING not in held:
        raise CheckpointError(
            f"{source.source} holds the head ({HEAD}) without the embedding ({EMBEDDING}), and {CONFIG} says that "
            "they are one. Load it with AutoModelForCausalLM and save it with save_pretrained, which writes the "
            "embedding."
        )
    if HEAD in wanted and HEAD not in held and (other := _other_head(source, held)):
        raise CheckpointError(
            f"{source.source} has {other} in place of a head for tokens ({HEAD}). Use the language model that it was "
            "made from."
        )
    if HEAD in wanted and HEAD not in held and EMBEDDING in held:
        raise CheckpointError(
            f"{source.source} has no head ({HEAD}), and {CONFIG} does not say tie_word_embeddings. Set it to true if "
            "the embedding is the head, or save the whole model with save_pretrained."
        )
    unused = [name for name in sorted(held.keys() - wanted) if not COMPUTED.fullmatch(name)]
    beside = [name for name in unused if BESIDE.fullmatch(name)]
    strange = [name for name in unused if name not in beside]
    if strange:
        raise CheckpointError(
            f"{source.source} holds tensors that the model of its {CONFIG} has no place for: {_listed(strange)}. "
            f"{_cause(strange[0], manifest.model)}"
        )
    if beside:
        logger.warning(
            "Tensors of %s that are beside the language model and are left out: %s.",
            source.source,
            _listed(beside),
        )
    return manifest


def _other_head(source: Pretrained, held: Collection[str]) -> str:
    """The head that a model has in place of one for tokens, by its tensors or config.json; empty for none known."""
    found = next((name for name in sorted(held) if OTHER_HEAD.fullmatch(name)), "")
    classes = source.config().get("architectures")
    named = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    other = next((name for name in named if OTHER_TASK.fullmatch(name)), "")
    return f"{OTHER_HEADS} ({found or other[:80]})" if found or other else ""


def _require_layers(source: Pretrained, held: Collection[str], model: Model) -> None:
    numbers = {int(found[1]) for name in held if (found := LAYER.match(name))}
    if numbers and len(numbers) != model.layers:
        raise CheckpointError(
            f"{CONFIG} of {source.source} says num_hidden_layers {model.layers}, and its files hold {len(numbers)} "
            "layers. Correct it there, or get both again."
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(name[:80] for name in names[:MOST_NAMED]) + more


def _cause(name: str, model: Model) -> str:
    """A sentence on what the tensor of that name is, and what helps."""
    for kind in CAUSES:
        if re.fullmatch(kind.pattern, name):
            return f"They are {kind.what}: {kind.help}."
    setting = "mlp_bias" if ".mlp." in name else "attention_bias"
    if name.endswith("_proj.bias"):
        if model.family == "llama" or (setting == "attention_bias" and model.family in ATTENTION_BIAS):
            return f"They are biases: set {setting} to true in it if the model has them all."
        return f'They are biases, which no model of the type "{model.family}" has there: correct model_type in it.'
    return "Correct it, or save the model as AutoModelForCausalLM loads it with save_pretrained."
