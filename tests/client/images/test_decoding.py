"""Image files of strangers: pictures come out as a model should see them, everything else is refused by name."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import threading
import time
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


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"", more: bytes = b""
) -> bytes:
    """A PNG that says it has this size."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + more
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
    ("mode", "format_", "left", "right"),
    [
        ("L", "PNG", (76, 76, 76), (29, 29, 29)),
        ("1", "PNG", (255, 255, 255), (0, 0, 0)),
        ("P", "GIF", (255, 0, 0), (0, 0, 255)),
        ("L", "JPEG", (76, 76, 76), (29, 29, 29)),
        ("RGBA", "WEBP", (255, 0, 0), (0, 0, 255)),
        ("CMYK", "JPEG", (255, 0, 0), (0, 0, 255)),
    ],
)
def test_other_colours_become_rgb(
    mode: str, format_: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """Grey, black and white, palettes and inks."""
    made = (
        picture("L", (32, 16)).point(lambda value: 255 * (value > 50), "1")
        if mode == "1"
        else picture(mode, (32, 16))
    )
    options = {"quality": 100, "subsampling": 0} if format_ == "JPEG" else {"lossless": True}
    image = decode(saved(made, format_, **(options if format_ in ("JPEG", "WEBP") else {})))
    assert (image.mode, image.size) == ("RGB", (32, 16))
    for found, wanted in ((colour(image, 3, 8), left), (colour(image, 28, 8), right)):
        assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) <= 2


def test_inks_are_mixed() -> None:
    """Each ink takes its share of a color away, and black of all: Photoshop writes them inverted, as Pillow does."""
    inks = (200, 100, 20, 60)
    image = decode(saved(Image.new("CMYK", (16, 16), inks), "JPEG", quality=100))
    wanted = [255 * (1 - ink / 255) * (1 - inks[3] / 255) for ink in inks[:3]]
    assert max(abs(one - other) for one, other in zip(colour(image, 8, 8), wanted, strict=True)) <= 3


def test_sixteen_bits_are_scaled_instead_of_clipped() -> None:
    """Pillow alone makes every value over 255 white."""
    grey = Image.new("I;16", (4, 4), 0x4000)
    grey.putpixel((1, 1), 0x90FF)
    image = decode(saved(grey))
    assert (image.getpixel((0, 0)), image.getpixel((1, 1))) == ((0x40,) * 3, (0x90,) * 3)
    rows = b"".join(b"\0" + struct.pack(">HHH", 0x8000, 0x1000, 0xFFFF) * 2 for _ in range(2))
    assert decode(png(2, 2, depth=16, data=rows)).getpixel((1, 1)) == (0x80, 0x10, 0xFF)
    clear = decode(saved(grey, transparency=0x4000))
    assert (clear.getpixel((0, 0)), clear.getpixel((1, 1))) == ((255,) * 3, (0x90,) * 3)
    key = struct.pack(">HHH", 0x8000, 0x1000, 0xFFFF)
    other = b"\0" + key + struct.pack(">HHH", 0x8000, 0x1100, 0xFFFF)
    clear = decode(png(2, 1, depth=16, data=other, more=chunk(b"tRNS", key)))
    assert (clear.getpixel((0, 0)), clear.getpixel((1, 0))) == ((255,) * 3, (0x80, 0x11, 0xFF))


def test_what_is_transparent_is_white() -> None:
    """Black text on nothing would be black on black otherwise."""
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((0, 0), (9, 8, 7, 255))
    shown = decode(saved(image))
    assert (shown.getpixel((0, 0)), shown.getpixel((1, 1))) == ((9, 8, 7), (255, 255, 255))
    palette = picture("P")
    clear = decode(saved(palette, "GIF", transparency=palette.getpixel((0, 0))))
    assert clear.getpixel((0, 0)) == (255, 255, 255)


PEAK = """
import resource, sys
from zmqengine_client.images.decoding import decode
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
data = sys.stdin.buffer.read()
decode(data[: len(data) // 2])
before = peak()
assert decode(data[len(data) // 2 :]).size == (4000, 4000)
print(peak() - before)
"""


