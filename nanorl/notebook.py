"""What the notebooks show: source, checks of exercises, curves, tables, tokens, rollouts, and a few widgets.

Everything here returns or displays; nothing trains. It works in JupyterLab and headless (papermill, nbval): a
figure is drawn once, where its cell ends or where `watch` updates it, and widgets are never needed to go on.
"""

from __future__ import annotations

import ast
import html
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import ipywidgets as widgets
import matplotlib.pyplot as plt
import torch
from IPython.display import HTML, Markdown, display
from matplotlib.figure import Figure

from nanorl import config, metrics, runtime
from nanorl.chat import encode_prompt
from nanorl.generate import Sampling, generate
from nanorl.model import Transformer
from nanorl.tokenizer import SPECIALS, Tokenizer

COLOURS = ("#2a6fbb", "#d1603d", "#3a8f5c", "#8a5fb0", "#b08a1e", "#5b6770")
TINTS = ("#dce9f7", "#fbe3d6", "#dff0e3", "#ece2f5")
DPI = 75


# Parameters -------------------------------------------------------------------------------------------------


def check_parameters(namespace: Mapping[str, Any], *names: str) -> None:
    """Raise a ValueError where the notebook was given a parameter that is none of `names`, with the nearest.

    `namespace` is the notebook's globals(). papermill puts its parameters into a cell of their own and takes any
    name; that cell, and the notebook's own cell of parameters, are looked up among those run so far.
    """
    for cell in namespace.get("In", []):
        assigned = _assigned(cell)
        if cell.startswith("# Parameters") or set(assigned) & set(names):
            config.check_parameters(assigned, names)


def given(**parameters: Any) -> dict[str, Any]:
    """The parameters that are not None, in lower case, ready for `config.resolve`: given(STEPS=3, DATA=None)."""
    return {name.lower(): value for name, value in parameters.items() if value is not None}


def _assigned(cell: str) -> list[str]:
    """The names in a cell of nothing but `NAME = literal` lines, else []."""
    try:
        body = ast.parse(cell).body
        for statement in body:
            ast.literal_eval(statement.value)
        return [statement.targets[0].id for statement in body]
    except (SyntaxError, ValueError, AttributeError):
        return []


# Source and exercises ---------------------------------------------------------------------------------------


def show_source(thing: Any) -> None:
    """Show the source of a function, class or module of the package, and where it stands."""
    name = inspect.getmodule(thing).__name__
    display(Markdown(f"`{name.replace('.', '/')}.py`\n```python\n{inspect.getsource(thing).rstrip()}\n```"))


def check(label: str, answer: Any, test: Callable[[Any], Any], hint: str = "") -> None:
    """Say whether an exercise is solved; never raises, so that an open exercise stops no run.

    `test` gets the answer. It fails by returning False or by raising; torch.testing.assert_close returns None,
    which counts as right. An answer of None or `...`, or a NotImplementedError, is one not done yet.
    """
    if answer is None or answer is ...:
        print(f"{label}: not done yet")
        return
    try:
        wrong, reason = test(answer) is False, ""
    except NotImplementedError:
        print(f"{label}: not done yet")
        return
    except Exception as error:  # whatever a learner's code raises
        wrong, reason = True, next(iter(str(error).splitlines()), type(error).__name__)
    print(f"{label}: " + (f"not yet: {hint or reason or 'have another look'}" if wrong else "right"))


# Figures ----------------------------------------------------------------------------------------------------

Panel = str | Sequence[str] | tuple[Sequence[str], Sequence[str]]  # names, or (names on the left, on the right)


def axes(n: int = 1, width: float = 4.2, height: float = 2.9) -> tuple[Figure, Any]:
    """A figure of `n` plots side by side in the course's style: (figure, axes), one axes or an array of them.

    The figure is closed already: it is shown where it ends a cell, once.
    """
    figure, plots = plt.subplots(1, n, figsize=(width * n, height), dpi=DPI, layout="constrained")
    plt.close(figure)
    for plot in [plots] if n == 1 else plots:
        plot.grid(color="#e3e3e3", linewidth=0.8)
        plot.set_axisbelow(True)
        plot.set_prop_cycle(color=COLOURS)
        plot.spines[["top", "right"]].set_visible(False)
    return figure, plots


