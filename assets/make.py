"""The figure and the CSV files of the README, from finished runs.

    for seed in 0 1 2; do
      papermill notebooks/05_grpo.ipynb runs/05_grpo-$seed.ipynb -p PRESET cpu -p SEED $seed
      for stage in reward dpo orpo kto ppo; do python -m nanorl $stage --preset cpu --seed $seed; done
    done
    python assets/make.py

Writes runs/grpo_cpu_seed*.csv (one line a step), runs/table_cpu.csv (one line a stage and seed) and grpo.svg, and
prints the table in Markdown.
"""

import csv
from pathlib import Path

from nanorl import config, evaluate, notebook, paths
from nanorl.metrics import read_metrics

HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2)


def write_csv(path: Path, records: list[dict]) -> None:
    names = list(dict.fromkeys(name for record in records for name in record))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for record in records:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in record.items()})


def percent(record: dict, name: str) -> str:
    if record.get(name) is None:
        return ""
    return f"{record[name]:.1%} ({record[name + '_low']:.1%} to {record[name + '_high']:.1%})"


def main() -> None:
    table = []
    for seed in SEEDS:
        cfg = config.resolve(evaluate.EvalConfig, "cpu", seed=seed)
        table += evaluate.stage_table(cfg)
        records = read_metrics(paths.stage_dir(cfg.run_name, "grpo"))
        write_csv(HERE / "runs" / f"grpo_cpu_seed{seed}.csv", records)
        if seed == 0:
            figure = notebook.curves(records, (["correct", "dev_accuracy"], ["length"]), smooth=5,
                                     title="GRPO, cpu preset, seed 0: accuracy and response length")
            figure.savefig(HERE / "grpo.svg")
    write_csv(HERE / "runs" / "table_cpu.csv", table)
    print("| seed | stage | greedy (95% interval) | made to reason | sampled | pass@8 | tokens | minutes |")
    print("|---|---|---|---|---|---|---|---|")
    for r in table:
        print(f"| {r['seed']} | {r['stage']} | {percent(r, 'greedy')} | {percent(r, 'made_to_reason')} | "
              f"{r['sampled']:.1%} | {r['pass_at_8']:.1%} | {r['mean_length']:.1f} | {r['minutes']:.1f} |")


if __name__ == "__main__":
    main()
