"""Runs a real Kubernetes cluster of one node on this machine, without a registry, systemd or an installation.

    scripts/k8s_up.py                    a cluster until Ctrl-C
    scripts/k8s_up.py bash               a shell with KUBECONFIG and kubectl; the cluster ends with it
    scripts/k8s_up.py pytest -m k8s      what `make test-k8s` does

    etcd <── kube-apiserver <── kube-controller-manager, kube-scheduler, kube-proxy
                    └── kubelet ──> containerd ──> runc: pods in 10.204.0.0/16, services in 10.203.0.0/16

The cluster and the command live in process, network and mount namespaces of their own: no port, interface, firewall
rule or mount of this machine is touched, and when the first process of the namespaces ends, the kernel ends all others.
What is left then are control groups and .k8s/run-PID, which this script removes, also those of runs that were killed.
There is no DNS in the cluster, and no way out of it. Images: those of `k8s_images.py`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from k8s_images import PAUSE, REPOSITORY, write_images

FOLDER = REPOSITORY / ".k8s"
NODE, NODE_IP = "node-1", "172.31.255.1"
PODS, SERVICES, API_IP = "10.204.0.0/16", "10.203.0.0/16", "10.203.0.1"
PORT = 6443
HERE = Path("/run/k8s")
"""The folder of the run, as the processes of the cluster see it."""
GROUP = "openenv-k8s-"
READY_S = 180.0
TOOLS = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "ip", "iptables", "nsenter", "mount")
NEWNS, NEWPID, NEWNET = 0x00020000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
# What a kubelet sets on its machine. It sees these files instead, so that this machine stays as it is.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
START = time.monotonic()


class ClusterFailure(RuntimeError):
    """The cluster cannot run, or a part of it ended."""


def say(text: str) -> None:
    print(f"k8s-up: {text} ({time.monotonic() - START:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run in the cluster's network")
    command: list[str] = parser.parse_args().command
    try:
        check_machine()
        subprocess.run([REPOSITORY / "scripts" / "k8s-build"], check=True)
        remove_leftovers()
        say("writing images")
        archive = write_images(FOLDER)
        return run_in_namespaces(archive, command)
    except (ClusterFailure, subprocess.CalledProcessError) as error:
        print(f"k8s-up: {error}", file=sys.stderr)
        return 1


def check_machine() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterFailure("a cluster needs Linux and root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        install = "apt-get install -y --no-install-recommends containerd runc iproute2 iptables"
        raise ClusterFailure(f"{', '.join(missing)} missing: {install}")


# -- outside: namespaces, and what is left after them ------------------------------------------------------------------


def run_in_namespaces(archive: Path, command: Sequence[str]) -> int:
    """Run the cluster as the first process of new namespaces; return the command's exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    run = FOLDER / f"run-{os.getpid()}"
    run.mkdir()
    if libc.unshare(NEWPID) != 0:
        raise ClusterFailure(f"process namespaces cannot be made: {os.strerror(ctypes.get_errno())}")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if libc.unshare(NEWNS | NEWNET) != 0:
                raise ClusterFailure(f"namespaces cannot be made: {os.strerror(ctypes.get_errno())}")
            status = LocalCluster(run, f"/{GROUP}{run.name.removeprefix('run-')}").run(archive, command)
        except (ClusterFailure, subprocess.CalledProcessError, OSError) as error:
            print(f"k8s-up: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            status = 130
        finally:
            sys.stdout.flush()
            os._exit(status)  # all other processes of the namespaces end with this one

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the cluster as well
    _, status = os.waitpid(child, 0)
    say("removing control groups and files")
    shutil.rmtree(FOLDER / "logs", ignore_errors=True)
    with contextlib.suppress(OSError):
        (run / "logs").rename(FOLDER / "logs")
    left = remove_run(run)
    if left:
        print(f"k8s-up: left behind: {', '.join(left)}", file=sys.stderr)
    return os.waitstatus_to_exitcode(status) or (1 if left else 0)


def remove_leftovers() -> None:
    """Remove what runs have left that were killed."""
    FOLDER.mkdir(exist_ok=True)
    for run in FOLDER.glob("run-*"):
        if not Path("/proc", run.name.removeprefix("run-")).exists():
            remove_run(run)


def remove_run(run: Path, within_s: float = 20.0) -> list[str]:
    """Remove the control groups and the folder of a run; return what could not be removed."""
    # runc makes groups in the hierarchy of version 2 as well, where there are both.
    places = [*hierarchies(), Path("/sys/fs/cgroup/unified")]
    groups = [one / f"{GROUP}{run.name.removeprefix('run-')}" for one in places]
    deadline = time.monotonic() + within_s
    while groups and time.monotonic() < deadline:
        for group in groups:
            for path, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):  # busy for some time after its last process
                    os.rmdir(path)
        groups = [group for group in groups if group.exists()]
        time.sleep(0.05)
    shutil.rmtree(run, ignore_errors=True)
    return [str(path) for path in (*groups, run) if path.exists()]


