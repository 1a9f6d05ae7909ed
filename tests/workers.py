"""What the processes of the distributed tests run; a spawned process imports it by name."""

import contextlib
import hashlib
import io
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar
from unittest.mock import patch

import torch
from tiny_run import COMMON, STAGES, config_of
from torch import nn

from nanorl import checkpoint, distributed, evaluate, launch, stopping
from nanorl.__main__ import main
from nanorl.config import StageConfig
from nanorl.generate import Completions, left_pad
from nanorl.metrics import Metrics
from nanorl.rollout import Rollout, assemble, recompute_logprobs
from nanorl.train import grpo, ppo, preference, pretrain, reward, rl, sft, supervised
from nanorl.train.progress import Run, accumulate


def group_report(folder: str) -> dict:
    """Join the group, try each function of `distributed` once, and return what came out on this rank."""
    device = distributed.setup(torch.device("cpu"))
    try:
        return {"device": device.type, "rank": distributed.rank(), "world": distributed.world_size(),
                "main": distributed.is_main(), **exchanged(), **trained(device), **reported(folder)}
    finally:
        distributed.close()


def exchanged() -> dict:
    rank = distributed.rank()
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).T * (rank + 1)  # not contiguous
    before = mine.tolist()
    total = distributed.sum_over_ranks(mine)
    distributed.barrier()
    return {
        "int": distributed.sum_over_ranks(2**53 + rank),  # a float cannot hold 2**53 + 1
        "float": distributed.sum_over_ranks(0.1 + rank),
        "mean": distributed.mean_over_ranks(1 + rank),
        "tensor": total.tolist(),
        "detached": not total.requires_grad and mine.tolist() == before,
        "named": distributed.sum_named({"both": 0.5 + rank} | ({"one": 3.0} if rank else {})),
        "gathered": distributed.gather_objects([{"rank": rank}] * (rank + 1)),
        "broadcast": distributed.broadcast_object(f"from {rank}"),
        "shard": distributed.shard(list(range(5))),
    }


def trained(device: torch.device) -> dict:
    """Different first weights and data on each rank; the gradient with and without averaging."""
    rank = distributed.rank()
    raw = nn.Linear(1, 1, bias=False)
    nn.init.constant_(raw.weight, 5.0 + rank)
    model = distributed.wrap(raw, device)
    x = torch.full((1, 1), 1.0 + rank)
    with distributed.no_sync(model):
        model(x).sum().backward()
    alone = raw.weight.grad.item()
    raw.weight.grad = None
    model(x).sum().backward()
    return {"weight": raw.weight.item(), "alone": alone, "together": raw.weight.grad.item(),
            "unwrapped": model is not raw and distributed.unwrap(model) is raw}


def reported(folder: str) -> dict:
    """Both ranks log; only rank 0 may write."""
    with Metrics(folder, "toy", total=1) as metrics:
        metrics.log({"step": 1, "rank": distributed.rank()})
    return {}


# ---- training ------------------------------------------------------------------------------------------

TINY = dict(vocab_size=300, context_length=112, max_number=20, max_steps=1, precision="fp32", device="cpu")


class CourseConfig(StageConfig):
    """The settings of `course`, which are those of a run."""

    stage: ClassVar[str] = "course"


def course(cfg: CourseConfig) -> Iterator[dict]:
    """Five steps of each stage, PPO and GRPO with fixed rollouts, in several micro-batches. The last record of
    a stage says in `weights` what each rank's parameters were after it. AdamW throughout: Muon orthogonalizes in bf16,
    where the last bit of a gradient, which depends on the order of a sum, shows at 1e-3."""
    common = TINY | dict(run=cfg.run, preset=cfg.preset, steps=5, warmup=2, optimizer="adamw", lr=1e-3)
    rows = dict(batch_size=8, micro_batch_size=2, eval_every=3, eval_batches=2)
    shape = dict(n_embed=32, n_head=2, n_kv_head=1, n_blocks=2, window=48)
    reinforced = dict(prompts=6, group=4, epochs=2, micro_prompts=2, max_new_tokens=8, kl_coef=0.1, problems=60,
                      eval_problems=20, dev_problems=8, eval_every=3)
    pairs = rows | dict(pairs=40, dev_pairs=12)
    critic = reinforced | dict(minibatches=1, entropy_coef=0.01, value_clip=0.2, kl_target=0.1, critic="separate")
    configs = (pretrain.PretrainConfig(**common, **rows, **shape), sft.SFTConfig(**common, **rows),
               reward.RewardConfig(**common, **pairs), preference.DPOConfig(**common, **pairs),
               preference.ORPOConfig(**common, **pairs), preference.KTOConfig(**common, **pairs),
               ppo.PPOConfig(**common, **critic), grpo.GRPOConfig(**common, **reinforced))
    with (patch.object(Run, "close_step", with_weights(Run.close_step)), patch.object(grpo, "sample", fixed_sample),
          patch.object(ppo, "sample", fixed_sample_for_ppo)):
        for stage in configs:
            for record in launch.STAGES[stage.stage][0](stage):
                yield {"stage": stage.stage, **record}


