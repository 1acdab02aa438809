"""The words that stories and chats are made of."""


def _words(text: str) -> list[str]:
    return text.split()


BOYS = _words(
    """
    Tom Ben Max Leo Sam Finn Jack Noah Oscar Hugo Adam Felix Peter Omar Ravi Luca Karl Ivan Nils Theo
    """
)
GIRLS = _words(
    """
    Mia Lily Anna Emma Rosa Nora Clara Ella Zoe Ruby Ada Ivy Sara Lena Maya Eva Julia Alma Nina Olive
    """
)
NAMES = BOYS + GIRLS

ANIMALS = _words("fox rabbit bear mouse cat dog duck frog owl hedgehog squirrel pig goat turtle horse bird")
COLORS = _words("red blue green yellow brown white black pink gray golden")
SIZES = _words("little small young brave kind happy clever gentle curious quiet")
TOYS = _words(
    """
    ball kite boat drum doll train hat scarf cup basket bell book lamp key ring box coat flute spoon
    wagon
    """
)

HIDING_PLACES = [
    "under the bed",
    "behind the door",
    "in the garden",
    "under a big tree",
    "in the tall grass",
    "behind the house",
    "near the river",
    "in the kitchen",
    "under the table",
    "by the old gate",
]
HIGH_PLACES = ["in a tall tree", "on the roof", "on a high shelf", "on a high wall", "on top of the barn"]
REACHING_TOOLS = ["a ladder", "a long stick", "a rope", "a tall chair", "a big net"]
MENDING_TOOLS = ["some glue", "a piece of string", "a needle and thread", "a small hammer", "some tape"]
FOODS = ["a cake", "a pie", "some soup", "some bread", "a salad", "some jam"]
MISSING_FOODS = [
    "an egg",
    "some milk",
    "an apple",
    "some salt",
    "some honey",
    "some flour",
    "a carrot",
    "some butter",
]
PLANTS = ["a rose", "a bean", "a pumpkin", "a sunflower", "a tomato", "a tulip"]
SCARY_PLACES = ["the dark cave", "the old mill", "the deep forest", "the cold cellar", "the dark barn"]
COURAGE_GIFTS = ["a bright lamp", "a warm cloak", "a little candle", "a lucky stone", "a silver whistle"]
FAR_PLACES = ["the green island", "the red hill", "the little market", "the white castle", "the far shore"]
VEHICLES = ["a boat", "a cart", "a raft", "a wagon", "a sled"]
HOMES = [
    "in a village",
    "in a small town",
    "in a forest",
    "in a green valley",
    "in a house by the sea",
    "on a farm",
    "in a house on a hill",
    "near a lake",
]

_OTHER_WORDS = _words(
    """
    tree river house garden apple milk honey stone rope moon sun rain snow wind star hand day night
    """
)

# Made-up names are built of these, so that the model learns to copy a name that it has never seen.
SYLLABLES = _words("ba ko mi zu ra ne lo ti fa du pe shi wo ga hu be mo ku li sa te no vi ja")

# What a user may ask to have repeated: plain words, most of which the stories use too.
REPEATABLE = [*ANIMALS, *COLORS, *TOYS, *_OTHER_WORDS]
