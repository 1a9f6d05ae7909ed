"""Bad numbers and tensors: sampling, models, objectives, optimizers, statistics, amounts. Rows as in bad_inputs.py."""

from typing import Any

import torch
from bad_inputs import INF, LONG, NAN, absent, bad, right
from torch import nn

from nanorl import evaluate, generate, metrics, optim, statistics
from nanorl.data import corpus, download, prompts, tinyworld
from nanorl.data.instruct import EpochBatches
from nanorl.data.preference import load_pairs
from nanorl.model import ModelConfig, Transformer
from nanorl.objectives import advantages, logprobs, masking, policy, preference


def model() -> Transformer:
    return Transformer(ModelConfig(vocab_size=265, context_length=8, n_embed=8, n_head=1, n_kv_head=1, n_blocks=1))


def sampled(prompt: list[int], **changes: Any) -> generate.Completions:
    return generate.generate(model(), [prompt], generate.Sampling(2, **changes), 260, 256)


ONE, TOKENS = torch.ones(2, 3), torch.zeros(1, 3, dtype=torch.long)
NUMBERS = [
    *(bad("generate.Sampling", f"{name} {value}", lambda _, name=name, value=value: generate.Sampling(**{name: value}),
        name)
      for name, value in (("temperature", -1), ("temperature", NAN), ("top_p", 0), ("top_p", NAN), ("top_p", 1.1),
                          ("top_k", -1), ("max_new_tokens", 0))),
    bad("generate.generate", "an empty prompt", lambda _: sampled([]), "prompt 0 is empty"),
    bad("generate.generate", "longer than the context", lambda _: sampled([1] * 8), "8 tokens", "shorten the prompt"),
    bad("generate.check_prompts", "none", lambda _: generate.check_prompts([], 1, model().cfg), "give at least one"),
    *(bad("generate.generate", f"id {i}", lambda _, i=i: sampled([1, i, 2]), f"id {i}", "0 to 264") for i in (-1, 265)),
    *(bad("generate.generate", f"group {n}", lambda _, n=n: generate.generate(
        model(), [[1]], generate.Sampling(2), 260, 256, n), f"group is {n}") for n in (0, -1)),
    bad("evaluate.answer", "no problems", lambda _: evaluate.answer(model(), None, [], generate.Sampling(2)),
        "at least one"),
    bad("evaluate.format_table", "no records", lambda _: evaluate.format_table([]), "no records"),
    bad("model.Transformer.forward_hidden", "too long", lambda _: model()(torch.zeros(1, 9, dtype=torch.long)),
        "9 tokens"),
    bad("model.Transformer.forward_hidden", "mask and documents", lambda _: model()(
        TOKENS, mask=TOKENS == 0, documents=TOKENS), "pass one of them"),
    *(bad("data.tinyworld.problems", f"{a}", lambda _, a=a: tinyworld.problems(3, **a), words) for a, words in (
        ({"split": "test"}, "'test'"), ({"max_number": 9}, "max_number 9"), ({"max_steps": 0}, "max_steps 0"),
        ({"max_steps": 7}, "max_steps 7"), ({"max_number": -INF}, "max_number -inf"))),
    right("data.tinyworld.problems", "none", lambda _: tinyworld.problems(0), []),
    *(bad("data.tinyworld.preferences", f"noise {x}", lambda _, x=x: tinyworld.preferences(3, noise=x), "noise is")
      for x in (-0.1, 1.1, NAN)),
    bad("data.tinyworld.preferences", "a mistake", lambda _: tinyworld.preferences(3, mistakes=["lied"]), "'lied'"),
    *(bad("data.preference.load_pairs", f"{a}", lambda _, a=a: load_pairs(**a), words) for a, words in (
        ({"split": "test"}, '"test"'), ({"n": 0}, "at least 1"), ({}, "has no end"),
            ({"n": 3, "noise": NAN}, "noise"))),
    *(bad("data.prompts.load_problems", f"{a}", lambda _, a=a: prompts.load_problems(**a), words) for a, words in (
        ({"split": "test"}, '"test"'), ({"n": -1}, "at least 1"), ({}, "has no end"))),
    *(absent(f"data.{entry}", wrong, lambda _, call=call, name=name: list(call(name)),
        "give" if call is not corpus.read_texts else "check the path")
      for entry, call in (("prompts.load_problems", prompts.load_problems), ("preference.load_pairs", load_pairs),
                          ("corpus.read_texts", corpus.read_texts))
      for wrong, name in (("no such name", "nowhere"), ("a name of 256 bytes", LONG), ("a zero byte", "a\0b"),
                          ("nobody's home", "~nobody9/x"))),
    *(bad("data.corpus.check_shards", f"{n} rows, {world}", lambda _, n=n, world=world: corpus.check_shards(n, world),
        "rows")
      for n, world in ((0, 1), (1, 2), (-4, 1))),
    bad("data.instruct.EpochBatches", "nothing", lambda _: EpochBatches(0, 4, source="x.h5"), "x.h5: no rows",
        "check the data"),
    bad("data.instruct.EpochBatches", "too few", lambda _: EpochBatches(3, 2, world=2), "lower nproc"),
    bad("data.prompts.PromptStream", "nothing", lambda _: prompts.PromptStream([], 4), "no problems"),
    *(bad("data.download.resolve", url, lambda _, url=url: download.resolve(url), "cannot download", "hf://owner")
      for url in ("", "file:///etc/passwd", "hf://a/b", "hf://datasets/a/b", "http://", "gpt2")),
    *(bad("data.download.fetch", url, lambda folder, url=url: download.fetch(url, folder / "x"), words)
      for url, words in (("ftp://a/b", "cannot download"), ("http://[::1", "cannot download"))),
    *(bad("data.download.fetch", url, lambda folder, url=url: download.fetch(url, folder / "x"), "check", error=OSError)
      for url in ("http://127.0.0.1:9/x", "http://127.0.0.1:port/x", "http://127.0.0.1:9/a b")),
    *(bad("objectives.advantages.group_advantages", wrong, lambda _, a=a: advantages.group_advantages(*a), words)
      for wrong, a, words in (
          ("a group of one", (torch.ones(4, 1),), "G at least 2"), ("no groups", (torch.ones(4),), "(P, G)"),
          ("NaN", (torch.tensor([[NAN, 1]]),), "NaN or inf"), ("inf", (torch.tensor([[INF, 1]]),), "NaN or inf"),
          ("scale", (ONE, "variance"), "'variance'"), ("baseline", (ONE, "std", "median"), "'median'"))),
    *(bad("objectives.advantages.soft_overlong_penalty", f"buffer {b}", lambda _, b=b: advantages.soft_overlong_penalty(
        ONE[0], 10, b), f"buffer {b}") for b in (0, 11, -1, NAN)),
    *(bad("objectives.advantages.gae", wrong, lambda _, a=a: advantages.gae(*a), words) for wrong, a, words in (
        ("gamma", (ONE, ONE, ONE, 1.1), "gamma 1.1"), ("lam", (ONE, ONE, ONE, 1.0, NAN), "lam nan"),
        ("shapes", (ONE, ONE[:, :2], ONE), "one shape"))),
    *(bad("objectives.logprobs.token_logprobs", f"{t}", lambda _, t=t: logprobs.token_logprobs(
        torch.ones(1, 3, 4), TOKENS, t), f"temperature {t}") for t in (0, -1.0, NAN)),
    bad("objectives.logprobs.selected_logprobs", "temperature", lambda _: logprobs.selected_logprobs(
        ONE, ONE, TOKENS[0, :2], 0.0), "above 0"),
    bad("objectives.masking.response_mask", "no prompt", lambda _: masking.response_mask(0, torch.tensor([1]), 4),
        "empty"),
    bad("objectives.masking.response_mask", "no room", lambda _: masking.response_mask(2, torch.tensor([3]), 4),
        "widen"),
    *(bad("objectives.policy.clipped_surrogate", f"{k}", lambda _, k=k: policy.clipped_surrogate(
        ONE, ONE, ONE, ONE, **k), words)
      for k, words in (({"clip_low": -0.1}, "clip_low -0.1"), ({"clip_high": NAN}, "clip_high nan"),
                       ({"level": "word"}, "word"))),
    bad("objectives.policy.kl_estimate", "k4", lambda _: policy.kl_estimate(ONE, ONE, "k4"), "'k4'", "'k3'"),
    bad("objectives.policy.grpo_loss", "no reference", lambda _: policy.grpo_loss(ONE, ONE, ONE, ONE, kl_coef=0.1),
        "needs a reference"),
    *(bad("objectives.policy.clipped_value_loss", f"clip {c}", lambda _, c=c: policy.clipped_value_loss(
        ONE, ONE, ONE, ONE, c), f"values is {c}") for c in (0, -1, NAN)),
    bad("objectives.policy.count_for", "unknown", lambda _: policy.count_for(ONE, "batch"), "'batch'"),
    bad("objectives.policy.count_for", "no length", lambda _: policy.count_for(ONE, "constant"), "constant_length"),
    bad("objectives.policy.reduce", "unknown", lambda _: policy.reduce(ONE, ONE, "mean", 1), "'mean'"),
    right("objectives.policy.reduce", "nothing counts", lambda _: float(policy.reduce(ONE * NAN, ONE * 0, "token", 0)),
        0.0),
    *(bad(f"objectives.preference.{call.__name__}", f"{k}", lambda _, call=call, n=n, k=k: call(*[ONE] * n, **k), *k)
      for call, n, ks in ((preference.bradley_terry_loss, 2, [{"centre": -1}, {"centre": NAN}]),
                          (preference.dpo_loss, 4, [{"beta": 0}, {"beta": NAN}, {"label_smoothing": 0.5},
                                                   {"kind": "hinge"}]),
                          (preference.orpo_loss, 2, [{"weight": -1}, {"weight": NAN}])) for k in ks),
    *(bad("objectives.preference.kto_loss", f"{k}", lambda _, k=k: preference.kto_loss(
        ONE[0], ONE[0], ONE[0] > 0, ONE[0, 0], **k), words) for k, words in (
        ({"beta": -1}, "beta is -1"), ({"desirable_weight": -1}, "weights -1"), ({"undesirable_weight": NAN}, "nan"))),
    bad("optim.build_optimizers", "unknown", lambda _: optim.build_optimizers(model(), "sgd"), "'sgd'"),
    bad("optim.build_optimizers", "no blocks", lambda _: optim.build_optimizers(nn.Linear(2, 2), "muon"),
        "use 'adamw'"),
    bad("optim.Optimizers.load_state_dict", "others", lambda _: optim.build_optimizers(model(), "muon").load_state_dict(
        optim.build_optimizers(model(), "adamw").state_dict()), "adamw"),
    *(bad("statistics.wilson", f"{k} of {n}", lambda _, k=k, n=n: statistics.wilson(k, n), "0 <= k <= n")
      for k, n in ((3, 2), (-1, 2), (NAN, 2))),
    right("statistics.wilson", "none of none", lambda _: statistics.wilson(0, 0), (0.0, 1.0)),
    *(bad("statistics.pass_at_k", f"{a}", lambda _, a=a: statistics.pass_at_k(*a), "1 <= k <= n")
      for a in ((4, 5, 1), (4, 1, 0), (4, 1, 8), (0, 0, 1))),
    bad("statistics.mean_and_interval", "nothing", lambda _: statistics.mean_and_interval([]), "at least one"),
    bad("metrics.Metrics", "tracker", lambda folder: metrics.Metrics(folder, "sft", 1, tracker="mlflow"), "'mlflow'"),
]
