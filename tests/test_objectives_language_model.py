"""language_model.py by hand numbers; each check takes the function it tests."""

import math

import pytest
import torch

from nanorl.objectives import language_model

# One row over 3 tokens. Logits are logs of probabilities, so that the losses can be read off.
PROBABILITIES = torch.tensor([[[0.2, 0.3, 0.5], [0.7, 0.2, 0.1], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05]]])
# Tokens 2, 1, 0 are predicted with 0.5, 0.2, 0.25; the last row of logits predicts nothing.
TOKENS = torch.tensor([[0, 2, 1, 0]])
EXPECTED = -torch.tensor([[0.5, 0.2, 0.25]]).log()


def check_next_token_by_hand(next_token_loss):
    losses = next_token_loss(PROBABILITIES.log(), TOKENS)
    torch.testing.assert_close(losses, EXPECTED)


def check_next_token_is_fp32(next_token_loss):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    losses = next_token_loss(logits, tokens)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, next_token_loss(logits.float(), tokens))


def check_masked_by_hand(masked_cross_entropy):
    loss_mask = torch.tensor([[1, 0, 1, 1]])  # on the token to be learned: 2 and 3 count, 1 does not
    losses, mask = masked_cross_entropy(PROBABILITIES.log(), TOKENS, loss_mask)
    assert mask.tolist() == [[False, True, True]]
    torch.testing.assert_close(losses, EXPECTED * mask)


def check_documents_do_not_predict_each_other(masked_cross_entropy):
    documents = torch.tensor([[7, 7, 8, 8]])
    losses, mask = masked_cross_entropy(PROBABILITIES.log(), TOKENS, torch.ones(1, 4), documents)
    assert mask.tolist() == [[True, False, True]]
    torch.testing.assert_close(losses, EXPECTED * mask)


def check_packed_is_the_sum_of_its_parts(masked_cross_entropy):
    logits = torch.randn(1, 7, 5, generator=torch.Generator().manual_seed(1))
    tokens, loss_mask = torch.tensor([[0, 1, 2, 3, 4, 0, 1]]), torch.tensor([[0, 1, 1, 1, 0, 1, 1]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    packed, _ = masked_cross_entropy(logits, tokens, loss_mask, documents)
    parts = [masked_cross_entropy(logits[:, s], tokens[:, s], loss_mask[:, s])[0]
             for s in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(packed.sum(), parts[0].sum() + parts[1].sum())


def check_masked_logits_do_not_matter(masked_cross_entropy):
    loss_mask, results = torch.tensor([[1, 0, 1, 0]]), []
    for bad in (0.0, math.nan, math.inf, -math.inf):
        logits = PROBABILITIES.log()
        logits[:, [0, 2, 3]] = bad  # only entry 1 counts
        logits.requires_grad_()
        losses, _ = masked_cross_entropy(logits, TOKENS, loss_mask)
        losses.sum().backward()
        results.append((losses.tolist(), logits.grad.tolist()))
    assert all(result == results[0] for result in results)
    assert math.isclose(results[0][0][0][1], -math.log(0.2), rel_tol=1e-6)


def check_nothing_counted(masked_cross_entropy):
    logits = PROBABILITIES.log().requires_grad_()
    losses, mask = masked_cross_entropy(logits, TOKENS, torch.zeros(1, 4))
    losses.sum().backward()
    assert not mask.any() and losses.tolist() == [[0.0, 0.0, 0.0]] and not logits.grad.any()


CHECKS = {
    "next_token_loss": [check_next_token_by_hand, check_next_token_is_fp32],
    "masked_cross_entropy": [
        check_masked_by_hand, check_documents_do_not_predict_each_other, check_packed_is_the_sum_of_its_parts,
        check_masked_logits_do_not_matter, check_nothing_counted],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(language_model, name))


def test_unmasked_equals_next_token_loss():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2))
    tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(3))
    losses, mask = language_model.masked_cross_entropy(logits, tokens, torch.ones(2, 5))
    assert mask.all()
    torch.testing.assert_close(losses, language_model.next_token_loss(logits, tokens))
