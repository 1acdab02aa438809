"""Kernels in CUDA C++, compiled at the first start on a machine and kept on disk.

cuda_ops.py              `Ops` of a decoder layer: chooses a kernel for each operation
kernel_text.py           the source of a kernel, without comments
kernel.py                `Kernel`: a kernel of MLX, and its text as MLX generates it
kernel_cache.py          compiled kernels on disk, where MLX looks for them
nvrtc.py                 the compiler; mlx_types.cuh: types of what MLX passes to a kernel
resident.py              small arrays that every kernel of a step reads, kept on the device
draw_kernel.py           the draw of tokens from logits: draw.cu
slot_storage.py          arrays of slots: write_columns.cu writes columns in place, read_columns.cu copies them
slot_attention.py        attention of a step over slots: the places of its tokens, and the tiles of its queries
attention.py             its kernel, by tensor cores: attention.cu with attention_whole.cu, or attention_part.cu and
                         attention_join.cu where thread blocks share the columns of a row. Few queries of a row are in
                         few_queries.cuh, many in many_queries.cuh; join_warps.cuh is the reduction at the end
plain_products.py        products of few rows with weights that are not quantised: few_rows.cu
quantised_products.py    products with quantised weights: quantised_product.cu, few_rows.cu for more rows, and
                         dequantise.cu for many; unpack.cuh takes weights out of a word
experts.py               mixtures of experts: experts_route.cu, few_rows.cu for the rows of each expert, experts_sum.cu
few_rows.cu              a product whose text begins with the rows (few_rows_all.cu, few_rows_experts.cu), goes on with
                         few_rows_begin.cu, and has the weights (few_rows_plain.cu, few_rows_packed.cu) before it
between_products.py      norms and rotations between them: residual_norm.cu, and rotary_heads.cu, which writes keys and
                         values into slots
slot_recurrence.py       recurrent layers of a step over the states of all rows, drafts and what is accepted of them
recurrence.py            its kernels: delta_heads.cu and delta_rule.cu for the gated delta rule, and short_conv.cu;
                         recurrent_piece.cuh says which tokens a row has
tensor_cores.cuh         instructions that every device with bfloat16 tensor cores has: products, copies, conversions;
                         those of copies in groups are in copies_ahead.cuh
"""
