"""Addresses under which sandboxes reach a capture server. The programs are doubles that print what the real ones do."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from openenv.core.harness.capture.forwarding import (
    CloudflareForwarder,
    DirectExposure,
    ForwardingError,
    GradioForwarder,
    make_forwarder,
)


def program(folder: Path, script: str) -> str:
    """A program that stands for `cloudflared`."""
    path = folder / "cloudflared"
    path.write_text(f"#!{sys.executable}\nimport signal, sys\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_an_address_that_can_be_reached_anyway() -> None:
    with DirectExposure("10.0.0.5", "https") as forwarder:
        assert forwarder.start(8100) == forwarder.url == "https://10.0.0.5:8100"
        forwarder.preflight()
    assert forwarder.url is None
    assert forwarder.name == "DirectExposure"


def test_a_quick_tunnel_has_the_address_that_the_program_prints(tmp_path: Path) -> None:
    script = (
        "print('2026 INF Requesting new quick Tunnel on trycloudflare.com...', file=sys.stderr, flush=True)\n"
        "print('2026 INF |  https://some-random-words.trycloudflare.com  |', file=sys.stderr, flush=True)\n"
        "signal.pause()"
    )
    binary = program(tmp_path, script)
    with CloudflareForwarder(binary=binary, startup_timeout_s=20) as forwarder:
        assert forwarder.start(8100) == "https://some-random-words.trycloudflare.com"
        process = forwarder._process
        assert process is not None
        assert process.args == [binary, "tunnel", "--no-autoupdate", "--url", "http://127.0.0.1:8100"]
    assert process.poll() is not None
    assert forwarder.url is None
    forwarder.stop()


def test_a_tunnel_of_an_account_has_its_host_name(tmp_path: Path) -> None:
    binary = program(tmp_path, "signal.pause()")
    with CloudflareForwarder("mine", "capture.example.org", binary) as forwarder:
        assert forwarder.start(8100) == "https://capture.example.org"


@pytest.mark.parametrize("script", ["sys.exit(1)", "signal.pause()", "print('no address', flush=True); signal.pause()"])
def test_a_program_without_an_address_is_ended(tmp_path: Path, script: str) -> None:
    forwarder = CloudflareForwarder(binary=program(tmp_path, script), startup_timeout_s=0.3)
    with pytest.raises(ForwardingError, match="did not print an address"):
        forwarder.start(8100)
    assert forwarder._process is None


def test_what_is_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForwardingError, match="not on the PATH"):
        CloudflareForwarder.preflight("no-such-program")
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setitem(sys.modules, "gradio.networking", None)
    with pytest.raises(ForwardingError, match="gradio is required"):
        GradioForwarder().start(8100)
    with pytest.raises(ForwardingError, match="unknown port forwarder"):
        make_forwarder("carrier-pigeon")
    assert isinstance(make_forwarder("direct", advertise_host="h"), DirectExposure)
    assert isinstance(make_forwarder(), GradioForwarder)


def test_gradios_tunnel_is_closed_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    class Tunnel:
        def __init__(self, token: str) -> None:
            self.share_token = token
            self.proc = subprocess.Popen(
                [sys.executable, "-c", "import signal; print('started', flush=True); signal.pause()"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

        def kill(self) -> None:
            self.proc.terminate()

    tunnels: list[Tunnel] = []
    networking, tunneling = types.ModuleType("gradio.networking"), types.ModuleType("gradio.tunneling")

    def setup_tunnel(*, local_host: str, local_port: int, share_token: str, **options: object) -> str:
        assert options == {"share_server_address": "frp:7000", "share_server_tls_certificate": None}
        tunnels.append(Tunnel(share_token))
        return f"https://{local_host}-{local_port}.gradio.live"

    networking.setup_tunnel = setup_tunnel  # type: ignore[attr-defined]
    tunneling.CURRENT_TUNNELS = tunnels  # type: ignore[attr-defined]
    gradio = types.ModuleType("gradio")
    gradio.networking = networking  # type: ignore[attr-defined]
    for name, module in (("gradio", gradio), ("gradio.networking", networking), ("gradio.tunneling", tunneling)):
        monkeypatch.setitem(sys.modules, name, module)
    with GradioForwarder("frp:7000") as forwarder:
        assert forwarder.start(8100) == "https://127.0.0.1-8100.gradio.live"
    assert tunnels[0].proc.poll() is not None
    assert forwarder.url is None
