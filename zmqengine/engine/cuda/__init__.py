"""Kernels in CUDA C++, which MLX compiles at run time and keeps.

cuda_ops.py              `Ops` of a decoder layer: what is computed by which of the kernels below
kernel_text.py           the source of a kernel, as short as it can be
resident.py              small arrays that every kernel of a step reads, kept on the device
kv_kernels.py            what KV caches need of the device: rows moved in place by move_rows.cu
drawing.py, draw.cu      drawing tokens
attention.py             attention of a step and of chunks of prompts:
ragged_attention*.cu     rows of unlike lengths; how it ends is in the .cuh
window_attention.cu      the same for several tokens of a row, in half precision; its helper is in the .cuh
plain_products.py        products with weights in full width:
plain_product.cu         for few rows; its helpers are in the .cuh
quantised_products.py    products with packed weights: quantised_product.cu
between_products.py      norms and rotations between them: residual_norm.cu, rotary_heads.cu
tensor_cores.cuh         what these multiply with that are for any tensor cores
"""
