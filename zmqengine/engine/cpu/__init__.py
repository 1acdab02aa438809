"""The back-end for CPUs: NumPy for models in float32.

MLX computes exp for one number at a time on x86, 15 ns each: softmax took 60 % of a chunk of a long prompt. It
multiplies one token by weights as it does many: BLAS copies the weights first, which takes as long as the product.
NumPy calls BLAS for a vector, which reads them once, has a vectorised exp, and writes into slots in place.
"""
