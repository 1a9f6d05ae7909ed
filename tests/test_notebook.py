"""What the notebooks show: parameters, checks, figures, tables, tokens, widgets."""

import json
import random

import matplotlib.pyplot as plt
import pytest
import torch
from torch.testing import assert_close

from nanorl import notebook
from nanorl.config import resolve
from nanorl.model import ModelConfig, Transformer
from nanorl.objectives import advantages
from nanorl.tokenizer import Tokenizer
from nanorl.train.grpo import GRPOConfig

RECORDS = [{"step": i, "loss": 1 / i, "length": 10 + i, "dev": i / 10 if i % 4 == 0 else None} for i in range(1, 13)]


@pytest.fixture(scope="module")
def tokenizer():
    rng = random.Random(0)
    return Tokenizer.train((f"Tom has {rng.randint(0, 99)} apples and pens." for _ in range(200)), 275)


# ---- parameters ----------------------------------------------------------------------------------------


def test_given_leaves_out_none_and_lowers():
    assert notebook.given(STEPS=3, DATA=None, SEED=0) == {"steps": 3, "seed": 0}
    cfg = resolve(GRPOConfig, "smoke", **notebook.given(STEPS=None, SEED=5))
    assert cfg.seed == 5 and cfg.steps == resolve(GRPOConfig, "smoke").steps


@pytest.mark.parametrize("injected, nearest", [
    ("# Parameters\nSTPES = 3\n", "STEPS"),
    ("# Parameters\nPRESET = \"gpu\"\nseed = 1\n", "SEED"),
])
def test_unknown_parameter_is_named_with_the_nearest(injected, nearest):
    own = 'PRESET = "auto"  # which\nSTEPS = None  # how many\nSEED = 0'
    with pytest.raises(ValueError, match=f"unknown papermill parameter .*; did you mean '{nearest}'") as raised:
        notebook.check_parameters({"In": ["", own, injected]}, "PRESET", "STEPS", "SEED")
    assert "\n" not in str(raised.value)


def test_known_parameters_and_other_cells_pass():
    cells = ["", 'PRESET = "auto"\nSEED = 0', "# Parameters\nSEED = -1\n", "lr = 3", "import torch", "no python"]
    notebook.check_parameters({"In": cells}, "PRESET", "SEED")
    notebook.check_parameters({}, "PRESET")


# ---- source and checks ---------------------------------------------------------------------------------