def with_weights(close_step: Callable) -> Callable:
    """`Run.close_step`, whose record says what each rank's weights are."""
    def close(run: Run, record: dict, samples: Sequence[dict] = ()) -> Iterator[dict]:
        for closed in close_step(run, record, samples):
            weights = b"".join(p.detach().numpy().tobytes() for p in run.model.parameters())
            yield closed | {"weights": distributed.gather_objects([hashlib.sha256(weights).hexdigest()])}
    return close


def fixed_sample(cfg, policy, tokenizer, stream, step, clock) -> tuple[Rollout, dict]:
    """Instead of `grpo.sample`: responses, rewards and old log-probs that only depend on the step and the weights."""
    P, G, R = cfg.prompts, cfg.group, cfg.max_new_tokens
    B, rng = P * G, torch.Generator().manual_seed(step)
    prompts = [torch.randint(1, 256, (3 + i,), generator=rng).tolist() for i in range(P)]
    lengths = torch.randint(1, R + 1, (B,), generator=rng)
    written = torch.arange(R) < lengths[:, None]
    responses = torch.randint(1, 256, (B, R), generator=rng) * written
    tokens, mask = left_pad(prompts, 0, policy.device)
    whole = assemble(Completions(tokens, mask, responses, lengths, torch.zeros(B, R), lengths < R), G)
    with torch.no_grad():
        whole.logprobs = recompute_logprobs(policy, policy.lm_head, whole, cfg.temperature)[0]
    whole.logprobs += 0.3 * torch.randn(whole.logprobs.shape, generator=rng) * whole.response_mask
    whole.rewards = torch.randint(0, 2, (B,), generator=rng).float()
    whole.parts = {"correct": whole.rewards, "format": whole.rewards}
    whole.problems, whole.texts = [{"question": "", "answer": ""}] * P, [""] * B
    mine = whole.select(distributed.shard(torch.arange(P)))
    return mine, grpo.over_all_ranks([mine])


def fixed_sample_for_ppo(cfg, policy, judge, tokenizer, stream, step, clock) -> tuple[Rollout, dict]:
    """The same instead of `ppo.sample`."""
    return fixed_sample(cfg, policy, tokenizer, stream, step, clock)


def rank_1_fails(cfg: CourseConfig) -> Iterator[dict]:
    """Rank 0 waits for a rank that never comes."""
    distributed.setup(torch.device("cpu"))
    yield {"step": 1}
    if distributed.rank() == 1:
        raise KeyError("apples")
    distributed.barrier()


def deaf(cfg: CourseConfig) -> Iterator[dict]:
    """One record, and then nothing: no signal, no wish of the launcher is heard."""
    stopping.ignore()
    yield {"step": 1}
    time.sleep(1000)


def endless(cfg: CourseConfig) -> Iterator[dict]:
    """Never ends; a record every tenth of a second."""
    for step in itertools.count(1):
        yield {"step": step, "loss": float("nan"), "threads": torch.get_num_threads(), "seed": cfg.seed}
        time.sleep(0.1)


# ---- a run that goes on with another number of processes -------------------------------------------------

SMALL = dict(micro_batch_size=1, max_grad_norm=0.1, optimizer="adamw")  # why not Muon: see `course`


class Noted:
    """Batches, and in `rows` what all ranks together got of each."""

    def __init__(self, source, rows: list):
        self.source, self.rows = source, rows

    def __next__(self):
        batch = next(self.source)
        self.rows.append(sorted(distributed.gather_objects(rows_of(batch))))
        return batch

    @property
    def position(self) -> int:
        return self.source.position

    @position.setter
    def position(self, value: int) -> None:
        self.source.position = value


