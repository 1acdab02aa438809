"""A worker as an engine of the SMG gateway: over its MLX gRPC service, or over its direct ZeroMQ wire.

`zmqengine smg --worker NAME --listen HOST:PORT` serves gRPC, `--engine ipc://PATH` the ZeroMQ wire. README.md
beside this file lists the parameters that the gateway may send and those that are refused.
"""

from zmqengine_smg.config import SmgConfig
from zmqengine_smg.run import run

__all__ = ["SmgConfig", "run"]
