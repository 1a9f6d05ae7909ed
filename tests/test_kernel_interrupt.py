"""In a notebook: an interrupt of the kernel in the middle of a run saves it, and the next cell goes on with it."""

import os
from pathlib import Path

import stress
from jupyter_client.manager import start_new_kernel
from tiny_run import COMMON, SIZES, new_home

from nanorl import checkpoint, paths

SETUP = """
from nanorl import launch
from nanorl.config import resolve
train, config = launch.STAGES["grpo"]
cfg = resolve(config, "smoke", steps=100_000, **{settings})
"""


def run_cell(client, code: str, on_text=lambda text: None) -> dict:
    """Run a cell to its end and return the kernel's reply; what it prints is passed on."""
    def hear(message):
        if message["msg_type"] == "stream":
            on_text(message["content"]["text"])

    return client.execute_interactive(code, timeout=60, output_hook=hear)["content"]


def test_an_interrupted_run_is_saved_and_the_next_cell_resumes(tmp_path, monkeypatch):
    new_home(tmp_path, monkeypatch)
    settings = COMMON | {name: value for name, value in SIZES["grpo"].items() if name != "steps"}
    manager, client = start_new_kernel(env=os.environ | {"PYTHONPATH": str(Path(stress.__file__).parent.parent)})
    folder = paths.stage_dir("tiny", "grpo")
    try:
        assert run_cell(client, SETUP.format(settings=settings))["status"] == "ok"
        asked = []

        def interrupt(text: str) -> None:
            if "step 3." in text and not asked:
                asked.append(text)
                manager.interrupt_kernel()

        reply = run_cell(client, "for record in launch.launch(train, cfg):\n    print(f'step {record[\"step\"]}.')",
                         interrupt)
        assert reply["status"] == "error" and reply["ename"] == "Stopped"
        stopped = checkpoint.load(checkpoint.latest(folder))["step"]
        assert stopped >= 3 and f"grpo stopped after step {stopped} of 100000" in reply["evalue"]
        texts = []
        reply = run_cell(client, f"cfg = cfg.model_copy(update=dict(resume='latest', steps={stopped + 2}))\n"
                         "print([record['step'] for record in launch.launch(train, cfg)])", texts.append)
        assert reply["status"] == "ok", reply
        assert f"{stopped + 1}, {stopped + 2}]" in "".join(texts).replace("[", "")
        assert checkpoint.load(checkpoint.latest(folder))["finished"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
