"""One model and its batch: `interface.Engine`, made by MLX or faked. Nothing here knows sockets, sessions or threads.

interface.py           what the worker knows of an engine: rows, tokens, memory
engine_options.py      how an engine is to run: a part of the worker's options
opening.py             from a model's name to an engine; the worker calls this and nothing else
loader.py              loads a model and its tokenizer with mlx-lm
tokenizer_export.py    what a front-end needs of the tokenizer
fingerprint.py         tells one model from another by its numbers
generation_config.py   how the model's makers want tokens to be drawn
mlx_engine.py          the engine on MLX: one step is a decode of every row, then a chunk of prefill
gauges.py              what it tells of itself: rows, tokens, memory

row.py                 a request in the engine and how far it has come
prefill.py             reads prompts in bounded chunks
reading_order.py       who of those that read the same goes first
prompt_sizes.py        the few sizes of such chunks where each new one costs
pacing.py              how long such a chunk may be on this machine
step_clock.py          how long a step took, as far as that was its own doing
lanes.py               sorts rows that decode into batches of about the same length
padding.py             what it costs that rows of a batch are as long as its longest
decode.py              one batch: a model call a step, a token for each row
choosing.py            from the logits of a batch to its tokens
flight.py              a step on its way, and what becomes of it
window.py              several tokens a row in one step: drafts are read and accepted
drafts/                who proposes them, and how many are worth it
penalties.py           logit bias and penalties of the rows that use them
sampling.py            from logits to tokens and log-probabilities
random_bits.py         random numbers of a seed and an index
constraints/           output that follows a grammar: compiled, matched, masked

kv/                    all that is known of mlx-lm's caches
prompt_store/          prompts that were read once, kept within a budget
prompts_on_disk.py     what the worker knows of those on disk

device/                what is set, changed and chosen for the device that computes
kernels/               what we have of our own for CUDA
shapes_warm_up.py      prompts of every usual size, read once
warm_up.py             what traffic will need, done before anybody waits for it
probe.py               what a model can do, found out at the start
rounding.py            tells another rounding from another result
memory.py              what MLX may hold, and the limit on wired memory
backend.py             which of MLX's backends computes
blas.py, elf.py        a tuned BLAS for MLX on a CPU
machine_report.py      what MLX and this machine can do, for people
mlx_lm_border.py       all that is imported of mlx-lm

fake_engine.py         an engine without a model, for tests
fake_faults.py         what goes wrong in it, on demand
fake_prompt_cache.py   what it remembers
fake_tokenizer.py      its tokenizer
"""
