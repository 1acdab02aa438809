"""Images to the patches and tokens that a model takes, by its vision card. Needs Pillow and numpy, the extra `vision`.

sources.py     paths, bytes, data URLs and PIL images to the bytes of a file
orientation.py  the way a camera was held
decoding.py    bytes of a file to pixels, within bounds
sizes.py       sizes and tiles of an image, by the rules of SPEC.md
preparing.py   an image to patches and their hash, remembered by the content of its file
image_body.py  the message of an image, around its patches
prompt_image.py  an image of a request, and the commands about it
prompts.py     messages with images to a chat template's, and its placeholders to tokens
threads.py     the threads for all of that, off every event loop
"""
