"""How the bundled models were made: corpora from a seed and a grammar, training on MLX, evaluation, model cards.

`python -m tools.pico.train` trains pico; `python -m tools.pico.tools.train` makes pico-tools of it.
"""
