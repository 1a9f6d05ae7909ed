"""The Transformer against itself, at three settings: GPT-2-like, Llama-like and our own.

A prompt alone and padded in a batch, documents alone and packed, step by step through the cache and at once, a
prompt shared by its group and repeated. Against other implementations: test_model_twins.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from nanorl.model import KVCache, ModelConfig, Transformer

SHAPE = dict(vocab_size=50, context_length=24, n_embed=32, n_head=4, n_kv_head=4, n_blocks=2)
GPT2 = dict(position="learned", norm="layernorm", mlp="gelu", bias=True, tie_embeddings=True)
LLAMA = dict(position="rope", norm="rmsnorm", mlp="swiglu", n_kv_head=2, n_hidden=40)
OURS = dict(position="rope", norm="rmsnorm", mlp="relu2", n_kv_head=1, qk_norm=True)
SETTINGS = {"gpt2": GPT2, "llama": LLAMA, "ours": OURS}
each_setting = pytest.mark.parametrize("setting", SETTINGS)


def a_model(setting="ours", seed=0, **changes):
    """A small model in eval mode whose weights, norms and biases included, are far from their first values."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**(SHAPE | SETTINGS[setting] | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.15)
    return model


def some_tokens(*shape, seed=0):
    return torch.randint(0, SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def close(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


# ---- who sees whom ---------------------------------------------------------------------------------------


@each_setting
def test_a_token_changes_what_follows_it_and_nothing_before(setting):
    model, tokens = a_model(setting), some_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 50
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert (difference[:4] == 0).all() and (difference[4:] > 1e-4).all()


PROMPTS = [some_tokens(n, seed=n).tolist() for n in (5, 1, 8, 3)]


def padded(rows, fill=0):
    """Rows of unequal length as (tokens, mask), padded on the left."""
    width = max(map(len, rows))
    tokens = torch.tensor([[fill] * (width - len(r)) + r for r in rows])
    return tokens, torch.arange(width) >= torch.tensor([[width - len(r)] for r in rows])


@each_setting
def test_a_prompt_gives_the_same_logits_alone_and_padded_in_a_batch(setting):
    model = a_model(setting)
    tokens, mask = padded(PROMPTS)
    together = model(tokens, mask=mask)
    assert torch.isfinite(together).all()  # on padding too, or gradients would be lost
    for row, prompt in zip(together, PROMPTS, strict=True):
        close(row[-len(prompt) :], model(torch.tensor([prompt]))[0])
    other, _ = padded(PROMPTS, fill=49)
    assert torch.equal(model(other, mask=mask)[mask], together[mask])  # whatever stands in the padding


def test_padding_on_the_right_and_gradients_through_padding():
    model = a_model("llama")
    tokens, mask = some_tokens(1, 9), torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0]])  # any mask of 0 and 1 will do
    close(model(tokens, mask=mask)[:, :6], model(tokens[:, :6]))
    tokens, mask = padded(PROMPTS)
    model(tokens, mask=mask)[mask].square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


A, B = some_tokens(1, 6, seed=1), some_tokens(1, 9, seed=2)
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 9 + [-1] * 3])
PACKED = torch.cat((A, B, torch.zeros(1, 3, dtype=torch.long)), dim=1)


@each_setting
def test_packed_documents_are_as_if_alone(setting):
    model = a_model(setting)
    logits = model(PACKED, documents=DOCUMENTS)
    close(logits[:, :6], model(A))
    close(logits[:, 6:15], model(B))

    def loss(logits, tokens):
        return F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")

    close(loss(logits[:, :6], A) + loss(logits[:, 6:15], B), loss(model(A), A) + loss(model(B), B))
    other = torch.cat((A + 1, PACKED[:, 6:]), dim=1) % 50
    changed = model(other, documents=DOCUMENTS)
    assert torch.equal(changed[:, 6:], logits[:, 6:]) and not torch.equal(changed[:, :6], logits[:, :6])


@pytest.mark.parametrize("setting, n_kv_head", [("gpt2", 4), ("llama", 2), ("ours", 1)])
def test_responses_packed_behind_a_shared_prompt_are_as_if_each_had_its_own(setting, n_kv_head):
    """[prompt A, B, C, padding] in one row equals [A, B] and [A, C], in logits and in every gradient."""
    C = some_tokens(1, 3, seed=3)
    row = torch.cat((A, B, C, torch.zeros(1, 2, dtype=torch.long)), dim=1)
    documents = torch.tensor([[0] * 6 + [1] * 9 + [2] * 3 + [-1] * 2])
    weights = torch.randn(18, 50)

    def gradients(logits_of):
        model = a_model(setting, n_kv_head=n_kv_head)
        logits = logits_of(model)  # (18, V): the prompt, B, C
        (logits * weights).sum().backward()
        return logits, [p.grad for p in model.parameters()]

    def packed(model):
        return model(row, documents=documents, shared=documents == 0)[0, :18]

    def plain(model):
        first, second = model(torch.cat((A, B), dim=1))[0], model(torch.cat((A, C), dim=1))[0]
        return torch.cat((first, second[6:]))

    (logits, got), (expected_logits, expected) = gradients(packed), gradients(plain)
    close(logits, expected_logits)
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_documents_go_with_neither_mask_nor_cache():
    model = a_model()
    for extra in ({"mask": DOCUMENTS >= 0}, {"cache": KVCache()}):
        with pytest.raises(ValueError, match="documents cannot be combined with mask or cache"):
            model(PACKED, documents=DOCUMENTS, **extra)


