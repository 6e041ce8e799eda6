import json

from websockets.sync.client import connect

with connect("ws://localhost:8000/harness", proxy=None) as socket:
    print(json.loads(socket.recv())["data"]["harness"])
    for text in ("apple pear", "plum"):
        socket.send(json.dumps({"type": "message", "content": text}))
        event = {"type": ""}
        while event["type"] not in ("turn_complete", "error"):
            event = json.loads(socket.recv())
            print(event["type"], event["data"])
