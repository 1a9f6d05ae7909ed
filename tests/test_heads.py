"""Reward model and actor-critic: where a reply's reward stands, what is trained, what is saved."""

import copy

import pytest
import torch

from nanorl.heads import ActorCritic, RewardModel, ScalarHead, frozen_copy, last_positions, reply_rewards
from nanorl.model import ModelConfig, Transformer

CFG = ModelConfig(vocab_size=40, context_length=32, n_embed=16, n_head=2, n_kv_head=1, n_blocks=2)


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return Transformer(CFG).eval()


def packed(prompt, *replies, width=0):
    """One packed row: its tokens and documents, (1, T) each."""
    tokens, documents = list(prompt), [0] * len(prompt)
    for number, reply in enumerate(replies, start=1):
        tokens += reply
        documents += [number] * len(reply)
    padding = max(0, width - len(tokens))
    return torch.tensor([tokens + [0] * padding]), torch.tensor([documents + [-1] * padding])


def test_last_positions_by_hand():
    documents = torch.tensor([[0, 0, 1, 1, 2, 2, 2, -1], [0, 1, 2, -1, -1, -1, -1, -1]])
    assert last_positions(documents, 2).tolist() == [[3, 6], [1, 2]]


def test_a_scalar_head_is_one_dot_product_in_fp32():
    head = ScalarHead(3, 0.0)
    assert head.weight.tolist() == [[0.0, 0.0, 0.0]]
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
    hidden = torch.tensor([[[1.0, 1.0, 2.0], [0.0, 1.0, 0.0]]])
    assert head(hidden).tolist() == [[0.0, -2.0]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fine = head(torch.tensor([1.0, 0.0, 2.0**-9], dtype=torch.bfloat16))
    assert fine.dtype == torch.float32 and float(fine) == 1.0 + 2.0**-10


def test_a_reply_has_the_same_reward_packed_padded_and_alone(backbone):
    model = RewardModel(backbone)
    prompt, chosen, rejected = [5, 6, 7], [8, 9], [10, 11, 12, 13]
    tokens, documents = packed(prompt, chosen, rejected, width=12)
    together = reply_rewards(model, tokens, documents, 2)
    for i, reply in enumerate((chosen, rejected)):
        row = torch.tensor([prompt + reply])
        torch.testing.assert_close(together[0, i], model(row)[0, -1], atol=1e-5, rtol=0)
        padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), row), dim=1)
        mask = torch.arange(padded.size(1))[None] >= 4
        torch.testing.assert_close(together[0, i], model(padded, mask)[0, -1], atol=1e-5, rtol=0)


def test_one_reply_does_not_see_the_other(backbone):
    model = RewardModel(backbone)
    first = reply_rewards(model, *packed([5, 6], [7, 8], [9]), 2)
    second = reply_rewards(model, *packed([5, 6], [20, 21], [9]), 2)
    assert first[0, 0] != second[0, 0]
    torch.testing.assert_close(first[0, 1], second[0, 1])


def test_the_reward_model_has_no_parameter_without_a_gradient(backbone):
    model = RewardModel(backbone)
    assert not any("lm_head" in name for name in model.state_dict())
    reply_rewards(model, *packed([5, 6], [7, 8], [9]), 2).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_tied_embeddings_survive_the_loss_of_the_lm_head():
    model = RewardModel(Transformer(CFG.model_copy(update={"tie_embeddings": True})))
    assert "backbone.tokens.weight" in model.state_dict() and model(torch.tensor([[1, 2]])).shape == (1, 2)


@pytest.mark.parametrize("separate", [False, True])
def test_actor_critic_gives_the_policys_hidden_states_and_starts_at_value_0(backbone, separate):
    tokens, documents = packed([5, 6, 7], [8, 9], [10])
    expected = backbone(tokens, documents=documents, shared=documents == 0, return_hidden=True)
    model = ActorCritic(backbone, separate)
    hidden, values = model(tokens, documents, documents == 0)
    torch.testing.assert_close(hidden, expected)
    assert values.shape == tokens.shape and not values.any()


@pytest.mark.parametrize("separate", [False, True])
def test_the_value_loss_reaches_the_policy_only_where_the_backbone_is_shared(backbone, separate):
    model = ActorCritic(backbone, separate)
    torch.nn.init.normal_(model.value_head.weight)
    tokens, documents = packed([5, 6, 7], [8, 9])
    model(tokens, documents, documents == 0)[1].sum().backward()
    reached = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == ({"critic", "value_head"} if separate else {"policy", "value_head"})


def test_a_separate_critic_shares_no_memory_with_the_policy(backbone):
    model = ActorCritic(backbone, separate=True)
    before = copy.deepcopy(model.policy.state_dict())
    with torch.no_grad():
        for p in model.critic.parameters():
            p.zero_()
    assert all(torch.equal(before[name], x) for name, x in model.policy.state_dict().items())


def test_a_frozen_copy_stays_as_it_was(backbone):
    copied = frozen_copy(backbone.train())
    with torch.no_grad():
        backbone.tokens.weight.zero_()
    assert copied.tokens.weight.any() and not copied.training
    assert not any(p.requires_grad for p in copied.parameters())
