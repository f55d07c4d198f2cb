"""What the daemon computes, without the daemon: `python docs/reference.py`.

A Llama in two pipeline stages, two replicas of each, on one machine, in straight lines: a microbatch through both
stages, an inner step, and a NoLoCo round of a pair (arXiv 2506.10911). No network, no failures, no codecs.
A test holds it against the daemon, to 1e-6. S sequences, T tokens, H hidden size, N heads, D = H / N, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F

Weights = dict[
    str, torch.Tensor
]  # parameters of one stage, by the names that Hugging Face's Llama gives them
HEADS, EPS, ROPE_THETA = 2, 1e-5, 10_000.0
BETA1, BETA2, ADAM_EPS, DECAY, CLIP = 0.9, 0.95, 1e-5, 0.1, 1.0
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.7


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:  # [S, T, H] -> [S, T, H]
    return F.rms_norm(x, gain.shape, gain, EPS)


def rotated(x: torch.Tensor) -> torch.Tensor:  # queries or keys [S, N, T, D], turned by their positions
    tokens, size = x.shape[-2:]
    turns = 1.0 / ROPE_THETA ** (torch.arange(0, size, 2) / size)  # [D / 2]
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), turns)  # [T, D / 2]
    left, right = x.chunk(2, dim=-1)
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)


def layer(x: torch.Tensor, w: Weights, prefix: str) -> torch.Tensor:  # [S, T, H] -> [S, T, H]
    sequences, tokens, hidden = x.shape
    h = normed(x, w[f"{prefix}.input_layernorm.weight"])
    by_head = (sequences, tokens, HEADS, hidden // HEADS)
    q, k, v = (
        F.linear(h, w[f"{prefix}.self_attn.{name}_proj.weight"]).view(by_head).transpose(1, 2)
        for name in ("q", "k", "v")
    )  # each [S, N, T, D]
    mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(sequences, tokens, hidden)
    x = x + F.linear(mixed, w[f"{prefix}.self_attn.o_proj.weight"])
    h = normed(x, w[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (F.linear(h, w[f"{prefix}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + F.linear(F.silu(gate) * up, w[f"{prefix}.mlp.down_proj.weight"])


def first_stage(tokens: torch.Tensor, w: Weights) -> torch.Tensor:  # int64 [S, T] -> activations [S, T, H]
    return layer(F.embedding(tokens, w["model.embed_tokens.weight"]), w, "model.layers.0")


def last_stage(x: torch.Tensor, labels: torch.Tensor, w: Weights) -> torch.Tensor:  # -> loss, nats per token
    x = normed(layer(x, w, "model.layers.1"), w["model.norm.weight"])
    logits = F.linear(x, w["lm_head.weight"])  # [S, T, V]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_on(tokens: torch.Tensor, labels: torch.Tensor, first: Weights, last: Weights) -> float:
    """One microbatch forward and backward; gradients of both stages' weights are added up in `.grad`."""
    activations = first_stage(tokens, first)
    received = (
        activations.detach().requires_grad_()
    )  # what goes over the wire to a random peer of the next stage,
    loss = last_stage(received, labels, last)
    loss.backward()
    activations.backward(received.grad)  # and what comes back from it
    return float(loss.detach())


# --- an inner step --------------------------------------------------------------------------------


def inner_step(
    w: Weights, moments: dict[str, list[torch.Tensor]], rate: float, microbatches: int, step: int
) -> None:
    """AdamW on the mean gradient of a batch, clipped over this stage; matrices decay. `step` counts from 1."""
    gradients = {name: weight.grad / microbatches for name, weight in w.items() if weight.grad is not None}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    with torch.no_grad():
        for name, weight in w.items():
            gradient = gradients[name] * min(1.0, CLIP / norm)
            first, second = moments.setdefault(name, [torch.zeros_like(weight), torch.zeros_like(weight)])
            first.lerp_(gradient, 1 - BETA1)
            second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            if weight.dim() > 1:
                weight.mul_(1 - rate * DECAY)
            denominator = (second / (1 - BETA2**step)).sqrt() + ADAM_EPS
            weight.sub_(rate / (1 - BETA1**step) * first / denominator)
            weight.grad = None


# --- a round --------------------------------------------------------------------------------------


def outer_step(pair: list[Weights], phis: list[Weights], deltas: list[Weights]) -> None:
    """Of two replicas of one stage, in place: equations (4), (5), (2), (3) of node/model/outer.py.

    Each sends one tensor, z; both take the same mean. That is all that replicas ever say to each other.
    """
    with torch.no_grad():
        for name in pair[0]:
            z = [
                BETA * theta[name] + (GAMMA - BETA) * phi[name] for theta, phi in zip(pair, phis, strict=True)
            ]
            mean_z = (z[0] + z[1]) / 2
            for theta, phi, delta in zip(pair, phis, deltas, strict=True):
                delta[name].copy_(ALPHA * delta[name] + mean_z - GAMMA * phi[name])
                phi[name].add_(delta[name])
                theta[name].copy_(phi[name])


def drawn(stage: int, hidden: int = 16, inner: int = 32, vocabulary: int = 64) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.{stage}.{name}.weight": shape for name, shape in shapes.items()}
    table = {"model.embed_tokens.weight": (vocabulary, hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)} if stage else table
    return {name: torch.ones(s) if len(s) == 1 else 0.02 * torch.randn(s) for name, s in shapes.items()}


def main() -> None:
    torch.manual_seed(0)
    tokens, text = 32, torch.arange(4_096).remainder(7).mul(9)  # something to learn
    phis = [[(weights := drawn(stage)), {n: w.clone() for n, w in weights.items()}] for stage in range(2)]
    thetas = [[{n: w.clone().requires_grad_() for n, w in phi.items()} for phi in pair] for pair in phis]
    deltas = [[{n: torch.zeros_like(w) for n, w in phi.items()} for phi in pair] for pair in phis]
    moments: list[list[dict[str, list[torch.Tensor]]]] = [[{}, {}], [{}, {}]]  # each [stage][replica]
    for step in range(1, 101):
        for replica in range(2):  # in the daemon: other machines, which wait for nobody
            for starts in torch.randint(len(text) - tokens - 1, (2, 2)):  # [microbatches, S]
                rows = torch.stack([text[start : start + tokens + 1] for start in starts])
                loss = train_on(rows[:, :-1], rows[:, 1:], thetas[0][replica], thetas[1][replica])
            for stage in range(2):
                inner_step(thetas[stage][replica], moments[stage][replica], 3e-3, 2, step)
        if step % 10 == 0:
            for stage in range(2):
                outer_step(thetas[stage], phis[stage], deltas[stage])
            print(f"step {step}, round {step // 10}: loss {loss:.3f} nats per token")


if __name__ == "__main__":
    main()
