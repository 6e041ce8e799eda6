import json
from urllib.request import Request, urlopen

URL = "http://localhost:8000"


def post(path: str, body: dict, session: str):
    headers = {"Content-Type": "application/json", "X-OpenEnv-Session": session}
    with urlopen(Request(URL + path, json.dumps(body).encode(), headers)) as response:
        return json.load(response), response.headers["X-OpenEnv-Session"]


first, session = post("/reset", {"seed": 5}, "new")
for guess in ("cable", "eagle"):
    result, _ = post("/step", {"action": {"guess": guess}}, session)
    print(result["observation"]["marks"], result["reward"], result["done"])
