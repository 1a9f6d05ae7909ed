"""Groups, schedule and step of nanorl.optim, by hand numbers."""

import io
import math

import pytest
import torch
from torch import nn

from nanorl.optim import Optimizers, build_optimizers, clip_and_step, schedule


class Tiny(nn.Module):
    """The parameter names of the real model, a few numbers each."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "norm": nn.LayerNorm(4)}) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 5, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block["up"](block["norm"](x))[..., :4]
        return self.lm_head(self.norm(x))


class One(nn.Module):
    """A single parameter under a chosen name."""

    def __init__(self, value, name="w"):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.tensor(value)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tiny()


def names_of(model, parameters):
    wanted = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def train(model, optimizers, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        tokens = torch.randint(0, 5, (4, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizers.zero_grad()
        loss.backward()
        optimizers.set_lr(schedule(step, 10, 2))
        clip_and_step(model, optimizers, 1.0)


# Groups -----------------------------------------------------------------------------------------------------

def test_adamw_decays_matrices_only_and_holds_each_parameter_once(model):
    optimizers = build_optimizers(model, "adamw", lr=1e-3, weight_decay=0.1)
    assert len(optimizers) == 1
    for group in optimizers[0].param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.ndim >= 2 else 0.0)
    held = [id(p) for group in optimizers.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(model):
    optimizers = build_optimizers(model, "muon", lr=1e-3, muon_lr=0.02, weight_decay=0.05)
    muon, adamw = optimizers
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert names_of(model, muon.param_groups[0]["params"]) == {"blocks.0.up.weight", "blocks.1.up.weight"}
    assert muon.param_groups[0]["lr"] == 0.02 and muon.param_groups[0]["weight_decay"] == 0.05
    matrices, vectors = adamw.param_groups
    assert names_of(model, matrices["params"]) == {"tokens.weight", "lm_head.weight"}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.05, 0.0)
    held = [id(p) for group in optimizers.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_tied_embeddings_are_held_once_and_frozen_parameters_not_at_all(model):
    model.lm_head.weight = model.tokens.weight
    model.norm.requires_grad_(False)
    optimizers = build_optimizers(model, "muon")
    held = [p for group in optimizers.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held})
    assert names_of(model, held) == {n for n, p in model.named_parameters() if p.requires_grad}


def test_a_wrapped_model_gives_the_same_groups(model):
    wrapped = nn.ModuleDict({"module": model})       # the prefix that DDP puts before every name
    own = [[id(p) for p in g["params"]] for g in build_optimizers(model, "muon").param_groups]
    assert own == [[id(p) for p in g["params"]] for g in build_optimizers(wrapped, "muon").param_groups]


def test_unknown_optimizer_and_muon_without_blocks_are_one_line_errors(model):
    with pytest.raises(ValueError, match=r"unknown optimizer 'sgd'; choose 'adamw' or 'muon'"):
        build_optimizers(model, "sgd")
    with pytest.raises(ValueError, match="no matrices under 'blocks'.*'adamw'"):
        build_optimizers(nn.Linear(3, 3), "muon")


# Updates, by hand -------------------------------------------------------------------------------------------

def test_first_adamw_step_by_hand():
    # m/sqrt(v) = sign(gradient) at step one, so w = w * (1 - lr * decay) - lr * sign(g) for a matrix
    model = One([[1.0, -2.0]])
    optimizers = build_optimizers(model, "adamw", lr=0.1, weight_decay=0.5)
    model.w.grad = torch.tensor([[3.0, -4.0]])
    optimizers.step()
    torch.testing.assert_close(model.w.data, torch.tensor([[0.95 - 0.1, -1.9 + 0.1]]))


def test_a_vector_is_not_decayed():
    model = One([1.0, -2.0])
    optimizers = build_optimizers(model, "adamw", lr=0.1, weight_decay=0.5)
    model.w.grad = torch.tensor([3.0, -4.0])
    optimizers.step()
    torch.testing.assert_close(model.w.data, torch.tensor([0.9, -1.9]))


def test_muon_moves_every_direction_alike_and_scales_tall_matrices():
    # rows / cols = 4: the update is lr * sqrt(4) times a nearly orthogonal matrix, for any size of gradient
    torch.manual_seed(0)
    for scale in (1e-3, 1e3):
        model = nn.Module()
        model.blocks = nn.ModuleList([nn.Linear(8, 32, bias=False)])
        nn.init.zeros_(model.blocks[0].weight)
        optimizers = build_optimizers(model, "muon", muon_lr=0.01, weight_decay=0.0)
        model.blocks[0].weight.grad = scale * torch.randn(32, 8)
        optimizers.step()
        singular = torch.linalg.svdvals(model.blocks[0].weight.detach()) / (0.01 * 2)
        assert 0.5 < singular.min() and singular.max() < 1.5      # five Newton-Schulz steps reach this, not 1


def test_muon_decay_is_decoupled_and_ours():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False)])
    nn.init.ones_(model.blocks[0].weight)
    optimizers = build_optimizers(model, "muon", muon_lr=0.1, weight_decay=0.5)
    model.blocks[0].weight.grad = torch.zeros(4, 4)
    optimizers.step()
    torch.testing.assert_close(model.blocks[0].weight.data, torch.full((4, 4), 0.95))


# Schedule ---------------------------------------------------------------------------------------------------

def test_schedule_by_hand():
    got = [schedule(step, total=7, warmup=2, floor=0.1) for step in range(9)]
    # progress 1/4, 1/2, 3/4 of half a cosine: 0.1 + 0.9 * (1 + cos) / 2
    root = math.sqrt(0.5)
    want = [1 / 3, 2 / 3, 1.0, 0.1 + 0.45 * (1 + root), 0.55, 0.1 + 0.45 * (1 - root), 0.1, 0.1, 0.1]
    assert got == pytest.approx(want, abs=1e-12)


def test_schedule_rises_then_falls_and_never_leaves_its_bounds():
    values = [schedule(step, 200, 20, 0.05) for step in range(200)]
    assert values[:21] == sorted(values[:21]) and values[20:] == sorted(values[20:], reverse=True)
    assert values[20] == 1.0 and values[-1] == pytest.approx(0.05) and min(values) > 0


@pytest.mark.parametrize("total, warmup", [(1, 0), (1, 1), (5, 5), (5, 9), (0, 0)])
def test_schedule_of_short_runs_is_finite_and_positive(total, warmup):
    assert all(0 < schedule(step, total, warmup) <= 1 for step in range(max(total, 1)))


def test_schedule_without_warmup_starts_at_one():
    assert schedule(0, 10, 0) == 1.0


def test_set_lr_scales_each_group_from_its_own_base(model):
    optimizers = build_optimizers(model, "muon", lr=1e-3, muon_lr=0.02)
    for scale in (0.5, 0.25):                        # from the base each time, not from the last value
        optimizers.set_lr(scale)
        assert [g["lr"] for g in optimizers.param_groups] == [0.02 * scale, 1e-3 * scale, 1e-3 * scale]


# Clip and step ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("max_norm, factor", [(1.0, 1 / 5), (10.0, 1.0), (0, 1.0)])
def test_clip_returns_the_norm_before_clipping(max_norm, factor):
    model = One([0.0, 0.0])
    optimizers = Optimizers([torch.optim.SGD(model.parameters(), lr=1.0)])
    model.w.grad = torch.tensor([3.0, 4.0])
    assert clip_and_step(model, optimizers, max_norm) == pytest.approx(5.0)
    torch.testing.assert_close(model.w.data, -factor * torch.tensor([3.0, 4.0]), atol=1e-5, rtol=1e-5)


def test_the_norm_is_over_all_parameters_together():
    model = nn.ModuleList([One([0.0]), One([0.0])])
    optimizers = Optimizers([torch.optim.SGD(model.parameters(), lr=1.0)])
    model[0].w.grad, model[1].w.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_and_step(model, optimizers, 1.0) == pytest.approx(5.0)
    assert (model[0].w.item(), model[1].w.item()) == pytest.approx((-0.6, -0.8), abs=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(model, kind, bad):
    optimizers = build_optimizers(model, kind)
    train(model, optimizers, 2)
    before = {n: p.clone() for n, p in model.named_parameters()}
    moments = [{k: v.clone() for k, v in s.items()} for o in optimizers for s in o.state.values()]
    model.norm.weight.grad[0] = bad
    assert not math.isfinite(clip_and_step(model, optimizers, 1.0))
    assert optimizers.skipped == 1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    after = [s for o in optimizers for s in o.state.values()]
    assert all(torch.equal(a[k], m[k]) for a, m in zip(after, moments, strict=True) for k in m)
    train(model, optimizers, 1)                      # and the run goes on
    assert optimizers.skipped == 1 and all(p.isfinite().all() for p in model.parameters())


# State ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resumed_optimizers_continue_bit_for_bit(model, kind):
    optimizers = build_optimizers(model, kind)
    train(model, optimizers, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizers": optimizers.state_dict()}, file)
    train(model, optimizers, 3, seed=1)

    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = Tiny()
    again.load_state_dict(state["model"])
    resumed = build_optimizers(again, kind)
    resumed.load_state_dict(state["optimizers"])
    assert resumed.scale == schedule(2, 10, 2)
    train(again, resumed, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_load_keeps_the_settings_of_this_run(model):
    old = build_optimizers(model, lr=1e-3, weight_decay=0.1)
    train(model, old, 1)
    old.set_lr(0.5)
    new = build_optimizers(model, lr=4e-3, weight_decay=0.0)
    new.load_state_dict(old.state_dict())
    assert [(g["lr"], g["weight_decay"]) for g in new.param_groups] == [(2e-3, 0.0), (2e-3, 0.0)]


def test_loading_another_kind_is_a_clear_error(model):
    saved = build_optimizers(model, "muon").state_dict()
    with pytest.raises(ValueError, match="trained with muon.adamw, this run uses adamw; .*'optimizer'"):
        build_optimizers(model, "adamw").load_state_dict(saved)


@pytest.mark.parametrize("kind, lr", [("adamw", 0.03), ("muon", 0.01)])
def test_it_learns(kind, lr):
    torch.manual_seed(0)
    model = Tiny()
    optimizers = build_optimizers(model, kind, lr=lr, muon_lr=0.02, weight_decay=0.0)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    for _ in range(150):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
        optimizers.zero_grad()
        loss.backward()
        clip_and_step(model, optimizers, 1.0)
    assert loss < 0.1
