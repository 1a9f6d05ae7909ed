"""Tests of the tests: the checks of test_objectives_*.py pass on each right function and stop wrong ones."""

import functools

import pytest
import test_objectives_advantages
import test_objectives_language_model
import test_objectives_logprobs
import test_objectives_masking
import test_objectives_orpo_kto
import test_objectives_policy
import test_objectives_preference
import test_objectives_value
import wrong_versions
import wrong_versions_ppo
import wrong_versions_preference
import wrong_versions_rl

CHECKS = {
    **test_objectives_masking.CHECKS, **test_objectives_logprobs.CHECKS,
    **test_objectives_language_model.CHECKS, **test_objectives_advantages.CHECKS,
    **test_objectives_policy.CHECKS, **test_objectives_value.CHECKS,
    **test_objectives_preference.CHECKS, **test_objectives_orpo_kto.CHECKS,
}
WRONG = {
    **wrong_versions.WRONG, **wrong_versions_rl.WRONG, **wrong_versions_ppo.WRONG, **wrong_versions_preference.WRONG,
}
CASES = [pytest.param(name, wrong, id=f"{name}-{i}-{wrong.__name__}")
         for name in WRONG for i, wrong in enumerate(WRONG[name])]


def test_each_function_has_wrong_versions():
    assert set(WRONG) == set(CHECKS)


@functools.cache
def rejecting(name, wrong):
    """The checks that a wrong version fails by an assertion: one that merely crashes would prove nothing."""
    found = []
    for check in CHECKS[name]:
        try:
            check(wrong)
        except AssertionError:
            found.append(check)
    return found


@pytest.mark.parametrize("name, wrong", CASES)
def test_wrong_version_is_rejected(name, wrong):
    assert rejecting(name, wrong), f"every check of {name} passes on {wrong.__name__}"


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_rejects_something(name):
    seen = {check for wrong in WRONG[name] for check in rejecting(name, wrong)}
    assert not [check.__name__ for check in CHECKS[name] if check not in seen]
