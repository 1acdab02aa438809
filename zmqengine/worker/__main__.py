"""`python -m zmqengine.worker`: one worker process, as its supervisor starts it."""

import os
import sys

from zmqengine.config import WorkerConfig
from zmqengine.worker.main import serve
from zmqengine.worker.process.parent import EXIT_USAGE, WORKER_CONFIG

if __name__ == "__main__":
    if sys.argv[1:]:
        print("zmqengine.worker: takes no options; zmqengine worker does", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    sys.exit(serve(WorkerConfig.from_json(os.environ.pop(WORKER_CONFIG, "{}"))))
