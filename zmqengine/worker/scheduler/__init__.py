"""The scheduler: which request runs next, which waits, which is preempted, and why. Start with `scheduler.py`.

scheduler.py       the decision before each step: grow, remove, admit, preempt
policy.py          the order of service, and which row is preempted
fair_queue.py      weighted fair queueing between the flows of one class
indexed_heap.py    the heap of the fair queue
memory_ledger.py   KV cache memory: reservations of rows, and the rest for the prefix cache
rates.py           measured speed of service, and estimates from it
recovery.py        the order in which rows return after a failed step
batching_delay.py  how long an idle worker waits for more requests before it starts a batch
"""
