"""Kernels in CUDA C++, compiled at the first start on a machine and kept on disk.

cuda_ops.py              `Ops` of a decoder layer: chooses a kernel for each operation
kernel_text.py           the source of a kernel, without comments
kernel.py                `Kernel`: a kernel of MLX, and its text as MLX generates it
kernel_cache.py          compiled kernels on disk, where MLX looks for them
nvrtc.py                 the compiler; mlx_types.cuh: types of what MLX passes to a kernel
resident.py              small arrays that every kernel of a step reads, kept on the device
kv_kernels.py            `KVKernels`: rows of a batch moved in place by move_rows.cu
draw_kernel.py           the draw of tokens from logits: draw.cu
attention_in_place.py    attention that writes into the cache, and its place in the trace of a layer
attention.py             attention of a step and of chunks of prompts:
ragged_attention*.cu     rows of unlike lengths, each token by itself; the .cuh has the reduction at its end
window_attention.cu      heads in half precision, by tensor cores: few queries of a row (window_attention.cuh) and many
                         (prompt_attention.cuh). Before it window_rows.cu, or window_packed.cu for packed_attention.py:
                         all segments of a packed step
plain_products.py        products of few rows with weights that are not quantised: few_rows.cu
quantised_products.py    products with quantised weights: quantised_product.cu, few_rows.cu for more rows, and
                         dequantise.cu for many; unpack.cuh takes weights out of a word
experts.py               mixtures of experts: experts_route.cu, few_rows.cu for the rows of each expert, experts_sum.cu
few_rows.cu              a product whose text begins with the rows (few_rows_all.cu, few_rows_experts.cu), goes on with
                         few_rows_begin.cu, and has the weights (few_rows_plain.cu, few_rows_packed.cu) before it
between_products.py      norms and rotations between them: residual_norm.cu, rotary_heads*.cu after rotary_rows.cu, or
                         after rotary_packed.cu for packed_attention.py
tensor_cores.cuh         instructions that every device with bfloat16 tensor cores has: products, copies, conversions;
                         those of copies in groups are in copies_ahead.cuh
"""
