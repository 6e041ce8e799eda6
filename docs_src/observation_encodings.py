from __future__ import annotations

import math
from typing import Any

import numpy as np

from openenv import Observation
from openenv.core.env_server.serialization import serialize_observation


class Camera(Observation):
    raw: bytes
    pixels: Any
    depth: float


print(serialize_observation(Camera(raw=b"\x00\xff", pixels=np.zeros((2, 2)), depth=math.nan, reward=math.inf)))
