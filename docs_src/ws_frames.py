import json

from websockets.sync.client import connect

with connect("ws://localhost:8000/ws", proxy=None) as socket:
    for frame in (
        {"type": "reset", "data": {"seed": 5}},
        {"type": "step", "data": {"guess": "cable"}},
        {"type": "step", "data": {"guess": "no"}},
        {"type": "state"},
    ):
        socket.send(json.dumps(frame))
        reply = json.loads(socket.recv())
        print(reply["type"], reply["data"].get("code", ""))
    socket.send(json.dumps({"type": "close"}))