def curves(
    records: Sequence[dict], *panels: Panel, x: str = "step", title: str | None = None, smooth: int = 1
) -> Figure:
    """Metrics against `x`, one plot a panel; records that lack a metric are left out of its curve.

    A panel is a metric, a list of them, or a pair of lists: those on the left axis and those on the right one.
    A metric that few records hold is drawn with points. With `smooth` > 1 the mean over so many records is drawn,
    the raw values pale behind it.
    """
    panels = panels or (["loss"],)
    figure, plots = axes(len(panels), width=5.2 if len(panels) == 1 else 4.2)
    for plot, panel in zip([plots] if len(panels) == 1 else plots, panels, strict=True):
        left, right = panel if isinstance(panel, tuple) and not isinstance(panel[0], str) else (panel, [])
        left = [left] if isinstance(left, str) else list(left)
        lines = [_curve(plot, records, name, x, i, smooth) for i, name in enumerate(left)]
        plot.set_xlabel(x)
        if right:
            other = plot.twinx()
            other.spines["top"].set_visible(False)
            lines += [_curve(other, records, name, x, len(left) + i, smooth) for i, name in enumerate(right)]
            other.set_ylabel(", ".join(right))
        names = [*left, *(f"{name} (right axis)" for name in right)]
        plot.legend(lines, names, frameon=False, fontsize=8, ncol=2, loc="lower left", bbox_to_anchor=(0, 1))
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _curve(plot: Any, records: Sequence[dict], name: str, x: str, number: int, smooth: int) -> Any:
    points = [(r[x], r[name]) for r in records if r.get(name) is not None and r.get(x) is not None]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    colour, few = COLOURS[number % len(COLOURS)], len(points) <= max(1, len(records) // 2)
    if smooth > 1 and not few:
        plot.plot(xs, ys, color=colour, alpha=0.25, linewidth=1)
        ys = [sum(ys[max(0, i - smooth + 1) : i + 1]) / min(smooth, i + 1) for i in range(len(ys))]
    (line,) = plot.plot(xs, ys, color=colour, linewidth=1.6, marker="o" if few else None, markersize=4, label=name)
    return line


def watch(records: Iterable[dict], *panels: Panel, every: float = 2.0, smooth: int = 1) -> list[dict]:
    """Train while looking on: drain a generator of records, drawing their curves anew at most each `every` seconds.

    Drawing takes at most a twentieth of the time. Returns the records; the last figure stays in the output, also
    where training is interrupted.
    """
    seen: list[dict] = []
    handle = display(HTML("waiting for the first step"), display_id=True)
    due = time.monotonic() + every
    try:
        for record in records:
            seen.append(record)
            started = time.monotonic()
            if handle is not None and started >= due:
                handle.update(curves(seen, *panels, smooth=smooth))
                finished = time.monotonic()
                due = finished + max(every, 20 * (finished - started))
    finally:
        if handle is not None and seen:
            handle.update(curves(seen, *panels, smooth=smooth))
    return seen


def bars(labels: Sequence[str], values: Sequence[float], intervals: Sequence[tuple[float, float]] | None = None,
         title: str | None = None) -> Figure:
    """One bar a label; `intervals` are (low, high) around each value."""
    figure, plot = axes(width=max(3.0, 0.9 * len(labels) + 1))
    plot.bar(labels, values, color=COLOURS[0], width=0.6)
    if intervals is not None:
        below = [value - low for value, (low, _) in zip(values, intervals, strict=True)]
        above = [high - value for value, (_, high) in zip(values, intervals, strict=True)]
        plot.errorbar(labels, values, yerr=[below, above], fmt="none", color="#333333", capsize=4, linewidth=1)
    plot.grid(axis="x", visible=False)
    if title:
        plot.set_title(title, fontsize=10)
    return figure


# Tables and texts -------------------------------------------------------------------------------------------


def table(records: Sequence[Mapping], columns: Sequence[str] | Mapping[str, str] | None = None) -> HTML:
    """Records as an HTML table. `columns` chooses keys, or maps keys to headings; None takes every key."""
    if columns is None:
        columns = list(dict.fromkeys(key for record in records for key in record))
    headings = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    head = "".join(f"<th style='text-align:left'>{html.escape(str(heading))}</th>" for heading in headings.values())
    rows = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{_cell(record.get(name))}</td>" for name in headings) + "</tr>"
        for record in records
    )
    return HTML(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def show_tokens(tokenizer: Tokenizer, ids: Iterable[int], mask: Iterable[int] | None = None) -> HTML:
    """Tokens as coloured boxes, the id on hovering. With `mask`, tokens that count are green and the rest grey."""
    ids = [int(index) for index in ids]
    counted = None if mask is None else [bool(m) for m in mask]
    boxes = []
    for i, index in enumerate(ids):
        tint = TINTS[i % len(TINTS)] if counted is None else "#cfead6" if counted[i] else "#e6e6e6"
        text = html.escape(_visible(tokenizer, index))
        weight = "bold" if index in tokenizer.special.values() else "normal"
        boxes.append(f"<span title='{index}' style='background:{tint};color:#222;font-weight:{weight};"
                     f"padding:1px 3px;margin:1px;border-radius:3px;display:inline-block'>{text}</span>")
    return HTML(f"<div style='font-family:monospace;line-height:1.7'>{''.join(boxes)}</div>")


def _visible(tokenizer: Tokenizer, index: int) -> str:
    """A token as text in which spaces, line ends and stray bytes can be seen."""
    try:
        text = tokenizer.decode_bytes([index]).decode("utf-8", "backslashreplace")
    except KeyError:
        return f"[{index}]"
    return text.replace(" ", "\u00b7").replace("\n", "\u23ce").replace("\t", "\u21e5")


def read_samples(folder: str | Path, steps: Iterable[int] | None = None) -> list[dict]:
    """What a run wrote for reading (samples.jsonl), of all steps or of some. FileNotFoundError if there is none."""
    wanted = None if steps is None else set(steps)
    samples = metrics.read_metrics(folder, metrics.SAMPLES)
    return [sample for sample in samples if wanted is None or sample["step"] in wanted]


def show_rollouts(samples: Iterable[Mapping]) -> HTML:
    """Samples as cards: question, response with its marks, reward, and the right answer. Keys as in `read_samples`."""
    cards = []
    for sample in samples:
        reward = sample.get("reward")
        edge = "#b9b9b9" if reward is None else "#3a8f5c" if reward >= 1 else "#d1603d"
        facts = [f"step {sample['step']}"] if "step" in sample else []
        facts += [] if reward is None else [f"reward {reward:.2f}"]
        gold = str(sample.get("answer", "")).rpartition("####")[2].strip()
        facts += [f"right answer {gold}"] if gold else []
        response = html.escape(str(sample["response"]))
        for mark in SPECIALS:
            response = response.replace(html.escape(mark), f"<b style='color:#2a6fbb'>{html.escape(mark)}</b>")
        cards.append(
            f"<div style='border-left:4px solid {edge};padding:2px 10px;margin:8px 0'>"
            f"<div>{html.escape(str(sample['question']))}</div>"
            f"<div style='font-family:monospace;white-space:pre-wrap'>{response}</div>"
            f"<div style='opacity:0.7;font-size:85%'>{html.escape(', '.join(facts))}</div></div>"
        )
    return HTML("".join(cards))


# Widgets ----------------------------------------------------------------------------------------------------


def rollout_viewer(folder: str | Path) -> widgets.Widget:
    """A slider over the steps of a run, with the responses that were kept of each."""
    samples = read_samples(folder)
    steps = sorted({sample["step"] for sample in samples})
    if not steps:
        return widgets.HTML("no samples were kept")
    slider, page = widgets.SelectionSlider(options=steps, description="step"), widgets.HTML()

    def turn(_: Any = None) -> None:
        page.value = show_rollouts(s for s in samples if s["step"] == slider.value).data

    slider.observe(turn, names="value")
    turn()
    return widgets.VBox([slider, page])


def chat_box(model: Transformer, tokenizer: Tokenizer, max_new_tokens: int = 96) -> widgets.Widget:
    """A box to talk to a chat model in: each message is answered on its own, the model here has no memory."""
    line = widgets.Text(placeholder="write, then press the button", layout=widgets.Layout(width="60%"))
    heat = widgets.FloatSlider(value=0.0, min=0.0, max=1.5, step=0.1, description="temperature")
    think = widgets.Checkbox(value=False, description="make it reason")
    button, page = widgets.Button(description="send"), widgets.HTML()

    def send(_: Any = None) -> None:
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": line.value}], think=think.value)
        sampling = Sampling(max_new_tokens, heat.value)
        try:
            done = generate(model, [prompt], sampling, tokenizer.end_of_turn, tokenizer.pad,
                            generator=runtime.generator(int(torch.randint(2**31, ()))))
        except ValueError as error:
            page.value = html.escape(str(error))
            return
        response = ("<think>" if think.value else "") + tokenizer.decode(done.responses[0, : int(done.lengths[0])])
        page.value = show_rollouts([{"question": line.value, "response": response}]).data + page.value

    button.on_click(send)
    return widgets.VBox([widgets.HBox([line, button]), widgets.HBox([heat, think]), page])


class Form(widgets.VBox):
    """A field a line for the settings of a stage, filled in with the preset's values; see `form`."""

    def __init__(self, cls: type[config.StageConfig], preset: str = "auto", **settings: Any):
        self.cls, self.preset = cls, config.resolve_preset(preset)
        start = config.resolve(cls, self.preset, **settings)
        names = [name for name in cls.model_fields if name != "preset"]
        self.fields = {name: self._field(name, getattr(start, name)) for name in names}
        super().__init__(list(self.fields.values()))

    def _field(self, name: str, value: Any) -> widgets.Widget:
        info = self.cls.model_fields[name]
        style = {"description": name, "tooltip": info.description, "style": {"description_width": "10em"}}
        if info.annotation is bool:
            return widgets.Checkbox(value=value, **style)
        if str(get_origin(info.annotation)) == "typing.Literal":
            return widgets.Dropdown(options=get_args(info.annotation), value=value, **style)
        return widgets.Text(value="" if value is None else str(value), **style)

    @property
    def values(self) -> dict[str, Any]:
        """What stands in the form: an empty box is None for an optional field and the preset's value for others."""
        found = {}
        for name, box in self.fields.items():
            optional = type(None) in get_args(self.cls.model_fields[name].annotation)
            empty = isinstance(box.value, str) and not box.value.strip()
            found[name] = (None if optional else ...) if empty else box.value
        return found

    def config(self) -> config.StageConfig:
        """The settings of the form; ValueError, in one line, for a value out of bounds."""
        return config.resolve(self.cls, self.preset, **self.values)


def form(cls: type[config.StageConfig], preset: str = "auto", **settings: Any) -> Form:
    """A form for the settings of a stage; `form(...).config()` is what stands in it when it is called."""
    return Form(cls, preset, **settings)
