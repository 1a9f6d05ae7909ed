"""masking.py by hand numbers; each check takes the function it tests (see test_wrong_versions.py)."""

import math

import pytest
import torch

from nanorl.objectives import masking

NAN, INF = math.nan, math.inf
BAD = [NAN, INF, -INF]


def check_sum_skips_masked(masked_sum):
    x = torch.tensor([[1.0, 2.0, NAN], [4.0, INF, 6.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    assert masked_sum(x, mask).item() == 13
    assert masked_sum(x, mask, dim=-1).tolist() == [3, 10]
    assert masked_sum(x, torch.zeros_like(mask), dim=-1).tolist() == [0, 0]


def check_sum_gradient(masked_sum):
    x = torch.tensor([1.0, -INF, 3.0, NAN], requires_grad=True)
    masked_sum(x * x, torch.tensor([True, False, True, False])).backward()
    assert x.grad[[0, 2]].tolist() == [2, 6]


def check_mean_divides_by_counted(masked_mean):
    x = torch.tensor([[1.0, 2.0, NAN], [4.0, INF, NAN]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert math.isclose(masked_mean(x, mask).item(), 7 / 3, rel_tol=1e-6)  # not (1.5 + 4) / 2
    assert masked_mean(x, mask, dim=-1).tolist() == [1.5, 4]
    assert masked_mean(x, torch.zeros_like(mask)).item() == 0


def check_whiten_by_hand(masked_whiten):
    x = torch.tensor([[1.0, 3.0, 100.0], [5.0, 7.0, NAN]])  # counted: mean 4, variance 5
    mask = torch.tensor([[True, True, False], [True, True, False]])
    unit = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 3.0, 0.0]]) / math.sqrt(5)
    torch.testing.assert_close(masked_whiten(x, mask), unit)
    kept = masked_whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(kept, (unit + 4).masked_fill(~mask, 0.0))


def check_whiten_given_statistics(masked_whiten):
    x, mask = torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]])
    torch.testing.assert_close(masked_whiten(x, mask, mean=4.0, variance=5.0),
                               torch.tensor([[-3.0, -1.0]]) / math.sqrt(5))


def check_whiten_of_equal_values(masked_whiten):
    for width in (1, 4):
        x = torch.full((1, width), 2.5)
        assert masked_whiten(x, torch.ones(1, width)).tolist() == [[0.0] * width]
    assert masked_whiten(torch.full((1, 2), NAN), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


def check_response_mask_by_hand(response_mask):
    # tokens p p r r .  and  p p r r r: the first response token, at column 2, is scored by entry 1
    mask = response_mask(2, torch.tensor([2, 3, 0]), 5)
    assert mask.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
    assert mask.dtype == torch.bool


def check_response_mask_of_unequal_prompts(response_mask):
    mask = response_mask(torch.tensor([1, 3]), torch.tensor([2, 1]), 4)
    assert mask.int().tolist() == [[1, 1, 0], [0, 0, 1]]


def check_overlong_mask(overlong_mask):
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    kept = overlong_mask(mask, torch.tensor([True, False]))
    assert kept.int().tolist() == [[1, 1, 0], [0, 0, 0]]


def check_packed_targets_by_hand(packed_targets):
    # p p a a b .  and  p a a b b b: the first of each reply is predicted by the last p, its others by their left
    documents = torch.tensor([[0, 0, 1, 1, 2, -1], [0, 1, 1, 2, 2, 2]])
    rows, before, where = packed_targets(documents)
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert before.tolist() == [1, 2, 1, 0, 1, 0, 3, 4]
    assert where.int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]] and where.dtype == torch.bool


def check_packed_targets_without_replies(packed_targets):
    documents = torch.tensor([[0, 0, -1, -1], [0, 0, 0, 2]])  # the first reply is empty, and in one row both
    rows, before, where = packed_targets(documents)
    assert (rows.tolist(), before.tolist()) == ([1], [2])
    assert where.int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


def check_packed_targets_are_predicted_by_what_came_before(packed_targets):
    """Rows of a prompt and up to three replies, each token a number of its own: in the conversation that a reply
    stands for, prompt and then reply, the token on its left is the one whose hidden state is taken."""
    g = torch.Generator().manual_seed(0)
    tokens, documents, left_of = torch.full((8, 20), -1), torch.full((8, 20), -1), {}
    for b in range(8):
        lengths = [int(torch.randint(1, 5, (), generator=g)), *torch.randint(0, 5, (3,), generator=g).tolist()]
        row, owner = torch.arange(sum(lengths)) + 100 * b, [d for d, n in enumerate(lengths) for _ in range(n)]
        tokens[b, :len(row)], documents[b, :len(row)] = row, torch.tensor(owner)
        for reply in (1, 2, 3):
            conversation = [t for t, d in zip(row.tolist(), owner, strict=True) if d in (0, reply)]
            for left, token in zip(conversation, conversation[1:], strict=False):
                if owner[token - 100 * b] == reply:
                    left_of[token] = left
    rows, before, where = packed_targets(documents)
    assert tokens[where].tolist() == sorted(left_of)
    assert tokens[rows, before].tolist() == [left_of[token] for token in sorted(left_of)]


CHECKS = {
    "masked_sum": [check_sum_skips_masked, check_sum_gradient],
    "masked_mean": [check_mean_divides_by_counted],
    "masked_whiten": [check_whiten_by_hand, check_whiten_given_statistics, check_whiten_of_equal_values],
    "response_mask": [check_response_mask_by_hand, check_response_mask_of_unequal_prompts],
    "packed_targets": [
        check_packed_targets_by_hand, check_packed_targets_without_replies,
        check_packed_targets_are_predicted_by_what_came_before],
    "overlong_mask": [check_overlong_mask],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(masking, name))


@pytest.mark.parametrize("bad", BAD)
def test_masked_values_change_neither_mean_nor_gradient(bad):
    mask = torch.tensor([True, False, True])
    gradients = []
    for value in (0.0, bad):
        x = torch.tensor([1.0, value, 3.0], requires_grad=True)
        masking.masked_mean(x, mask).backward()
        gradients.append(x.grad.tolist())
    assert gradients[0] == gradients[1] == [0.5, 0.0, 0.5]


def test_response_mask_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="empty prompt"):
        masking.response_mask(0, torch.tensor([2]), 5)
    with pytest.raises(ValueError, match="6 tokens, the row has 5"):
        masking.response_mask(2, torch.tensor([1, 4]), 5)
    assert masking.response_mask(2, torch.zeros(0, dtype=torch.long), 5).shape == (0, 4)
