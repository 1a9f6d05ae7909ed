"""Tests and notebooks run the smoke preset, in a home folder of their own, without any network."""

import os
import tempfile

os.environ["NANORL_PRESET"] = "smoke"
os.environ["HF_HUB_OFFLINE"] = "1"
if "NANORL_HOME" not in os.environ:
    os.environ["NANORL_HOME"] = tempfile.mkdtemp(prefix="nanorl-tests-")
