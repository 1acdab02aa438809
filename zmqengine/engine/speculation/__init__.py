"""Speculative decoding: sources propose draft tokens, and the model verifies several in one call.

speculation.py  who drafts in the next step, and how much: from proposals to widths
policy.py       which width makes the most tokens a second
allowance.py    what drafts may cost, where they lose
step_costs.py   what a step of so many rows and such a width takes, measured
source.py       what a source of drafts is
predictions.py  what the sender of a request expects
forced_runs.py  what a grammar leaves no choice about
draft_model.py  what a smaller model would say; same_words.py: whether it has the same words
opening.py      from what an operator asked for to sources and policy
start_costs.py  what widths cost at the start
ngrams.py       what followed the last time a row's last tokens stood in it
chances.py      how often what a text foretells comes true

`engine/speculation/verify_block.py` reads the drafts and says what of them is accepted.
"""
