"""Cache rows are V4.1's own bytes, and give back exactly what they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepinfer.device import formats
from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer_ascend950.backend import Ascend950Backend

Emulate = Callable[..., Ascend950Backend]
ROUND_TRIPS = {
    CacheKind.WINDOW: formats.round_trip_a8,
    CacheKind.COMPRESSED: formats.round_trip_q4_e4m3,
    CacheKind.INDEX: formats.round_trip_q4_ue8m0,
}


@pytest.fixture(scope="module")
def backend(emulate: Emulate) -> Ascend950Backend:
    return emulate(Numerics.NORMATIVE)


@pytest.mark.parametrize(
    ("kind", "width", "row_bytes"),
    [(CacheKind.WINDOW, 512, 528), (CacheKind.COMPRESSED, 512, 288), (CacheKind.INDEX, 128, 68)],
)
def test_rows_take_the_published_bytes(
    backend: Ascend950Backend, kind: CacheKind, width: int, row_bytes: int
) -> None:
    cache = backend.create_cache(kind, 3, width)
    assert cache.row_bytes == backend.cache_row_bytes(kind, width) == row_bytes
    assert cache.byte_view(1, 2).shape == (2, row_bytes)
    assert (cache.num_rows, cache.width) == (3, width)


@pytest.mark.parametrize("kind", list(CacheKind))
@pytest.mark.parametrize("exponent", [-12, -9, -6, 0, 5, 9])
def test_values_of_a_record_survive_packing(
    backend: Ascend950Backend, kind: CacheKind, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(exponent + 100)
    x = torch.randn(200, 64, generator=generator) * 2.0**exponent
    x[0] = 0.0
    values = ROUND_TRIPS[kind](x.to(torch.bfloat16))
    cache = backend.create_cache(kind, 200, 64)
    slots = torch.randperm(200, generator=generator)
    cache.pack(slots, values)
    assert torch.equal(cache.unpack(slots), values)


def test_compressed_groups_whose_scale_does_not_come_back_survive_packing(
    backend: Ascend950Backend,
) -> None:
    """Groups of largest value 9 to 10 times 2^-9: a second pass would choose another scale."""
    amax = torch.linspace(8.0, 12.0, 257).to(torch.bfloat16) * 2.0**-9
    x = amax.unsqueeze(1) * torch.linspace(-1.0, 1.0, 16).to(torch.bfloat16)
    values = formats.round_trip_q4_e4m3(x)
    assert not torch.equal(formats.round_trip_q4_e4m3(values), values)
    cache = backend.create_cache(CacheKind.COMPRESSED, 257, 16)
    slots = torch.arange(257)
    cache.pack(slots, values)
    assert torch.equal(cache.unpack(slots), values)


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("kind", list(CacheKind))
def test_poisoned_rows_are_nan_and_their_neighbours_are_not(
    emulate: Emulate, numerics: Numerics, kind: CacheKind
) -> None:
    cache = emulate(numerics).create_cache(kind, 4, 32)
    cache.poison(torch.tensor([1, 3]))
    assert cache.unpack(torch.arange(4)).isnan().all(1).tolist() == [False, True, False, True]


def test_skipped_rows_change_nothing(backend: Ascend950Backend) -> None:
    cache = backend.create_cache(CacheKind.WINDOW, 3, 32)
    cache.store(torch.tensor([-1, 1, -1]), torch.ones(3, 32, dtype=torch.bfloat16))
    assert cache.unpack(torch.arange(3))[:, 0].tolist() == [0.0, 1.0, 0.0]


def test_bytes_beyond_the_rows_are_not_shown(backend: Ascend950Backend) -> None:
    cache = backend.create_cache(CacheKind.INDEX, 3, 32)
    with pytest.raises(ContractError, match=r"rows 2\.\.3 of a cache of 3 rows"):
        cache.byte_view(2, 2)
