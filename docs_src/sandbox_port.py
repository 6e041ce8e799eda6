import http.server
import socketserver
import tempfile
import threading
from pathlib import Path

from openenv.sandboxes import LocalSandboxes


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello from the host")

    def address_string(self) -> str:
        return "sandbox"

    def log_message(self, *args: object) -> None:
        pass


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "socket")
    with Server(str(path), Hello) as server, LocalSandboxes().open() as sandbox:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = sandbox.expose(path, port=8080)  # the only address reachable from inside
        fetch = f"import urllib.request as r; print(r.urlopen('{url}').read().decode())"
        print(sandbox.exec(["python3", "-c", fetch]).stdout, end="")
        server.shutdown()
