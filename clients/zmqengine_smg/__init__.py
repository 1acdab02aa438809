"""A worker as an engine of the SMG gateway, over the gateway's MLX gRPC service.

`zmqengine smg --worker NAME --listen HOST:PORT` serves it. README.md beside this file lists the parameters that the
gateway may send and those that are refused.
"""

from zmqengine_smg.config import SmgConfig
from zmqengine_smg.run import run

__all__ = ["SmgConfig", "run"]
