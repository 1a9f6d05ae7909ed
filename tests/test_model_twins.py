"""The Transformer against a twin made of loops, and against transformers with the same random weights."""

import math

import pytest
import torch
from test_model import a_model, close, some_tokens

from nanorl.model import rotate

# ---- the slow twin ---------------------------------------------------------------------------------------


def slow_linear(x, layer):
    y = x @ layer.weight.double().T
    return y if layer.bias is None else y + layer.bias.double()


def slow_norm(x, norm, cfg):
    if cfg.norm == "layernorm":
        x = x - x.mean()
    y = x / torch.sqrt((x * x).mean() + cfg.norm_eps) * norm.weight.double()
    return y + norm.bias.double() if cfg.norm == "layernorm" and cfg.bias else y


def slow_turn(x, position, theta):
    """Rotate each pair (x[i], x[i + D/2]) by position * theta ** (-2i/D)."""
    half, y = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return y


def slow_attention(xs, layer, cfg):
    """xs: T vectors of C channels. One query, one head at a time."""
    H, K, D = cfg.n_head, cfg.n_kv_head, cfg.n_embed // cfg.n_head
    queries, keys, values = [], [], []
    for t, x in enumerate(xs):
        parts = slow_linear(x, layer.qkv).split(D)
        q, k, v = parts[:H], parts[H : H + K], parts[H + K :]
        if cfg.qk_norm:
            q, k = ([h / torch.sqrt((h * h).mean() + cfg.norm_eps) for h in heads] for heads in (q, k))
        if cfg.position == "rope":
            q, k = ([slow_turn(h, t, cfg.rope_theta) for h in heads] for heads in (q, k))
        queries.append(q), keys.append(k), values.append(v)
    out = []
    for t in range(len(xs)):
        heads = []
        for h in range(H):
            shared = h // (H // K)
            weights = [math.exp(float(queries[t][h] @ keys[s][shared]) / math.sqrt(D)) for s in range(t + 1)]
            total = sum(weights)
            heads.append(sum(w / total * values[s][shared] for s, w in enumerate(weights)))
        out.append(slow_linear(torch.cat(heads), layer.out))
    return out


def slow_mlp(x, layer, cfg):
    up = slow_linear(x, layer.up)
    if cfg.mlp == "gelu":
        hidden = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    elif cfg.mlp == "relu2":
        hidden = up.clamp(min=0) ** 2
    else:
        gate = slow_linear(x, layer.gate)
        hidden = gate / (1 + torch.exp(-gate)) * up
    return slow_linear(hidden, layer.down)


@torch.no_grad()
def slow_logits(model, tokens):
    """Logits (T, V) of one row of tokens, in float64."""
    cfg = model.cfg
    xs = [model.tokens.weight[t].double() for t in tokens]
    if cfg.position == "learned":
        xs = [x + model.positions.weight[i].double() for i, x in enumerate(xs)]
    for block in model.blocks:
        attended = slow_attention([slow_norm(x, block.norm_1, cfg) for x in xs], block.attention, cfg)
        xs = [x + a for x, a in zip(xs, attended, strict=True)]
        xs = [x + slow_mlp(slow_norm(x, block.norm_2, cfg), block.mlp, cfg) for x in xs]
    return torch.stack([slow_linear(slow_norm(x, model.norm, cfg), model.lm_head) for x in xs])


@pytest.mark.parametrize("setting, changes", [
    ("gpt2", {}), ("gpt2", dict(n_kv_head=2, norm="rmsnorm", tie_embeddings=False)),
    ("llama", {}), ("llama", dict(bias=True, norm="layernorm", rope_theta=100.0, norm_eps=0.1)),
    ("ours", {}), ("ours", dict(n_kv_head=2, qk_norm=False, n_hidden=24)),
])
def test_the_slow_twin_gives_the_same_logits(setting, changes):
    model, tokens = a_model(setting, **changes), some_tokens(1, 7)
    expected = slow_logits(model, tokens[0].tolist())
    close(model(tokens)[0].double(), expected, 1e-4)  # fp32 against float64
    assert expected.std() > 0.3  # nothing is near zero, where all would agree


def test_rotation_by_hand():
    quarter = torch.tensor([math.pi / 2])
    rotation = torch.stack((quarter.cos(), quarter.sin()))  # one pair, turned by 90 degrees
    close(rotate(torch.tensor([[2.0, 0.0]]), rotation), torch.tensor([[0.0, 2.0]]))
    close(rotate(torch.tensor([[0.0, 2.0]]), rotation), torch.tensor([[-2.0, 0.0]]))


# ---- transformers ----------------------------------------------------------------------------------------


def transformers():
    return pytest.importorskip("transformers", reason="the parity checks need transformers: pip install -e .[test]")


def test_equals_transformers_gpt2():
    hf = transformers()
    torch.manual_seed(1)
    other = hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)).eval()
    model, theirs = a_model("gpt2"), other.state_dict()
    ours = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
    for i in range(2):
        ours |= {f"blocks.{i}.norm_1": f"h.{i}.ln_1", f"blocks.{i}.norm_2": f"h.{i}.ln_2",
                 f"blocks.{i}.attention.qkv": f"h.{i}.attn.c_attn", f"blocks.{i}.attention.out": f"h.{i}.attn.c_proj",
                 f"blocks.{i}.mlp.up": f"h.{i}.mlp.c_fc", f"blocks.{i}.mlp.down": f"h.{i}.mlp.c_proj"}
    weights = {"lm_head.weight": theirs["lm_head.weight"]}
    for name, source in ours.items():
        for kind in ("weight", "bias"):
            if (value := theirs.get(f"transformer.{source}.{kind}")) is not None:
                weights[f"{name}.{kind}"] = value.T if ".c_" in source and kind == "weight" else value
    model.load_state_dict(weights, strict=True)
    tokens = some_tokens(3, 24)
    close(model(tokens), other(tokens).logits, 1e-4)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_equals_transformers_llama(n_kv_head):
    hf = transformers()
    torch.manual_seed(1)
    other = hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=50, max_position_embeddings=24, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=n_kv_head, rms_norm_eps=1e-5, initializer_range=0.2,
        tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    model, theirs = a_model("llama", n_kv_head=n_kv_head), other.state_dict()
    weights = {"tokens.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"],
               "lm_head.weight": theirs["lm_head.weight"]}
    for i in range(2):
        block = {name: theirs[f"model.layers.{i}.{name}.weight"] for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
        qkv = torch.cat([block[f"self_attn.{x}_proj"] for x in "qkv"])
        weights |= {f"blocks.{i}.{name}.weight": value for name, value in {
            "norm_1": block["input_layernorm"], "norm_2": block["post_attention_layernorm"], "attention.qkv": qkv,
            "attention.out": block["self_attn.o_proj"], "mlp.gate": block["mlp.gate_proj"],
            "mlp.up": block["mlp.up_proj"], "mlp.down": block["mlp.down_proj"]}.items()}
    model.load_state_dict(weights, strict=True)
    tokens = some_tokens(3, 24)
    close(model(tokens), other(tokens).logits, 1e-4)
