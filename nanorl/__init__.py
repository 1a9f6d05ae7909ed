"""nanorl: a language model from raw text to reasoning, in plain PyTorch, one stage at a time.

The package holds the trainers that the notebooks explain. Modules are layered: each imports only from the
layers below it, and importing any of them runs nothing.
"""

__version__ = "0.1.0"
