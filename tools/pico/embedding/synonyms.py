"""Words that mean the same, or name the kind of a thing, so that sentences about one event share few words."""

from tools.pico.draw import Draw

SAME = {
    "little": ("little", "small", "tiny"),
    "big": ("big", "large", "huge"),
    "sad": ("sad", "unhappy", "upset", "in tears", "full of sorrow"),
    "happy": ("happy", "glad", "joyful", "pleased", "cheerful", "delighted"),
    "found": ("found", "discovered", "spotted", "came across"),
    "lost": ("lost", "misplaced", "could not find", "was missing", "had no idea what became of"),
    "broke": ("broke", "got damaged", "cracked", "fell to pieces", "snapped"),
    "fixed": ("fixed", "repaired", "mended", "put together again", "restored"),
    "afraid": ("afraid", "scared", "frightened", "fearful", "terrified"),
    "cook": ("make", "cook", "prepare", "bake"),
    "go": ("go to", "travel to", "visit", "reach", "journey to", "see"),
    "helped": ("helped", "assisted", "came to the aid of", "gave a hand to", "supported"),
    "friend": ("friend", "companion", "pal", "neighbor"),
    "gave": ("gave", "handed", "offered", "brought", "lent"),
    "needed": ("needed", "lacked", "had run out of", "did not have", "was short of"),
    "stuck": ("stuck", "caught", "trapped", "out of reach"),
    "grow": ("grow", "plant", "raise"),
    "dark": ("dark", "gloomy", "black"),
    "tired": ("tired", "weary", "exhausted"),
    "thanked": ("thanked", "was grateful to", "said thanks to"),
    "looked": ("looked", "searched", "hunted"),
    "sleep": ("slept", "went to bed", "fell asleep"),
    "ate": ("ate", "had a meal of", "enjoyed"),
    "windy": ("windy", "stormy", "breezy"),
    "child": ("child", "kid", "youngster"),
}

KINDS = {
    "toy": ("toy", "plaything", "thing"),
    "animal": ("animal", "creature"),
    "food": ("food", "dish", "meal", "something to eat"),
    "plant": ("plant", "something in the garden"),
    "vehicle": ("vehicle", "something to ride in"),
    "tool": ("tool",),
}


def same(draw: Draw, word: str) -> str:
    """A word or phrase that means the same as this one."""
    return draw.one(SAME[word])


def kind(draw: Draw, word: str) -> str:
    """A word for the kind of thing that this names."""
    return draw.one(KINDS[word])
