"""The cluster of `scripts/k8s_up.py` for tests: namespaces, what is in them, and how its pods are killed."""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lightkube import Client, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment, ReplicaSet
from lightkube.resources.core_v1 import Namespace, Pod, Secret, Service, ServiceAccount
from lightkube.resources.networking_v1 import Ingress, NetworkPolicy
from lightkube.resources.rbac_authorization_v1 import Role, RoleBinding

from waiting import wait_until

T = TypeVar("T")
KINDS = (Pod, Service, Secret, Deployment, ReplicaSet, Ingress, NetworkPolicy)
IGNORE_POLICIES = {"openenv-test/network-policies": "ignored"}


def until(look: Callable[[], T | None], within_s: float = 60.0, *, what: str = "it") -> T:
    """Wait until `look` returns something true, and return that."""
    answer = wait_until(look, within_s, f"{what} did not happen", every_s=0.1)
    assert answer is not None
    return answer


class RealCluster:
    """A cluster whose node is this machine.

    Args:
        folder: Its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = Client(KubeConfig.from_file(folder / "kubeconfig"))

    @contextmanager
    def space(self, labels: Mapping[str, str] | None = None) -> Iterator[Space]:
        """Make a namespace, and remove it; before that, nothing may be in it."""
        name = f"test-{secrets.token_hex(4)}"
        self.client.create(Namespace(metadata=ObjectMeta(name=name, labels=dict(labels or {}))))
        space = Space(self, name)
        try:
            until(lambda: space.find(ServiceAccount, "default"), what="the namespace's account")
            yield space
            until(lambda: not space.left(), 180, what=f"the end of {space.left()}")
        finally:
            self.client.delete(Namespace, name)


class Space:
    """A namespace.

    Args:
        cluster: Where it is.
        name: Its name.
    """

    def __init__(self, cluster: RealCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def kubeconfig(self, path: Path, *, token: str | None = None) -> Path:
        """Write a configuration whose namespace this is."""
        config = json.loads((self.cluster.folder / "kubeconfig").read_text())
        config["contexts"][0]["context"]["namespace"] = self.name
        if token is not None:
            config["users"][0]["user"] = {"token": token}
        path.write_text(json.dumps(config))
        return path

    def list(self, kind: type[Any]) -> list[Any]:
        """Return the objects of a kind, the oldest first."""
        items = list(self.cluster.client.list(kind, namespace=self.name))
        return sorted(items, key=lambda one: (str(one.metadata.creationTimestamp), one.metadata.name))

    def find(self, kind: type[Any], name: str) -> Any:
        """Return an object, None where there is none."""
        try:
            return self.cluster.client.get(kind, name, namespace=self.name)
        except ApiError as error:
            if error.status.code != 404:
                raise
            return None

    def left(self) -> list[str]:
        """Return what users have made here, or caused to be made."""
        listed = [(kind.__name__, one) for kind in KINDS for one in self.list(kind)]
        return [
            f"{kind}/{one.metadata.name}"
            for kind, one in listed
            if getattr(one, "type", None) != "kubernetes.io/service-account-token"
        ]

    def pods(self, *, image: str | None = None) -> list[Any]:
        """Return the pods that are not being deleted."""
        pods = [pod for pod in self.list(Pod) if pod.metadata.deletionTimestamp is None]
        return [pod for pod in pods if image is None or pod.spec.containers[0].image == image]

    def delete_pod(self, name: str, *, grace_s: int = 0) -> None:
        self.cluster.client.delete(Pod, name, namespace=self.name, grace_period=grace_s)

    def kill_container(self, pod: Any) -> None:
        """Send SIGKILL to the first process of a pod's container; the kubelet starts it again."""
        name = pod.status.containerStatuses[0].containerID.rpartition("/")[2]
        pid = Path(f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{name}/init.pid").read_text()
        os.kill(int(pid), signal.SIGKILL)

    def token(self, rules: list[dict[str, Any]]) -> str:
        """Make an account with these rights and return its token."""
        name = f"user-{secrets.token_hex(4)}"
        client, metadata = self.cluster.client, ObjectMeta(name=name, namespace=self.name)
        client.create(ServiceAccount(metadata=metadata))
        client.create(Role.from_dict({"metadata": {"name": name, "namespace": self.name}, "rules": rules}))
        binding = {
            "metadata": {"name": name, "namespace": self.name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.name}],
        }
        client.create(RoleBinding.from_dict(binding))
        self.account = name

        def look() -> str | None:
            for secret in self.list(Secret):
                if (secret.metadata.annotations or {}).get("kubernetes.io/service-account.name") == name:
                    return str((secret.data or {}).get("token", ""))
            return None

        token = base64.b64decode(until(look, what="the account's token")).decode()
        # Pods of the account are refused until its token is entered there.
        until(lambda: client.get(ServiceAccount, name, namespace=self.name).secrets, what="the account's entry")
        return token