def test_show_source_shows_the_package_and_no_path(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(notebook, "display", shown.append)
    notebook.show_source(advantages.informative_groups)
    text = shown[0].data
    assert text.startswith("`nanorl/objectives/advantages.py`") and "def informative_groups" in text
    assert "site-packages" not in text and "/home" not in text


def solver_not_written(_):
    raise NotImplementedError


@pytest.mark.parametrize("answer, test, says", [
    (None, lambda a: True, "q: not done yet"),
    (..., lambda a: True, "q: not done yet"),
    (3, solver_not_written, "q: not done yet"),
    (3, lambda a: a == 3, "q: right"),
    (3, lambda a: assert_close(torch.tensor(a), torch.tensor(3)), "q: right"),
    (4, lambda a: a == 3, "q: not yet: count again"),
    (4, lambda a: a.nothing, "q: not yet: count again"),
    (0, lambda a: a == 3, "q: not yet: count again"),
])
def test_check_says_how_an_exercise_stands(capsys, answer, test, says):
    notebook.check("q", answer, test, hint="count again")
    assert capsys.readouterr().out.strip() == says


def test_check_without_a_hint_gives_the_reason_in_one_line(capsys):
    notebook.check("q", 4, lambda a: assert_close(torch.tensor(a), torch.tensor(3)))
    assert capsys.readouterr().out.startswith("q: not yet: Scalars are not equal!") is True


# ---- figures -------------------------------------------------------------------------------------------


def test_curves_leave_out_what_is_missing_and_are_closed():
    figure = notebook.curves(RECORDS, "loss", (["dev"], ["length"]), title="a run")
    lines = {line.get_label(): line for plot in figure.axes for line in plot.get_lines()}
    assert len(figure.axes) == 3  # two plots, and a second scale for the length
    assert list(lines["dev"].get_xdata()) == [4, 8, 12] and lines["dev"].get_marker() == "o"
    assert len(lines["loss"].get_xdata()) == 12 and lines["loss"].get_marker() == "None"
    assert plt.get_fignums() == []


def test_curves_smooth_and_survive_nothing_to_draw():
    figure = notebook.curves(RECORDS, "length", smooth=3)
    raw, smooth = figure.axes[0].get_lines()
    assert list(raw.get_ydata())[:3] == [11, 12, 13] and list(smooth.get_ydata())[:4] == [11, 11.5, 12, 13]
    notebook.curves([], "loss")
    notebook.curves(RECORDS, "unheard_of")


def test_watch_drains_and_leaves_the_last_figure(monkeypatch):
    class Handle:
        figures = []

        def update(self, figure):
            self.figures.append(figure)

    monkeypatch.setattr(notebook, "display", lambda *_, **__: Handle())
    assert notebook.watch(iter(RECORDS), "loss", every=1000) == RECORDS
    assert len(Handle.figures) == 1
    assert notebook.watch(iter([]), "loss") == []

    def interrupted():
        yield RECORDS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        notebook.watch(interrupted(), "loss", every=1000)
    assert len(Handle.figures) == 2 and plt.get_fignums() == []


def test_bars_carry_intervals():
    figure = notebook.bars(["a", "b"], [0.5, 0.8], [(0.4, 0.6), (0.7, 0.85)])
    assert [round(p.get_height(), 2) for p in figure.axes[0].patches] == [0.5, 0.8] and plt.get_fignums() == []


# ---- tables and texts ----------------------------------------------------------------------------------


def test_table_formats_and_escapes():
    page = notebook.table([{"stage": "<b>", "greedy": 0.123456, "made": None}, {"stage": "sft"}]).data
    assert "&lt;b&gt;" in page and "<td style='text-align:left'>0.1235</td>" in page and ">-<" in page
    page = notebook.table([{"a": 1, "b": 2}], {"b": "second"}).data
    assert "second" in page and ">1<" not in page


def test_tokens_are_escaped_and_spaces_seen(tokenizer):
    ids = [*tokenizer.encode_with_marks("<think>a < b & c\n"), tokenizer.encode_bytes(b"\xff")[0], 99_999]
    page = notebook.show_tokens(tokenizer, ids).data
    assert "&lt;think&gt;" in page and "&amp;" in page and "<think>" not in page
    assert "\u00b7" in page and "\u23ce" in page and "\\xff" in page and "[99999]" in page
    assert page.count("<span") == len(ids)
    masked = notebook.show_tokens(tokenizer, [65, 66], mask=[0, 1]).data
    assert masked.index("#e6e6e6") < masked.index("#cfead6")


def test_rollouts_are_read_by_step_and_escaped(tmp_path):
    samples = [{"step": s, "question": "1 < 2?", "response": "<think>x</think><script>", "answer": "y\n#### 7",
                "reward": 1.1} for s in (1, 2)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples), encoding="utf-8")
    assert [s["step"] for s in notebook.read_samples(tmp_path)] == [1, 2]
    page = notebook.show_rollouts(notebook.read_samples(tmp_path, steps=[2])).data
    assert "step 2" in page and "step 1" not in page and "right answer 7" in page and "reward 1.10" in page
    assert "<script>" not in page and "&lt;think&gt;" in page
    viewer = notebook.rollout_viewer(tmp_path)
    viewer.children[0].value = 2
    assert "step 2" in viewer.children[1].value
    with pytest.raises(FileNotFoundError, match="samples.jsonl"):
        notebook.read_samples(tmp_path / "elsewhere")


# ---- widgets -------------------------------------------------------------------------------------------


def test_form_gives_a_config_and_empty_boxes_are_none():
    form = notebook.form(GRPOConfig, "smoke", run="mine")
    assert form.config() == resolve(GRPOConfig, "smoke", run="mine")
    form.fields["run"].value = "  "
    form.fields["steps"].value = "7"
    form.fields["reduction"].value = "sequence"
    form.fields["lr"].value = ""  # not optional: the preset's value
    cfg = form.config()
    assert (cfg.run, cfg.steps, cfg.reduction) == (None, 7, "sequence")
    assert cfg.lr == resolve(GRPOConfig, "smoke").lr
    form.fields["group"].value = "1"
    with pytest.raises(ValueError, match="'group'"):
        form.config()


def test_chat_box_answers_and_reports_what_does_not_fit(tokenizer):
    shape = ModelConfig(vocab_size=275, context_length=24, n_embed=16, n_head=2, n_kv_head=2, n_blocks=1)
    model = Transformer(shape).eval()
    box = notebook.chat_box(model, tokenizer, max_new_tokens=4)
    line, button = box.children[0].children
    line.value = "Tom?"
    button.click()
    assert "Tom?" in box.children[2].value
    line.value = "x" * 99
    button.click()
    assert "context" in box.children[2].value
