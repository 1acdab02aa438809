"""The words that stories and chats are made of."""

BOYS = (
    "Tom Ben Max Leo Sam Finn Jack Noah Oscar Hugo Adam Felix Peter Omar Ravi Luca Karl Ivan Nils Theo".split()
)
GIRLS = (
    "Mia Lily Anna Emma Rosa Nora Clara Ella Zoe Ruby Ada Ivy Sara Lena Maya Eva Julia Alma Nina Olive".split()
)
NAMES = BOYS + GIRLS

ANIMALS = "fox rabbit bear mouse cat dog duck frog owl hedgehog squirrel pig goat turtle horse bird".split()
COLORS = "red blue green yellow brown white black pink gray golden".split()
SIZES = "little small young brave kind happy clever gentle curious quiet".split()

TOYS = "ball kite boat drum doll train hat scarf cup basket bell book lamp key ring box coat flute spoon wagon".split()
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
MISSING_FOODS = ["an egg", "some milk", "an apple", "some salt", "some honey", "some flour", "a carrot", "some butter"]
PLANTS = ["a rose", "a bean", "a pumpkin", "a sunflower", "a tomato", "a tulip"]
SCARY_PLACES = ["the dark cave", "the old mill", "the deep forest", "the cold cellar", "the dark barn"]
COURAGE_GIFTS = ["a bright lamp", "a warm cloak", "a little candle", "a lucky stone", "a silver whistle"]
FAR_PLACES = ["the green island", "the red hill", "the little market", "the white castle", "the far shore"]
VEHICLES = ["a boat", "a cart", "a raft", "a wagon", "a sled"]
HOMES = ["village", "town", "forest", "valley", "house by the sea", "farm", "house on a hill", "garden"]

# What a user may ask to have repeated: plain words, all of which the stories use too.
REPEATABLE = [
    *ANIMALS,
    *COLORS,
    *TOYS,
    *"tree river house garden apple milk honey stone rope boat moon sun rain snow wind star hand day night".split(),
]