# ---- the cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting, n_kv_head", [("gpt2", 4), ("gpt2", 2), ("llama", 1), ("llama", 2), ("ours", 4)])
@pytest.mark.parametrize("room", [0, 12])
def test_step_by_step_through_the_cache_equals_at_once(setting, n_kv_head, room):
    """Unequal prompts, each repeated for a group of 2, then five tokens one by one and three together."""
    model, (prompts, mask) = a_model(setting, n_kv_head=n_kv_head), padded(PROMPTS)
    rest = some_tokens(len(PROMPTS) * 2, 8, seed=9)
    cache = KVCache()
    with torch.inference_mode():
        first = model(prompts, mask=mask, cache=cache)
        cache = cache.repeat(2, room=room)
        steps = [model(rest[:, t : t + 1], cache=cache) for t in range(5)]
        logits = torch.cat((*steps, model(rest[:, 5:], cache=cache)), dim=1)
        for row in range(len(rest)):
            prompt = PROMPTS[row // 2]
            whole = model(torch.tensor([prompt + rest[row].tolist()]))[0]
            close(first[row // 2, -len(prompt) :], whole[: len(prompt)])
            close(logits[row], whole[len(prompt) :])
    assert cache.length == prompts.size(1) + 8


def test_a_prompt_may_come_in_pieces_and_rows_may_leave():
    model, tokens = a_model("llama"), some_tokens(3, 12)
    cache, whole = KVCache(), model(tokens)
    close(model(tokens[:, :5], cache=cache), whole[:, :5])
    cache.select(torch.tensor([2, 0]))
    kept = tokens[[2, 0]]
    close(model(kept[:, 5:11], cache=cache), whole[[2, 0], 5:11])
    close(model(kept[:, 11:], cache=cache), whole[[2, 0], 11:])


def test_padding_among_new_tokens_is_never_seen():
    """What `recompute_logprobs` does: responses of unequal length behind a shared prompt, padded on the right."""
    model, (prompts, mask) = a_model("ours"), padded(PROMPTS[:2])
    rest, real = some_tokens(2, 6), torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    cache = KVCache()
    model(prompts, mask=mask, cache=cache)
    logits = model(rest, mask=real, cache=cache)
    after = model(torch.tensor([[7], [8]]), cache=cache)  # goes on behind the padding
    for row, n in ((0, 3), (1, 6)):
        whole = model(torch.tensor([PROMPTS[row] + rest[row, :n].tolist() + [7 + row]]))[0]
        close(logits[row, :n], whole[len(PROMPTS[row]) : -1])
        close(after[row, 0], whole[-1])


@pytest.mark.parametrize("setting, n_kv_head", [("gpt2", 4), ("llama", 2), ("ours", 1)])
def test_gradients_flow_through_a_prompt_shared_by_its_group(setting, n_kv_head):
    """One prefill repeated for the group equals the prompts written out, in values and in every gradient."""
    G, (prompts, mask) = 3, padded(PROMPTS)
    rest, real = some_tokens(len(PROMPTS) * G, 6), torch.rand(len(PROMPTS) * G, 6) > 0.2
    weights = torch.randn(len(PROMPTS) * G, 6, 50)

    def gradients(hidden_of):
        model = a_model(setting, n_kv_head=n_kv_head)
        logits = model.lm_head(hidden_of(model))
        (logits * weights)[real].sum().backward()
        return logits, [p.grad for p in model.parameters()]

    def shared(model):
        cache = KVCache()
        model(prompts, mask=mask, cache=cache, return_hidden=True)
        return model(rest, mask=real, cache=cache.repeat(G), return_hidden=True)

    def plain(model):
        tokens = torch.cat((prompts.repeat_interleave(G, dim=0), rest), dim=1)
        whole = torch.cat((mask.repeat_interleave(G, dim=0), real), dim=1)
        return model(tokens, mask=whole, return_hidden=True)[:, prompts.size(1) :]

    (logits, got), (expected_logits, expected) = gradients(shared), gradients(plain)
    close(logits[real], expected_logits[real])
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


# ---- bounds ----------------------------------------------------------------------------------------------


@each_setting
def test_a_sequence_longer_than_the_context_is_an_error(setting):
    model, tokens = a_model(setting), some_tokens(2, 25)
    model(tokens[:, :24])
    cached, full, index = KVCache(), KVCache(), torch.arange(25).expand(2, -1)
    model(tokens[:, :20], cache=cached)
    model(tokens[:, :24], cache=full)
    for call in (lambda: model(tokens), lambda: model(tokens, mask=torch.ones_like(tokens)),
                 lambda: model(tokens, documents=torch.zeros_like(tokens)),
                 lambda: model(tokens, documents=(index >= 20).long(), shared=index < 20),
                 lambda: model(tokens[:, 20:], cache=cached), lambda: model(tokens[:, 24:], cache=full)):
        with pytest.raises(ValueError, match="of 25 tokens does not fit the context of 24; shorten it") as error:
            call()
        assert "\n" not in str(error.value)


def test_padding_takes_no_room_in_the_context():
    model, prompt = a_model(), PROMPTS[0]
    tokens, mask = padded([prompt, [0] * 40])
    mask[1, :30] = False
    close(model(tokens, mask=mask)[0, -5:], model(torch.tensor([prompt]))[0])


@pytest.mark.parametrize("changes, message", [
    (dict(n_embed=30), "n_embed 30 must be a multiple of n_head 4"),
    (dict(n_kv_head=3), "n_head 4 must be a multiple of n_kv_head 3"),
    (dict(n_embed=12), "RoPE needs an even head size; n_embed / n_head is 3"),
    (dict(n_blocks=0), "greater than or equal to 1"), (dict(n_heads=4), "Extra inputs are not permitted"),
    (dict(mlp="relu"), "'gelu', 'relu2' or 'swiglu'"),
])
def test_shapes_that_make_no_model(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(SHAPE | changes))


def test_a_shape_out_of_whatever_carries_it():
    cfg = ModelConfig(**SHAPE)
    assert ModelConfig.of({**cfg.model_dump(), "steps": 3}) == ModelConfig.of(cfg) == cfg
    assert ModelConfig.of(cfg, vocab_size=60).vocab_size == 60


# ---- parameters ------------------------------------------------------------------------------------------


def test_first_weights_have_the_scale_of_gpt2():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=400, n_embed=128, n_blocks=8, bias=True, norm="layernorm",
                                    position="learned", mlp="swiglu"))
    for name, p in model.state_dict().items():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            small = name.endswith(("out.weight", "down.weight"))  # 16 layers add up in the residual stream
            expected = 0.02 / 4 if small else 0.02
            assert abs(float(p.std()) / expected - 1) < 0.05 and abs(float(p.mean())) < expected / 20, name
    loss = F.cross_entropy(model(some_tokens(4, 24))[:, :-1].flatten(0, 1), some_tokens(4, 24)[:, 1:].flatten())
    assert abs(loss.item() - math.log(400)) < 0.1  # it knows nothing yet


def test_tied_embeddings_are_one_matrix():
    tied, free = a_model("gpt2"), a_model("gpt2", tie_embeddings=False)
    assert tied.lm_head.weight is tied.tokens.weight
    assert free.n_parameters() - tied.n_parameters() == 50 * 32
    assert tied.n_parameters() == sum(p.numel() for p in set(tied.parameters()))
    tokens = some_tokens(1, 5)
    tied(tokens).square().sum().backward()
    seen = torch.zeros(50, dtype=torch.bool).index_fill(0, tokens[0], True)
    assert (tied.tokens.weight.grad[~seen].abs().amax(-1) > 0).all()  # as outputs, tokens that were never read


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_shared_heads_are_many_heads_with_equal_weights(n_kv_head):
    few, many = a_model("llama", n_kv_head=n_kv_head), a_model("llama", n_kv_head=4)
    weights, D = few.state_dict(), 8
    for name, value in weights.items():
        if name.endswith("qkv.weight"):
            assert value.shape == ((4 + 2 * n_kv_head) * D, 32)
            q, k, v = value.split((4 * D, n_kv_head * D, n_kv_head * D))
            k, v = (x.view(n_kv_head, D, 32).repeat_interleave(4 // n_kv_head, dim=0).flatten(0, 1) for x in (k, v))
            weights[name] = torch.cat((q, k, v))
    many.load_state_dict(weights)
    tokens = some_tokens(2, 9)
    close(few(tokens), many(tokens))


@each_setting
def test_hidden_states_are_what_the_head_consumes(setting):
    model, tokens = a_model(setting), some_tokens(2, 9)
    hidden = model(tokens, return_hidden=True)
    assert hidden.shape == (2, 9, 32)
    assert torch.equal(hidden, model.forward_hidden(tokens)) and torch.equal(model.lm_head(hidden), model(tokens))
