"""Speculative decoding: sources propose draft tokens, and the model verifies several in one call.

speculator.py   plans a verify block and learns from it: which rows draft, from which source, how wide
verify_block.py  the inputs of a verify block, and which of its draft tokens are accepted
acceptance.py   the moving average of a source's acceptance rate
costs.py        the cost of a verify block in plain steps
source.py       the interface of a source
predictions.py, ngrams.py, forced_runs.py, draft_model.py, head_drafts.py  the sources
importance.py  which tokens of a prompt matter, for prompts that are read in part
build.py        builds all this from an operator's options; vocabularies.py compares a draft model's with the target's
"""
