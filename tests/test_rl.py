"""What PPO and GRPO share beyond their losses: bf16 held against fp32 in the first step."""

import importlib

import pytest
import torch
from tiny_run import new_home, train


def by_hand(policy, rollout) -> float:
    """The mean difference of recorded log-probs from those in fp32, one row at a time."""
    found = []
    for row in range(len(rollout.tokens)):
        tokens = rollout.tokens[row][rollout.mask[row]]
        n = int(rollout.lengths[row])
        logits = policy(tokens[None])[0, -n - 1 : -1]
        exact = logits.float().log_softmax(dim=-1).gather(1, tokens[-n:, None])[:, 0]
        recorded = rollout.logprobs[row][rollout.response_mask[row]]
        found += (exact - recorded).abs().tolist()
    return sum(found) / len(found)


@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_bf16_is_held_against_fp32_in_the_first_step(stage, tmp_path, monkeypatch):
    new_home(tmp_path, monkeypatch)
    module, expected = importlib.import_module(f"nanorl.train.{stage}"), []
    measure = module.precision_drift

    def measured(cfg, policy, rollout, device):
        with torch.no_grad():
            expected.append(by_hand(policy, rollout))
        return measure(cfg, policy, rollout, device)

    monkeypatch.setattr(module, "precision_drift", measured)
    records, _ = train(stage, steps=2, precision="bf16")
    assert 1e-5 < records[0]["drift_from_fp32"] < 0.05
    assert expected == [pytest.approx(records[0]["drift_from_fp32"], rel=1e-3)]
    assert "drift_from_fp32" not in records[1]
    records, _ = train(stage, steps=1)
    assert "drift_from_fp32" not in records[0]
