"""Models: our own decoder, and the border to mlx-lm.

decoder.py          the forward pass: embed, then mixing and MLP of each layer, then the last norm
families/           the layers of each family, and where mlx-lm has their weights
architecture.py     parts of a family: layers between which a stream of hidden states flows
layers.py           weights of the kinds of layers
ops.py              operations of a layer: all that a back-end replaces
mixing.py           the mixers of all layers over the slots of a step:
attention.py        attention by MLX's operations
recurrence.py       the gated delta rule and short convolutions, as functions of arrays
slot_recurrence.py  both over the recurrent states of rows
model_runner.py     the contract between the step and a model with the caches of its rows:
slot_runner.py      our decoder on slots
draft_head.py       heads and drafters that look inside a model, which the runner steps
mlx_lm_runner.py    mlx-lm's own code on mlx-lm's caches: mlx_lm_caches.py, and their blocks, mlx_lm_blocks.py
positions.py        three positions of a token, for models that see
mlx_lm.py           everything that is imported from mlx-lm
mlx_vlm.py          the same of mlx-vlm, an extra: language models that mlx-lm lacks
arrays.py           a checkpoint's arrays under the names of our modules
tree.py             weights as a list of arrays, and back
"""
