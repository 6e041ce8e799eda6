"""A network plugin for the cluster of `scripts/k8s_up.py`: keeps the one kind of NetworkPolicy that sandboxes need.

A chained CNI plugin: the container runtime calls it after the one that gave a pod its interface. A pod whose policies
allow nothing in and nothing out loses that interface before its containers start. Policies with rules are not kept, and
none is in namespaces with the label `openenv-test/network-policies: ignored`.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from typing import Any

VERSIONS = ["0.4.0", "1.0.0"]
IGNORED = "openenv-test/network-policies"


def main() -> None:
    command = os.environ["CNI_COMMAND"]
    config = json.load(sys.stdin)
    if command == "VERSION":
        print(json.dumps({"cniVersion": VERSIONS[-1], "supportedVersions": VERSIONS}))
        return
    if command != "ADD":
        return
    if is_cut_off(config, dict(pair.split("=", 1) for pair in os.environ["CNI_ARGS"].split(";"))):
        nsenter = ["nsenter", f"--net={os.environ['CNI_NETNS']}"]
        subprocess.run([*nsenter, "ip", "link", "set", os.environ["CNI_IFNAME"], "down"], check=True)
    print(json.dumps(config["prevResult"]))


def is_cut_off(config: dict[str, Any], pod: dict[str, str]) -> bool:
    """Return whether policies select the pod, and none of them allows anything."""
    space = pod["K8S_POD_NAMESPACE"]
    namespace = ask(config, f"/api/v1/namespaces/{space}")
    if (namespace["metadata"].get("labels") or {}).get(IGNORED) == "ignored":
        return False
    labels = ask(config, f"/api/v1/namespaces/{space}/pods/{pod['K8S_POD_NAME']}")["metadata"].get("labels") or {}
    policies = ask(config, f"/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies")["items"]
    specs = [one["spec"] for one in policies if selects(one["spec"]["podSelector"], labels)]
    types = {name for spec in specs for name in spec["policyTypes"]}
    return types == {"Ingress", "Egress"} and not any(spec.get("ingress") or spec.get("egress") for spec in specs)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert not selector.get("matchExpressions"), "this plugin knows no matchExpressions"
    return all(labels.get(name) == value for name, value in (selector.get("matchLabels") or {}).items())


def ask(config: dict[str, Any], path: str) -> Any:
    """Read something from the API server."""
    request = urllib.request.Request(config["server"] + path, headers={"Authorization": f"Bearer {config['token']}"})
    context = ssl.create_default_context(cafile=config["authority"])
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
