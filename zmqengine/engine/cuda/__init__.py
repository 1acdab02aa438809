"""Kernels in CUDA C++, which MLX compiles at run time and keeps.

kernel_text.py           the source of a kernel, as short as it can be
resident.py              small arrays that every kernel of a step reads, kept on the device
kv_kernels.py            what KV caches need of the device: rows moved in place by move_rows.cu
drawing.py, draw.cu      drawing tokens
ragged_attention*.cu     attention of rows of unlike lengths; how it ends is in the .cuh
window_attention.cu      the same for several tokens of a row, in half precision; its helper is in the .cuh
plain_products.py        products with weights in full width:
plain_product.cu         for few rows; its helpers are in the .cuh
wide_product*.cu         for any number, on a Hopper; its helpers are in the .cuh
quantised_product.cu     products with quantised weights
between_products.py      what a layer does between them: residual_norm.cu, rotary_heads.cu
tensor_cores.cuh         what these multiply with that are for any tensor cores
"""
