"""Models: our own decoder, and the border to mlx-lm.

decoder.py          the forward pass: embed, then attention and MLP of each layer, then the last norm
attention.py        attention over slots, by MLX's operations
recurrence.py       recurrent layers: the gated delta rule, and short convolutions
ops.py              operations of a layer: all that a back-end replaces
layers.py           weights of the kinds of layers
architecture.py     parts of a family: layers between which a stream of hidden states flows
families/           the layers of each family, and where mlx-lm has their weights
reading.py          weights read out of mlx-lm's modules
model_runner.py     the contract between the step and a model with the caches of its rows:
slot_runner.py      our decoder on slots
mlx_lm_runner.py    mlx-lm's own code on mlx-lm's caches: mlx_lm_caches.py, and their blocks, mlx_lm_blocks.py
positions.py        three positions of a token, for models that see
mlx_lm.py           everything that is imported from mlx-lm
cpu_math.py         exp and activations for CPUs
arrays.py           a checkpoint's arrays under the names of our modules
trunk.py            a language model of mlx-lm without its head
tree.py             weights as a list of arrays, and back
few_sizes.py        sizes of arrays rounded up, for traces and freed buffers
"""
