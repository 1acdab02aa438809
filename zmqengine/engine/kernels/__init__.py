"""Kernels in CUDA C++, which MLX compiles at run time and keeps.

kernel_text.py           the source of a kernel, as short as it can be
drawing.py, draw.cu      drawing tokens
ragged_attention*.cu     attention of rows of unlike lengths
quantised_product.cu     products with quantised weights, for few rows; its helpers are in the .cuh
"""