def rows_of(batch: dict | list) -> list:
    """The token ids of each row, padding left out, or the numbers of the prompts."""
    if isinstance(batch, list):
        return [number for number, _ in batch]
    kept = batch.get("documents", batch["tokens"]) >= 0
    return [row[keep].tolist() for row, keep in zip(batch["tokens"], kept, strict=True)]


def leg(stage: str, last: int | None = None, **changes) -> dict:
    """Train a stage up to step `last` of its run, or to its end, a checkpoint a step: its records, the rows of each
    batch, and where in the data the run is then. A supervised stage takes several micro-batches on each rank, and each
    gradient is clipped."""
    small = {} if stage in ("ppo", "grpo") else SMALL
    cfg, rows, records = config_of(stage, **small, save_every=1, **changes), [], []
    train, stream = supervised.train, grpo.PromptStream

    def noting(cfg: StageConfig, job: supervised.Job, device: torch.device) -> Iterator[dict]:
        job.batches = Noted(job.batches, rows)
        return train(cfg, job, device)

    with (patch.object(supervised, "train", noting),
          patch.object(grpo, "PromptStream", lambda *args: Noted(stream(*args), rows)),
          patch.object(ppo, "PromptStream", lambda *args: Noted(stream(*args), rows))):
        steps = STAGES[stage][0](cfg)
        for record in steps:
            records.append(record)
            if record["step"] == last:
                break
        steps.close()
    state = checkpoint.load(checkpoint.latest(cfg.folder))
    return {"records": records, "rows": rows, "position": state["position"], "finished": state["finished"]}


def on_two_ranks(last: dict[str, int]) -> dict:
    """Each stage, begun elsewhere, up to a step, and what else two ranks are asked at this opportunity."""
    device = distributed.setup(torch.device("cpu"))
    return {"legs": {stage: leg(stage, step, resume="latest", label=f"{stage}-moved") for stage, step in last.items()},
            "whole": leg("sft", label="sft-two"), "moments": moments_of_a_share(), "reductions": reductions(device),
            "written": written(), "eval": judged()}


def moments_of_a_share() -> tuple[float, float]:
    """Mean and variance over all ranks of five rows, of which a rank has its share, and of which fewer and fewer
    values count."""
    x = torch.arange(20.0).view(5, 4).square()
    mask = torch.arange(4) < torch.tensor([4, 3, 2, 1, 0])[:, None]
    mine = distributed.shard(torch.arange(5))
    return rl.moments(x[mine], mask[mine])


def reductions(device: torch.device) -> int:
    """How often the ranks meet to average gradients in a step of three micro-batches."""
    model, times = distributed.wrap(nn.Linear(1, 1), device), []

    def note(_, bucket):
        times.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, note)
    for x in accumulate(model, torch.ones(3, 1, 1)):
        model(x).sum().backward()
    return len(times)


def written() -> list[str]:
    """What a rank writes in the first step of GRPO where all ranks are given the same prompts."""
    texts, act, stream = [], rl.act, grpo.PromptStream

    def noting(*args) -> Rollout:
        rollout = act(*args)
        texts.extend(rollout.texts)
        return rollout

    with (patch.object(grpo, "act", noting),
          patch.object(grpo, "PromptStream", lambda problems, size, seed, *_: stream(problems, size, seed))):
        list(STAGES["grpo"][0](config_of("grpo", steps=1, label="grpo-same")))
    return texts


def judged() -> tuple[dict | None, list]:
    """The record that `eval` prints, None on a rank that prints nothing, and what was answered to each of its three
    questions, (problems, answers). Leaves the process group."""
    settings = COMMON | {"preset": "smoke", "eval_problems": 12, "eval_group": 4, "max_new_tokens": 8}
    printed, texts, answer = io.StringIO(), [], evaluate.answer

    def noting(*args, **kwargs) -> evaluate.Answers:
        answers = answer(*args, **kwargs)
        texts.append(answers.texts)
        return answers

    with (patch.object(evaluate, "BATCH", 8), patch.object(evaluate, "answer", noting),  # several batches
          contextlib.redirect_stdout(printed)):
        assert main(["eval", "--of=sft", *(f"--{name}={value}" for name, value in settings.items())]) == 0
    return json.loads(printed.getvalue() or "null"), texts