def test_a_transparent_picture_takes_memory_for_itself_and_its_result() -> None:
    """It took 19 bytes a pixel, a gigabyte for 50 megapixels, in each of two threads."""
    small, large = (saved(Image.new("RGBA", (side, side), (255, 0, 0, 99))) for side in (8, 4000))
    ran = subprocess.run(
        [sys.executable, "-c", PEAK],
        input=small.ljust(len(large), b"\0") + large,
        capture_output=True,
        check=True,
    )
    assert int(ran.stdout) < 12 * 4000 * 4000


@pytest.mark.parametrize(("depth", "row"), [(1, 0b0100_0000), (2, 0b0001_0000), (4, 0b0000_0001)])
def test_a_grey_that_is_transparent_is_white_at_any_depth(depth: int, row: int) -> None:
    """PNG optimisers write few bits a pixel, and an unused grey for transparent pixels."""
    key = chunk(b"tRNS", struct.pack(">H", 1))
    shown = decode(png(2, 1, depth=depth, colour=0, data=bytes([0, row]), more=key))
    assert (shown.getpixel((0, 0)), shown.getpixel((1, 0))) == ((0, 0, 0), (255, 255, 255))


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


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused(format_: str) -> None:
    """A model sees one picture, and which of them is meant only the user knows; a file of one frame is a picture."""
    other = Image.new("RGB", (24, 16), (0, 255, 0))
    with pytest.raises(BadRequest, match=f"the {format_} is an animation: send the frame"):
        decode(saved(picture(), format_, save_all=True, append_images=[other] * 3))
    assert decode(saved(picture(), format_, save_all=True)).size == (24, 16)


def test_a_camera_jpeg_of_several_views_is_its_first() -> None:
    """Multi-picture files have a depth map or a smaller copy behind the picture."""
    data = saved(picture(), "MPO", save_all=True, append_images=[picture("L").convert("RGB")], quality=100)
    assert colour(decode(data), 3, 8)[0] > 250


@pytest.mark.parametrize("format_", FORMATS)
def test_what_stands_behind_a_picture_is_not_read(format_: str) -> None:
    """A file may be an archive or a page too: only pixels go on, so the rest ends here."""
    data = saved(picture(), format_)
    assert decode(data + b"PK\3\4<script>" + saved(picture("L"))).tobytes() == decode(data).tobytes()


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


@pytest.mark.parametrize(
    ("format_", "at", "part"),
    [
        pytest.param("PNG", 33, chunk(b"tEXt", b"a\0b"), id="png, chunks"),
        pytest.param("JPEG", 2, b"\xff\xe1\0\x0aExif\0\0xy", id="jpeg, exif data that are joined"),
        pytest.param("JPEG", 2, b"\xff\xff\xff\xff", id="jpeg, fill"),
    ],
)
def test_a_file_of_many_small_parts_is_refused_at_once(format_: str, at: int, part: bytes) -> None:
    """Pillow reads them in Python for up to minutes; some are left as they are."""
    data = saved(picture(), format_)
    started_s = time.thread_time()
    with pytest.raises(BadRequest, match="save it again"):
        decode(data[:at] + part * (FILE_BYTES_MAX // len(part)) + data[at:])
    assert time.thread_time() - started_s < 2
    assert decode(data[:at] + part * 100 + data[at:]).size == (24, 16)


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


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "PA", "RGBa", "La", "RGBX"])
def test_a_pil_image_of_any_mode_is_its_picture(mode: str) -> None:
    """PNG has no such mode, and users of PIL need not know that: a JPEG for print opens as CMYK."""
    clear = "LA" if mode == "La" else "RGBA" if mode in ("RGBa", "RGBX") else "RGB"
    image = picture(clear).convert(mode)
    shown, wanted = decode(file_bytes(image)), picture(clear).convert("RGB")
    for across in (3, 20):
        pairs = zip(colour(shown, across, 8), colour(wanted, across, 8), strict=True)
        assert max(abs(one - other) for one, other in pairs) <= 2


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_a_pil_image_is_turned_as_its_file_is(format_: str) -> None:
    """A photo that was opened with PIL, and made smaller, is no other picture than its file."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(picture(size=(32, 16)), format_, exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        assert decode(file_bytes(opened)).tobytes() == decode(data).tobytes()
        assert decode(file_bytes(opened.resize((16, 8)))).size == (8, 16)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("a\0b", "cannot be read: embedded null"),
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
