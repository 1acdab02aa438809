"""All that depends on the device: what is set before MLX starts, and which of several ways is the fastest here.

environment.py      variables that MLX reads at its start
ways.py             times several ways of one computation and takes the fastest that is right
choices.py          what was chosen and why, for logs and people
attention.py        attention of rows of unlike lengths on CUDA, without a mask
projections.py      products that read the same input, in one call
layers.py           layers traced from one attention to the next
attending.py        a layer's own code, as far as its attention
fused.py            layers of the most common kind, with fewer kernels on CUDA
plain.py            products with weights in full width, for few rows
quantised.py        products with quantised weights, for few rows
host_heap.py        freed arrays that the C library keeps for the next ones, on CPUs
remembered.py       what was measured at an earlier start
tuning.py           fits a model that has just been loaded
"""