def hierarchies() -> list[Path]:
    """Return where control groups are made: one place with version 2, one per controller with version 1."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [one for one in root.iterdir() if one.name != "unified" and not one.is_symlink() and one.is_dir()]


# -- inside ------------------------------------------------------------------------------------------------------------


class LocalCluster:
    """The processes of a cluster; the first process of its namespaces runs it, and collects orphans.

    Args:
        run: The folder of this run.
        group: The control group under which all pods are.
    """

    def __init__(self, run: Path, group: str) -> None:
        self.run_folder = run
        self.group = group
        self.tokens = {name: os.urandom(16).hex() for name in ("admin", "controllers", "scheduler", "proxy", "node")}
        self.parts: dict[int, str] = {}
        self.processes: list[subprocess.Popen[bytes]] = []  # kept, else subprocess would wait for them itself
        self.ended: dict[int, int] = {}

    def run(self, archive: Path, command: Sequence[str]) -> int:
        """Start everything, run the command, return its exit status."""
        signal.signal(signal.SIGTERM, _stop)
        self.make_room()
        self.write_certificates()
        self.write_configuration()
        say("starting etcd, containerd and the API server")
        self.start("etcd", *ETCD)
        self.start("containerd", "--config", str(HERE / "containerd.toml"))
        self.start("kube-apiserver", *self.flags_of_api_server())
        self.wait_until("containerd", lambda: self.ctr("version", quiet=True))
        say("importing images")
        self.ctr("images", "import", str(archive))
        self.wait_until("kube-apiserver", lambda: self.ask("/readyz") is not None)
        say("starting controllers and the kubelet")
        self.start("kube-controller-manager", *CONTROLLERS)
        self.start("kube-scheduler", f"--kubeconfig={HERE}/scheduler.conf", "--leader-elect=false")
        self.start("kube-proxy", *PROXY)
        self.start("kubelet", *KUBELET)
        self.wait_until("kubelet", self.is_ready)
        version = json.loads(self.ask("/version") or "{}").get("gitVersion")
        say(f"Kubernetes {version} is ready; KUBECONFIG={HERE}/kubeconfig")
        return self.run_command(command)

    def run_command(self, command: Sequence[str]) -> int:
        if not command:
            print("k8s-up: Ctrl-C ends it", flush=True)
            return self.wait_for(None)
        path = f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}"
        names = {"KUBECONFIG": f"{HERE}/kubeconfig", "OPENENV_TEST_CLUSTER": str(HERE), "PATH": path}
        self.processes.append(subprocess.Popen(command, env={**os.environ, **names}))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
        return self.wait_for(self.processes[-1].pid)

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, name: str, *flags: str) -> None:
        program = name if name == "containerd" else str(FOLDER / "bin" / name)
        with (HERE / "logs" / f"{name}.log").open("wb") as log:
            part = subprocess.Popen([program, *flags], stdout=log, stderr=log, start_new_session=True)
        self.processes.append(part)
        self.parts[part.pid] = name

    def collect(self, *, wait: bool) -> None:
        """Take note of processes that ended; orphans of the whole cluster are among them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
                if pid == 0:
                    return
                if (name := self.parts.get(pid)) is not None:
                    log = (HERE / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
                    code = os.waitstatus_to_exitcode(status)
                    raise ClusterFailure("\n".join([f"{name} ended with {code}:", *log]))
                self.ended[pid] = os.waitstatus_to_exitcode(status)
                if wait:
                    return

    def wait_for(self, pid: int | None) -> int:
        """Wait for the end of the command."""
        while pid is None or pid not in self.ended:
            self.collect(wait=True)
        status = self.ended[pid]
        return status if status >= 0 else 128 - status

    def wait_until(self, name: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not holds():
            self.collect(wait=False)
            if time.monotonic() > deadline:
                log = (HERE / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
                raise ClusterFailure("\n".join([f"{name} is not ready after {READY_S:g} s:", *log]))
            time.sleep(0.2)

    def call(self, *command: str, quiet: bool = False) -> bool:
        """Run a command to its end; False, or an error that has its words, where it fails."""
        output = subprocess.PIPE if not quiet else subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT if not quiet else output)
        words = process.communicate()[0]
        if process.returncode != 0 and not quiet:
            raise ClusterFailure(f"{' '.join(command)}: {words.decode(errors='replace').strip()}")
        return process.returncode == 0

    def ctr(self, *words: str, quiet: bool = False) -> bool:
        return self.call("ctr", "--address", f"{HERE}/containerd.sock", "--namespace", "k8s.io", *words, quiet=quiet)

    def ask(self, path: str) -> str | None:
        """Read something from the API server; None where it does not answer with it."""
        headers = {"Authorization": f"Bearer {self.tokens['admin']}"}
        request = urllib.request.Request(f"https://127.0.0.1:{PORT}{path}", headers=headers)
        context = ssl.create_default_context(cafile=str(HERE / "ca.crt"))
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def is_ready(self) -> bool:
        """Return whether the node takes pods; before that, pods also need the namespace's service account."""
        node = json.loads(self.ask(f"/api/v1/nodes/{NODE}") or "{}")
        conditions = node.get("status", {}).get("conditions", [])
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return is_ready and self.ask("/api/v1/namespaces/default/serviceaccounts/default") is not None

    # -- files, mounts, network ----------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Mount what the cluster writes to in place of this machine's own, and bring up its network."""
        for name in ("logs", "containerd", "kubelet/seccomp", "var/upper", "var/work", "cni/bin", "sysctl"):
            (self.run_folder / name).mkdir(parents=True)
        self.call("mount", "--make-rprivate", "/")
        self.call("mount", "-t", "proc", "proc", "/proc")
        var = f"lowerdir=/var,upperdir={self.run_folder}/var/upper,workdir={self.run_folder}/var/work"
        self.call("mount", "-t", "overlay", "overlay", "-o", var, "/var")
        self.call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        HERE.mkdir()
        self.call("mount", "--bind", str(self.run_folder), str(HERE))
        for name, value in KERNEL_SETTINGS.items():
            copy = HERE / "sysctl" / name.replace("/", "-")
            copy.write_text(f"{value}\n")
            self.call("mount", "--bind", str(copy), f"/proc/sys/{name}")
        self.call("mount", "--make-rshared", "/")  # as a kubelet expects it
        self.call("ip", "link", "set", "lo", "up")
        self.call("ip", "address", "add", f"{NODE_IP}/32", "dev", "lo")
        # Before kube-proxy can turn a Service's address into a pod's, there must be some way to it.
        self.call("ip", "route", "add", SERVICES, "dev", "lo", "src", NODE_IP)
        for hierarchy in hierarchies():
            (hierarchy / self.group.lstrip("/")).mkdir(exist_ok=True)

    def write_certificates(self) -> None:
        """Write an authority, the certificate of the API server and its own for the kubelet, and the accounts' key."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec, rsa

        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        now = datetime.now(timezone.utc)
        authority = ec.generate_private_key(ec.SECP256R1())
        authority_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "openenv-k8s")])
        names: list[x509.GeneralName] = [x509.DNSName(one) for one in ("kubernetes.default.svc", "localhost")]
        names += [x509.IPAddress(ip_address(one)) for one in ("127.0.0.1", NODE_IP, API_IP)]
        server_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kube-apiserver")])
        for file in ("ca", "api", "api-kubelet"):
            subject = authority_name if file == "ca" else server_name
            key = authority if file == "ca" else ec.generate_private_key(ec.SECP256R1())
            builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority_name)
            builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
            builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=30))
            builder = builder.add_extension(x509.BasicConstraints(ca=file == "ca", path_length=None), critical=True)
            if file == "api":
                builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            certificate = builder.sign(authority, hashes.SHA256())
            (HERE / f"{file}.crt").write_bytes(certificate.public_bytes(pem))
            (HERE / f"{file}.key").write_bytes(
                key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
            )
        accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (HERE / "accounts.key").write_bytes(
            accounts.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
        )

    def write_configuration(self) -> None:
        groups = {
            "admin": ("admin", "system:masters"),
            "controllers": ("system:kube-controller-manager", ""),
            "scheduler": ("system:kube-scheduler", ""),
            "proxy": ("system:kube-proxy", "system:node-proxier"),
            "node": (f"system:node:{NODE}", "system:nodes"),
        }
        lines = [f'{self.tokens[key]},{user},{user},"{group}"' for key, (user, group) in groups.items()]
        (HERE / "tokens.csv").write_text("\n".join(lines) + "\n")
        for key in groups:
            name = "kubeconfig" if key == "admin" else f"{key}.conf"
            (HERE / name).write_text(json.dumps(self.kubeconfig(self.tokens[key]), indent=2))
        (HERE / "containerd.toml").write_text(CONTAINERD)
        (HERE / "kubelet.json").write_text(json.dumps(kubelet_configuration(self.group)))
        (HERE / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        self.write_network()

    def kubeconfig(self, token: str) -> dict[str, Any]:
        """Return a configuration for clients; it is JSON, and so YAML."""
        authority = base64.b64encode((HERE / "ca.crt").read_bytes()).decode()
        cluster = {"server": f"https://127.0.0.1:{PORT}", "certificate-authority-data": authority}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": "user", "namespace": "default"}}],
            "current-context": "local",
        }

    def write_network(self) -> None:
        """Give each pod an interface of its own whose other end is the node's, which routes; then policies."""
        for plugin in (FOLDER / "cni").iterdir():
            (HERE / "cni" / "bin" / plugin.name).symlink_to(plugin)
        policy = HERE / "cni" / "bin" / "openenv-policy"
        script = REPOSITORY / "scripts" / "k8s_network_policy.py"
        policy.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{script}"\n')
        policy.chmod(0o755)
        addresses = {
            "type": "host-local",
            "dataDir": str(HERE / "cni" / "addresses"),
            "ranges": [[{"subnet": PODS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        keeper = {"type": "openenv-policy", "server": f"https://127.0.0.1:{PORT}", "token": self.tokens["admin"]}
        plugins = [{"type": "ptp", "ipam": addresses}, {**keeper, "authority": str(HERE / "ca.crt")}]
        network = {"cniVersion": "0.4.0", "name": "k8s", "plugins": plugins}
        (HERE / "cni" / "10-k8s.conflist").write_text(json.dumps(network))

    def flags_of_api_server(self) -> list[str]:
        return [
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={NODE_IP}",
            f"--secure-port={PORT}",
            f"--tls-cert-file={HERE}/api.crt",
            f"--tls-private-key-file={HERE}/api.key",
            f"--client-ca-file={HERE}/ca.crt",
            f"--token-auth-file={HERE}/tokens.csv",
            f"--kubelet-client-certificate={HERE}/api-kubelet.crt",
            f"--kubelet-client-key={HERE}/api-kubelet.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-cluster-ip-range={SERVICES}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={HERE}/accounts.key",
            f"--service-account-signing-key-file={HERE}/accounts.key",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
        ]


ETCD = (
    "--data-dir=/run/etcd",
    "--listen-client-urls=http://127.0.0.1:2379",
    "--advertise-client-urls=http://127.0.0.1:2379",
    "--listen-peer-urls=http://127.0.0.1:2380",
    "--log-level=warn",
)
CONTROLLERS = (
    f"--kubeconfig={HERE}/controllers.conf",
    "--leader-elect=false",
    "--use-service-account-credentials",
    f"--service-account-private-key-file={HERE}/accounts.key",
    f"--root-ca-file={HERE}/ca.crt",
)
PROXY = (
    f"--kubeconfig={HERE}/proxy.conf",
    "--proxy-mode=iptables",
    f"--hostname-override={NODE}",
    f"--cluster-cidr={PODS}",
    # settings of the whole machine, not of this network
    "--conntrack-max-per-core=0",
    "--conntrack-min=0",
    "--conntrack-tcp-timeout-established=0",
    "--conntrack-tcp-timeout-close-wait=0",
)
KUBELET = (
    f"--config={HERE}/kubelet.json",
    f"--kubeconfig={HERE}/node.conf",
    "--container-runtime=remote",
    f"--container-runtime-endpoint=unix://{HERE}/containerd.sock",
    f"--root-dir={HERE}/kubelet",
    f"--cert-dir={HERE}/kubelet/pki",
    f"--seccomp-profile-root={HERE}/kubelet/seccomp",
    f"--volume-plugin-dir={HERE}/kubelet/volume-plugins",
    f"--hostname-override={NODE}",
    f"--node-ip={NODE_IP}",
)
CONTAINERD = f"""version = 2
root = "{HERE}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = "{HERE}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
disable_apparmor = true
tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{HERE}/cni/bin"
conf_dir = "{HERE}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


def kubelet_configuration(group: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": f"{HERE}/ca.crt"}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": group,
        "failSwapOn": False,
        "featureGates": {"SizeMemoryBackedVolumes": True},  # else a sandbox's files have no limit of their own
        "oomScoreAdj": 0,
        "resolvConf": f"{HERE}/resolv.conf",
        "makeIPTablesUtilChains": False,
        "readOnlyPort": 0,
        # A node that cannot pull must not collect its images, and nothing is to be evicted from a full disk.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "50Mi"},
    }


def _stop(number: int, frame: FrameType | None) -> None:
    raise ClusterFailure(f"stopped by signal {number}")


if __name__ == "__main__":
    sys.exit(main())
