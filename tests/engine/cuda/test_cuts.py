"""Products on CUDA are cut into blocks that fit the shared memory of a device."""

from __future__ import annotations

import pytest

from zmqengine.engine.cuda import experts, plain_products, quantised_products

pytestmark = pytest.mark.cuda_emulated

OUTPUTS = (64, 896, 4096, 4352, 6144, 8448, 8512, 16_896, 28_672, 256_000)


def test_every_cut_of_a_product_fits_the_shared_memory_of_a_device():
    """Twice on an H200; compute capability 8.6 has the least since 8.0. There is room for the sums at the end."""
    for rows in range(1, plain_products.FEW_ROWS_MAX + 1):
        for outputs in OUTPUTS:
            cut = plain_products.Cut.of(rows, outputs)
            assert rows <= 8 * cut.tiles
            assert 4 * plain_products.WARPS * 8 * cut.tiles * (cut.columns + 4) <= cut.shared_bytes()
            assert cut.shared_bytes() <= 99 << 10


def test_every_cut_of_packed_weights_and_experts_fits_it_too():
    """With as many bits as there are."""
    for bits in (0, 4, 8):
        cuts = [experts._cut(mean, bits) for mean in (1, 8, 9, 16, 17, 1000)]
        if bits:
            cuts += map(quantised_products.cut_of, range(1, quantised_products.ROWS_MAX + 1))
        for cut in cuts:
            assert 4 * plain_products.WARPS * 8 * cut.tiles * (cut.columns + 4) <= cut.shared_bytes(
                bits or 16
            )
            assert cut.shared_bytes(bits or 16) <= 99 << 10
