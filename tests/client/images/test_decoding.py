"""Image files of strangers: pictures come out as a model should see them, everything else is refused by name."""

from __future__ import annotations

import io
import random
import struct
import threading
import tracemalloc
import zlib

import pytest
from PIL import Image

from zmqengine.errors import BadRequest, TooLarge
from zmqengine_client.images.decoding import PIXELS_MAX, SCANS_MAX, decode
from zmqengine_client.images.sources import FILE_BYTES_MAX, base64_bytes, data_url_bytes, file_bytes

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def picture(mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> Image.Image:
    """A picture with a red left half and a blue right one."""
    image = Image.new("RGB", size, (255, 0, 0))
    image.paste((0, 0, 255), (size[0] // 2, 0, size[0], size[1]))
    return image.convert(mode)


def saved(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    """The picture as a file."""
    written = io.BytesIO()
    image.save(written, format_, **options)
    return written.getvalue()


def colour(image: Image.Image, across: int, down: int) -> tuple[int, ...]:
    """Red, green and blue of a pixel."""
    found = image.getpixel((across, down))
    assert isinstance(found, tuple)
    return found


def png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG that says it has this size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_gives_its_picture(format_: str) -> None:
    """PNG, JPEG, WebP and GIF."""
    image = decode(saved(picture(), format_))
    assert (image.mode, image.size) == ("RGB", (24, 16))
    left, right = colour(image, 3, 8), colour(image, 20, 8)
    assert left[0] > 200 > 60 > left[2]
    assert right[2] > 200 > 60 > right[0]


@pytest.mark.parametrize(
    ("mode", "format_"),
    [("L", "PNG"), ("1", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("RGBA", "WEBP"), ("L", "JPEG")],
)
def test_other_colours_become_rgb(mode: str, format_: str) -> None:
    """Grey, black and white, palettes and inks."""
    image = decode(saved(picture(mode), format_))
    assert (image.mode, image.size) == ("RGB", (24, 16))


def test_sixteen_bits_are_scaled_instead_of_clipped() -> None:
    """Pillow alone makes every value over 255 white."""
    grey = Image.new("I;16", (4, 4), 0x4000)
    assert decode(saved(grey)).getpixel((0, 0)) == (0x40, 0x40, 0x40)
    rows = b"".join(b"\0" + struct.pack(">HHH", 0x8000, 0x1000, 0xFFFF) * 2 for _ in range(2))
    assert decode(png(2, 2, depth=16, data=rows)).getpixel((1, 1)) == (0x80, 0x10, 0xFF)


def test_what_is_transparent_is_white() -> None:
    """Black text on nothing would be black on black otherwise."""
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((0, 0), (9, 8, 7, 255))
    shown = decode(saved(image))
    assert (shown.getpixel((0, 0)), shown.getpixel((1, 1))) == ((9, 8, 7), (255, 255, 255))
    palette = picture("P")
    clear = decode(saved(palette, "GIF", transparency=palette.getpixel((0, 0))))
    assert clear.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_says(orientation: int) -> None:
    """As PIL's own exif_transpose turns it."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture(), "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        expected = ImageOps.exif_transpose(opened)
        assert decode(data).tobytes() == expected.convert("RGB").tobytes()


def test_an_animation_is_its_first_frame() -> None:
    """GIF and WebP."""
    for format_ in ("GIF", "WEBP"):
        other = Image.new("RGB", (24, 16), (0, 255, 0))
        data = saved(picture(), format_, save_all=True, append_images=[other] * 3)
        assert colour(decode(data), 3, 8)[0] > 200


SVG = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(SVG, "none of PNG, JPEG, WEBP, GIF", id="svg"),
        pytest.param(saved(picture(), "BMP"), "none of PNG, JPEG, WEBP, GIF", id="bmp"),
        pytest.param(saved(picture(), "TIFF"), "none of PNG", id="tiff"),
        pytest.param(b"%PDF-1.7" + saved(picture()), "none of PNG", id="polyglot"),
        pytest.param(saved(picture())[:60], "the PNG image is damaged", id="truncated png"),
        pytest.param(
            saved(picture(size=(200, 200)), "JPEG")[:900], "the JPEG image is damaged", id="truncated jpeg"
        ),
        pytest.param(saved(picture(), "WEBP")[:40], "the WEBP image is damaged", id="truncated webp"),
        pytest.param(b"GIF89a", "the GIF image is damaged", id="head of a gif"),
        pytest.param(
            b"\xff\xd8\xff" + SVG, "the JPEG image is damaged", id="svg behind a jpeg's first bytes"
        ),
        pytest.param(png(0, 4), "damaged|no pixels", id="no width"),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, reason: str) -> None:
    """The format is what the first bytes say, whatever a name or a type claimed."""
    with pytest.raises(BadRequest, match=reason):
        decode(data)


def webp_of(width: int, height: int) -> bytes:
    """The header of an extended WebP of this size."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png(50_000, 50_000), id="png"),
        pytest.param(png(1, PIXELS_MAX + 1), id="narrow png"),
        pytest.param(webp_of(16_383, 16_383), id="webp"),
        pytest.param(b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\0\0\0," + bytes(20), id="gif"),
        pytest.param(
            b"\xff\xd8\xff\xc0"
            + struct.pack(">HBHHB", 11, 8, 65_500, 65_500, 1)
            + b"\1\x11\0"
            + b"\xff\xda\0\x08",
            id="jpeg",
        ),
    ],
)
def test_a_bomb_takes_no_memory(data: bytes) -> None:
    """The size in the header decides before a pixel has memory."""
    tracemalloc.start()
    try:
        with pytest.raises((TooLarge, BadRequest)):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each scan of a few bytes costs a pass over all pixels; markers behind the image's end do not count."""
    data = saved(picture(size=(64, 64)), "JPEG", progressive=True)
    scans = data.count(b"\xff\xda")
    assert scans > 5
    last = data.rindex(b"\xff\xda")
    bomb = data[:last] + data[last:-2] * (SCANS_MAX + 1) + data[-2:]
    with pytest.raises(BadRequest, match="scans"):
        decode(bomb)
    assert decode(data + b"\xff\xda\0\x02" * 2 * SCANS_MAX).size == (64, 64)


@pytest.mark.slow
def test_ten_thousand_damaged_files_are_pictures_or_refused(recwarn: pytest.WarningsRecorder) -> None:
    """Bytes changed, cut out, doubled and swapped between files: no other exception comes out, and no thread hangs."""
    seeds = [saved(picture(mode), format_) for mode, format_ in (
        ("RGB", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG"), ("RGB", "JPEG"), ("CMYK", "JPEG"),
        ("RGB", "WEBP"), ("RGBA", "WEBP"), ("P", "GIF"),
    )]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds += [
        saved(picture(), "JPEG", progressive=True, exif=exif),
        saved(picture(), "GIF", save_all=True, append_images=[picture("L")]),
        saved(picture(), "WEBP", lossless=True, exif=exif),
    ]
    chance = random.Random(34)
    shown = refused = 0
    for _ in range(10_000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            damage(data, seeds, chance)
        try:
            image = decode(bytes(data))
        except (BadRequest, TooLarge):
            refused += 1
        else:
            assert image.mode == "RGB"
            assert image.width * image.height <= PIXELS_MAX
            shown += 1
    assert shown > 500
    assert refused > 2000
    assert threading.active_count() < 20


def damage(data: bytearray, seeds: list[bytes], chance: random.Random) -> None:
    """Damage a file in place."""
    at = chance.randrange(len(data))
    kind = chance.randrange(6)
    if kind == 0:
        data[at] = chance.randrange(256)
    elif kind == 1:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 2:
        del data[at : at + chance.randint(1, 64)]
    elif kind == 3:
        data[at:at] = data[at : at + chance.randint(1, 64)]
    elif kind == 4:
        other = chance.choice(seeds)
        data[at:at] = other[chance.randrange(len(other)) :][: chance.randint(1, 64)]
    else:
        data[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
    data[:] = data or b"\0"


# --- sources -----------------------------------------------------------------------------------------------


def test_an_image_comes_as_a_path_bytes_a_data_url_or_a_pil_image(tmp_path) -> None:
    """Each is the same picture."""
    import base64

    data = saved(picture())
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.encodebytes(data).decode()
    for given in (path, str(path), data, bytearray(data), memoryview(data), url, picture()):
        assert decode(file_bytes(given)).tobytes() == picture().tobytes()


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("https://example.org/a.png", "fetch a URL yourself"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,!!!", "not valid base64"),
        ("data:image/png;base64,", "empty"),
        (b"", "empty"),
        ("/no/such/file.png", "cannot be read: No such file"),
        (7, "not int"),
    ],
)
def test_what_is_no_image_is_refused(image, reason: str) -> None:
    """With what an image is."""
    with pytest.raises(BadRequest, match=reason):
        file_bytes(image)


def test_a_file_that_is_too_long_is_refused_before_it_is_decoded(tmp_path) -> None:
    """Bytes, base64 and a path, of which no more is read than the bound."""
    path = tmp_path / "long.png"
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX * 100)
    text = "A" * (FILE_BYTES_MAX * 4 // 3 + 8)
    for given in (bytes(FILE_BYTES_MAX + 1), path, f"data:image/png;base64,{text}"):
        with pytest.raises(TooLarge, match="make it smaller"):
            file_bytes(given)
    with pytest.raises(TooLarge):
        base64_bytes(text)
    with pytest.raises(BadRequest):
        data_url_bytes("data:")
