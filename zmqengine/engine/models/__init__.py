"""Models: the decoder family's own forward pass, and the border to mlx-lm.

mlx_lm.py       everything that is imported from mlx-lm
decoder_weights.py      weights of the family, read from the model that mlx-lm has loaded
ops.py          operations of a layer, behind one object; MLX's on every device
cpu_ops.py      those of a CPU; step_ops.py those of its decode steps
cpu_math.py     exp and activations for CPUs
decoder.py      the forward pass, of a rectangle of tokens or of the segments of a packed step
tree.py         weights as a list of arrays, and back
few_sizes.py    sizes of arrays rounded up, for traces and freed buffers
"""
