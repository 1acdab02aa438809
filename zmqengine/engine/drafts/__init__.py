"""What may come next: tokens that the model is asked to check instead of to find, several in one call.

speculation.py  who drafts in the next step, and how much: from proposals to widths
policy.py       which width makes the most tokens a second
step_costs.py   what a step of so many rows and such a width takes, measured
source.py       what a source of drafts is
ngrams.py       what followed the last time a row's last tokens stood in it

`engine/window.py` reads the drafts and says what of them is accepted.
"""
